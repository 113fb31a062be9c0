"""The ranks of one optimizer, and the form of the keys and messages by which they speak.

Ranks may run different versions of this package by mistake, which the version of a message tells,
and may reach the same point of the protocol from different calls, which its kind tells. Its fields
are not checked.

Two notes are no exchange, because nobody answers them. A rank that closes its optimizer says that
it leaves, and one that fails in a call announces its error, so that others end their wait for it at
once. A rank that has ended without a note, or whose note was lost, is missed after the limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from offload.errors import RanksError
from offload.format.strict_json import parse_json, short

VERSION = 2
"""Version of all messages; ranks with different versions cannot train together."""

Json: TypeAlias = Any
"""A value that JSON can hold."""


class MessageError(RanksError):
    """A message of another rank is not what this version of the package writes."""


def encode(kind: str, fields: Mapping[str, Json]) -> str:
    """Return a message."""
    message = {"version": VERSION, "kind": kind, **fields}
    return json.dumps(message, separators=(",", ":"), allow_nan=False)


def decode(text: str, kind: str, sender: str) -> dict[str, Json]:
    """Return the fields of a message of a kind; the sender is named in words, for errors."""
    try:
        message = parse_json(text.encode())
    except ValueError as error:
        raise MessageError(f"{sender}: a message is not JSON ({error}): restart the job") from error
    if not isinstance(message, dict):
        raise MessageError(f"{sender}: a message is {short(message)}, expected an object")
    version, found = message.pop("version", None), message.pop("kind", None)
    if type(version) is not int or version != VERSION:
        raise MessageError(
            f"{sender} writes messages of version {short(version)}, expected {VERSION}: install "
            "the same version of this package on all hosts"
        )
    if found != kind:
        raise MessageError(
            f"{sender}: the message is of kind {short(found)}, expected {kind!r}: call the same "
            "methods of the optimizer in the same order on all ranks"
        )
    return message


def tuples_of(value: Json) -> Any:
    """Return a value out of a message with tuples in place of lists, at any depth."""
    if isinstance(value, dict):
        return {name: tuples_of(one) for name, one in value.items()}
    return tuple(map(tuples_of, value)) if isinstance(value, list | tuple) else value


ANYONE: Final = "left/anyone"
"""Key that exists if any rank has left, so that a wait reads one key and not one for each rank."""

FIRST_SIGN: Final = "0"
"""First sign of progress of a rank in an exchange or a seal."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that train into one store, as one of them knows them."""

    rank: int
    size: int
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


def announcement(rank: int, error: str, *, final: bool = False) -> str:
    """Return the message of a rank that failed; a final one ends every wait for the rank."""
    return encode("error", {"rank": rank, "error": error, "final": final})


def leave(put: Callable[[str, str], object], rank: int, reason: str) -> None:
    """Say that a rank leaves: why it has no optimizer, or, with no reason, that it closed it."""
    note = encode("left", {"reason": reason})
    put(_left_key(rank), note)
    put(ANYONE, note)


def who_left(get: Callable[[str], str | None], ranks: Iterable[int]) -> dict[int, str]:
    """Return those of some ranks that have left, each with its reason; see `leave`."""
    if get(ANYONE) is None:
        return {}
    notes = {rank: get(_left_key(rank)) for rank in ranks}
    return {rank: _reason_in(note, rank) for rank, note in notes.items() if note is not None}


def in_words(left: Mapping[int, str]) -> str:
    """Return which ranks have left, and why: ``rank 1 has closed its optimizer``."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(left.items()):
        by_reason.setdefault(reason, []).append(rank)
    return "; ".join(_have_left(ranks, reason) for reason, ranks in by_reason.items())


def _left_key(rank: int) -> str:
    return key("left", "rank", rank)


def _reason_in(note: str, rank: int) -> str:
    """Return the reason in a note; a note that cannot be read is a reason as well."""
    try:
        return str(decode(note, "left", names([rank]))["reason"])
    except MessageError as error:
        return str(error)


def _have_left(ranks: list[int], reason: str) -> str:
    if reason:
        return f"{names(ranks)} could not make the optimizer: {reason}"
    if len(ranks) == 1:
        return f"{names(ranks)} has closed its optimizer"
    return f"{names(ranks)} have closed their optimizers"
