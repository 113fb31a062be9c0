"""What a rank lets the others see of it: that it makes progress, and in which call it is.

A rank counts, under a key of its own for each exchange or seal, how often it had something to show:
bytes written, or a wait for other ranks that goes on within its limit. So others tell a slow rank
from one that has ended or hangs. They never compare times of different hosts; they only look
whether the number has changed.

A rank that begins an exchange or a seal also notes where it is: how many exchanges it had begun
before, and how many optimizer steps it had taken. All ranks make the same calls in the same order.
So a rank that makes another call, and finds the note of a seal or an exchange that it has not begun
and that comes earlier, knows that the ranks are apart for good, instead of waiting for the limit.
The notes are hints: a rank that misses one waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final

from offload.distributed.agreement.effects import Channel, ChannelLostError
from offload.distributed.agreement.messages import MessageError, decode, encode, types_of
from offload.distributed.agreement.peers import (
    FIRST_SIGN,
    Peers,
    announcement,
    begun_key,
    error_key,
    exchange_scope,
    seal_scope,
    sign_key,
)

SIGNS_PER_LIMIT = 10
"""Most signs that a rank gives within the limit; more would only burden the key-value store."""

_CHECKPOINT: Final = "checkpoint()"


class Signs:
    """Signs of progress of one rank. All methods may be called from any thread.

    Args:
        channel: A channel that nothing else uses.
        rank: This rank.
        timeout_s: Seconds without a sign after which a rank counts as lost.
    """

    def __init__(self, channel: Channel, rank: int, timeout_s: float) -> None:
        self._channel = channel
        self._rank = rank
        self._pause_s = timeout_s / SIGNS_PER_LIMIT
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._last_s: float | None = None

    def begin(self, scope: str) -> None:
        """Give signs for an exchange or a seal from now on; the first has been given."""
        with self._lock:
            self._counts[scope] = int(FIRST_SIGN)

    def end(self, scope: str) -> None:
        """Give no further sign for an exchange or a seal."""
        with self._lock:
            self._counts.pop(scope, None)

    def give(self) -> None:
        """Give a sign for each exchange and seal in progress, unless the last was just now."""
        with self._lock:
            now = self._channel.now()
            if self._last_s is not None and now - self._last_s < self._pause_s:
                return
            self._last_s = now
            for scope in self._counts:
                self._counts[scope] += 1
                self._put_sign(scope)

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        """Set the value of a key, from any thread; never raises. See `Channel.put`."""
        with self._lock:
            self._put(key, value, within_s)

    def get(self, key: str) -> str | None:
        """Return the value of a key, on any thread; None if it has none or cannot be read."""
        with self._lock, suppress(ChannelLostError):
            return self._channel.get(key)
        return None

    @contextmanager
    def during(self, scope: str) -> Iterator[None]:
        """Give signs for an exchange, the first at once."""
        self.begin(scope)
        with self._lock:
            self._put_sign(scope)
        try:
            yield
        finally:
            self.end(scope)

    def _put_sign(self, scope: str) -> None:
        self._put(sign_key(scope, self._rank), str(self._counts[scope]))

    def _put(self, key: str, value: str, within_s: float | None = None) -> None:
        with suppress(ChannelLostError):  # what waits for this rank, or it for others, reports it
            self._channel.put(key, value, within_s=within_s)


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
            fields = None if text is None else decode(text, "place", types_of(Place), "a rank")
        except MessageError:
            return None
        return None if fields is None else Place(**fields)

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
