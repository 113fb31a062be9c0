"""Leaving: a rank that closes its optimizer says so, because others may still wait for it.

The note is no exchange: nobody answers it. A rank that waits for one that has left ends its wait at
once. A rank that has ended without a note, or whose note was lost, is missed after the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from offload.distributed.agreement.messages import MessageError, decode, encode
from offload.distributed.agreement.peers import key, names

ANYONE: Final = "left/anyone"
"""Key that exists if any rank has left, so that a wait reads one key and not one for each rank."""

_FIELDS = {"reason": str}


def left_key(rank: int) -> str:
    """Return the key that a rank writes when it leaves."""
    return key("left", "rank", rank)


def leave(put: Callable[[str, str], object], rank: int, reason: str) -> None:
    """Say that a rank leaves.

    Args:
        put: Function that sets the value of a key.
        rank: The rank.
        reason: Error because of which its constructor failed; empty if it has closed its optimizer.
    """
    note = encode("left", {"reason": reason})
    put(left_key(rank), note)
    put(ANYONE, note)


def who_left(get: Callable[[str], str | None], ranks: Iterable[int]) -> dict[int, str]:
    """Return those of some ranks that have left, each with its reason; see `leave`."""
    if get(ANYONE) is None:
        return {}
    notes = {rank: get(left_key(rank)) for rank in ranks}
    return {rank: _reason_in(note, rank) for rank, note in notes.items() if note is not None}


def in_words(left: Mapping[int, str]) -> str:
    """Return which ranks have left, and why: ``rank 1 has closed its optimizer``."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(left.items()):
        by_reason.setdefault(reason, []).append(rank)
    return "; ".join(_have_left(ranks, reason) for reason, ranks in by_reason.items())


def _reason_in(note: str, rank: int) -> str:
    """Return the reason in a note; a note that cannot be read is a reason as well."""
    try:
        return str(decode(note, "left", _FIELDS, names([rank]))["reason"])
    except MessageError as error:
        return str(error)


def _have_left(ranks: list[int], reason: str) -> str:
    if reason:
        return f"{names(ranks)} could not make the optimizer: {reason}"
    if len(ranks) == 1:
        return f"{names(ranks)} has closed its optimizer"
    return f"{names(ranks)} have closed their optimizers"
