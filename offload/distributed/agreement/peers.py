"""The ranks of one optimizer: who leads them, what they are called, and the names of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

FIRST_SIGN: Final = "0"
"""First sign of progress of a rank in an exchange or a seal."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that train into one store, as one of them knows them."""

    rank: int
    """This rank, from 0."""

    size: int
    """Number of ranks."""

    timeout_s: float
    """Seconds without a sign of progress after which a rank counts as lost."""

    leader: int = 0
    """Rank that decides for all: rank 0 until the store is open, then the store's writer."""

    hosts: tuple[str, ...] = ()
    """Name of each rank's host; empty as long as it is not known."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == self.leader

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def name(self, rank: int) -> str:
        """Return a rank in words: ``rank 2 on node-b``."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"


def names(ranks: Iterable[int]) -> str:
    """Return ranks in words: ``rank 2``, ``ranks 1 to 3``, ``ranks 0, 2 to 4 and 7``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs:
        if len(run) > 2:
            texts.append(f"{run[0]} to {run[-1]}")
        else:
            texts += map(str, run)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed(texts)}"


def listed(texts: Sequence[str]) -> str:
    """Return texts as a list in words: ``a, b and c``."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def exchange_scope(number: int) -> str:
    """Return the name of an exchange, which begins its keys."""
    return f"exchange/{number}"


def seal_scope(number: int) -> str:
    """Return the name of a seal, which begins its keys."""
    return f"seal/{number}"


def key(scope: str, what: str, rank: int | None = None) -> str:
    """Return the key of a message."""
    return f"{scope}/{what}" if rank is None else f"{scope}/{what}/{rank}"


def sign_key(scope: str, rank: int) -> str:
    """Return the key under which a rank counts its signs of progress."""
    return key(scope, "sign", rank)


def begun_key(scope: str) -> str:
    """Return the key under which a rank notes where it was when it began."""
    return key(scope, "begun")


def error_key(scope: str) -> str:
    """Return the key of an error that a rank has announced."""
    return key(scope, "error")
