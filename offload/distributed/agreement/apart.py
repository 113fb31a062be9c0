"""Ranks that are in different calls: how one of them sees it, instead of waiting for the limit.

A rank that begins an exchange or a seal notes where it is: how many exchanges it had begun before,
and how many optimizer steps it had taken. All ranks make the same calls in the same order. So a
rank that makes another call, and finds the note of a seal or an exchange that it has not begun and
that comes earlier, knows that the ranks are apart for good. The notes are hints: a rank that misses
one waits for the limit.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Final

from offload.distributed.agreement.driver import announcement
from offload.distributed.agreement.messages import MessageError, decode, encode
from offload.distributed.agreement.peers import (
    Peers,
    begun_key,
    error_key,
    exchange_scope,
    seal_scope,
)
from offload.distributed.agreement.signs import Signs

_CHECKPOINT: Final = "checkpoint()"

_FIELDS = {"rank": int, "what": str, "exchanges": int, "steps": int}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in the program that all ranks run."""

    rank: int
    what: str
    """Call of the user."""

    exchanges: int
    """Number of exchanges that the rank has begun, without the one that the note is about."""

    steps: int
    """Number of optimizer steps that the rank has taken."""


class Places:
    """Where this rank is, and whether another rank is in another call. Any thread.

    Args:
        signs: What writes and reads the notes.
        rank: This rank.
    """

    def __init__(self, signs: Signs, rank: int) -> None:
        self._signs = signs
        self._rank = rank
        self._lock = threading.Lock()
        self._call = ""
        self.num_exchanges = 0
        """Number of exchanges that this rank has begun."""
        self.num_seals = 0
        """Number of seals that this rank has begun."""
        self.num_steps = 0
        """Optimizer steps that had been taken when the user's call began."""

    def begin_exchange(self, what: str) -> str:
        """Begin an exchange for a call of the user; return its name."""
        with self._lock:
            number = self.num_exchanges
            self.num_exchanges += 1
        self._call = what
        scope = exchange_scope(number)
        self._note(scope, what, number)
        return scope

    def begin_seal(self, *, is_placed: bool) -> int:
        """Begin a seal, and return its number.

        Args:
            is_placed: Whether this rank has taken the steps that the other ranks have taken.
        """
        with self._lock:
            number = self.num_seals
            self.num_seals += 1
        if is_placed:
            self._note(seal_scope(number), _CHECKPOINT, self.num_exchanges)
        return number

    def apart_in_step(self, peers: Peers, what: str) -> str:
        """Return, in words, that a rank is in another call than this one, which begins a step."""
        own = self.num_exchanges, self.num_steps
        for scope in (seal_scope(self.num_seals), exchange_scope(self.num_exchanges)):
            other = self._found(scope)
            if other is not None and (other.exchanges, other.steps) <= own:
                return self._part(peers, other, what, self.num_exchanges)
        return ""

    def apart_in_exchange(self, peers: Peers) -> str:
        """Return, in words, that a rank has sealed where this one has begun its last exchange."""
        number = self.num_exchanges - 1
        other = self._found(seal_scope(self.num_seals))
        if other is None or other.exchanges > number:
            return ""
        return self._part(peers, other, self._call, number)

    def _note(self, scope: str, what: str, num_exchanges: int) -> None:
        """Note for the other ranks that this one begins an exchange or a seal."""
        place = Place(self._rank, what, num_exchanges, self.num_steps)
        self._signs.put(begun_key(scope), encode("place", asdict(place)))

    def _found(self, scope: str) -> Place | None:
        """Return where a rank was that has begun an exchange or a seal; None if none has."""
        text = self._signs.get(begun_key(scope))
        try:
            return None if text is None else Place(**decode(text, "place", _FIELDS, "a rank"))
        except MessageError:
            return None

    def _part(self, peers: Peers, other: Place, what: str, number: int) -> str:
        """Tell the ranks that wait for this one in a seal or an exchange; return it in words."""
        calls = sorted([(other.rank, other.what), (peers.rank, what)])
        (first, its), (second, also) = [(peers.name(rank), call) for rank, call in calls]
        remedy = "make the same calls in the same order on every rank"
        if other.what == _CHECKPOINT:
            remedy = f"call {_CHECKPOINT} on every rank"
        text = f"{first} is in {its}, {second} in {also}: {remedy}"
        for scope in (seal_scope(self.num_seals), exchange_scope(number)):
            self._signs.put(error_key(scope), announcement(peers.rank, text, final=True))
        return text
