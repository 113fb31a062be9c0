"""Runs programs of the protocol over a channel, and tells slow ranks from lost ones.

A rank counts, under a key for each exchange or seal, how often it had something to show: bytes
written, or a wait that goes on within its limit. Times of different hosts are never compared; the
others only look whether the number has changed. It also notes in which call it is, so that ranks
that have made different calls know at once that they are apart. These notes are hints: a rank that
misses one waits for the limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from offload.distributed.agreement.effects import (
    Act,
    Arrived,
    Await,
    Channel,
    ChannelLostError,
    Delete,
    Effect,
    Get,
    Program,
    Put,
)
from offload.distributed.agreement.peers import (
    FIRST_SIGN,
    MessageError,
    Peers,
    announcement,
    begun_key,
    decode,
    encode,
    error_key,
    exchange_scope,
    seal_scope,
    sign_key,
    who_left,
)

SIGNS_PER_LIMIT = 10
"""Most signs that a rank gives within the limit; more would only burden the key-value store."""

_CHECKPOINT: Final = "checkpoint()"


class Signs:
    """Signs of progress of one rank, over a channel that nothing else uses. Any thread."""

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
    exchanges: int
    """Number of exchanges that the rank has begun, without the one that the note is about."""

    steps: int


class Places:
    """Where this rank is, and whether another rank is in another call. Any thread."""

    def __init__(self, signs: Signs, rank: int) -> None:
        self._signs = signs
        self._rank = rank
        self._lock = threading.Lock()
        self._call = ""
        self.num_exchanges = 0
        self.num_seals = 0
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
        """Begin a seal; return its number. A rank without the others' steps is not placed."""
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
            fields = None if text is None else decode(text, "place", "a rank")
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


T = TypeVar("T")

_LOOKS_PER_LIMIT = 16
"""Times that a waiting rank looks for signs of progress within the limit."""

_LONGEST_LOOK_S = 1.0
"""Most seconds between two looks. An interrupt (Ctrl-C) is noticed at the next one at the latest,
and an error that another rank announces as well."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Silence of a rank, as a wait that ended without it has seen it."""

    scope: str
    """Name of the exchange or seal in which the rank was awaited."""

    sign: str | None
    """Its newest sign of progress there; None if it had given none."""

    quiet_s: float
    """Seconds without another sign until the wait ended."""


class Driver:
    """Runs programs over a channel that nothing else uses, on one thread at a time.

    ``look`` is called in every wait. If the others will never come, it says why, which ends it.
    """

    def __init__(
        self,
        channel: Channel,
        signs: Signs,
        timeout_s: float,
        quiet: dict[int, Quiet],
        look: Callable[[], str] | None = None,
    ) -> None:
        self._look = look
        self._channel = channel
        self._signs = signs
        self._timeout_s = timeout_s
        self._quiet = quiet
        """Silence of each rank that a wait of any driver has missed, until it comes. So all waits
        of a seal and the next call together last one limit for a rank that has ended."""
        self._look_s = min(timeout_s / _LOOKS_PER_LIMIT, _LONGEST_LOOK_S)

    def run(self, program: Program[T]) -> T:
        """Perform the effects of a program in order, and return its result.

        An error that an effect raises is raised within the program.
        """
        step: Callable[[Any], Effect] = program.send
        value: Any = None
        while True:
            try:
                effect = step(value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                value = self._perform(effect)
                step = program.send
            except BaseException as error:  # noqa: BLE001  (the program decides what to do)
                value = error
                step = program.throw

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Put():
                self._channel.put(effect.key, effect.value)
                return None
            case Get():
                return self._channel.get(effect.key)
            case Delete():
                for key in effect.keys:
                    self._channel.delete(key)
                return None
            case Await():
                return self._await(effect)
            case Act():
                return effect.call(*effect.args)

    def _await(self, effect: Await) -> Arrived:
        missing = dict(effect.wanted)
        values: dict[int, str] = {}
        signs: dict[int, str | None] = {}
        quiet_s: dict[int, float] = {}
        while missing:
            started_s = self._channel.now()
            first = min(missing)
            self._take(missing, values, first, self._channel.wait(missing[first], self._look_s))
            if first in values:
                continue
            # Time in which this process itself was stopped says nothing of the others.
            passed_s = min(self._channel.now() - started_s, 2 * self._look_s)
            for rank in [*missing]:
                self._take(missing, values, rank, self._channel.get(missing[rank]))
                if rank in values:
                    continue
                sign = self._channel.get(sign_key(effect.scope, rank))
                if rank not in quiet_s:
                    quiet_s[rank] = self._quiet_before(rank, effect.scope, sign)
                    is_quiet = sign is None or quiet_s[rank] > 0
                else:
                    is_quiet = sign == signs[rank]
                quiet_s[rank] = quiet_s[rank] + passed_s if is_quiet else 0.0
                signs[rank] = sign
            self._signs.give()
            if error := self._announced(effect, missing) or (self._look and self._look()):
                return Arrived(values, error)
            if left := self._left(missing, values):
                return Arrived(values, lost=frozenset(left), left=left)
            lost = {rank for rank in missing if quiet_s[rank] >= self._timeout_s}
            if lost:
                for rank in missing:
                    self._quiet[rank] = Quiet(effect.scope, signs[rank], quiet_s[rank])
                return Arrived(values, lost=frozenset(lost))
        return Arrived(values)

    def _quiet_before(self, rank: int, scope: str, sign: str | None) -> float:
        """Return how long a rank has been silent already, as an earlier wait has seen it."""
        before = self._quiet.get(rank)
        if before is None:
            return 0.0
        if before.scope != scope:
            newest = None if sign is not None else self._channel.get(sign_key(before.scope, rank))
            is_same = sign is None and newest == before.sign
        else:
            is_same = sign == before.sign
        if not is_same:
            self._quiet.pop(rank, None)
            return 0.0
        return before.quiet_s

    def _take(
        self, missing: dict[int, str], values: dict[int, str], rank: int, value: str | None
    ) -> None:
        if value is not None:
            values[rank] = value
            del missing[rank]
            self._quiet.pop(rank, None)

    def _left(self, missing: dict[int, str], values: dict[int, str]) -> dict[int, str]:
        """Return those of the missing ranks that have left, each with its reason."""
        found = who_left(self._channel.get, [*missing])
        for rank in found:
            # What it put before it left is read after its note, so nothing of it is overlooked.
            self._take(missing, values, rank, self._channel.get(missing[rank]))
        return {rank: reason for rank, reason in found.items() if rank in missing}

    def _announced(self, effect: Await, missing: dict[int, str]) -> str:
        """Return the error that one of the missing ranks has announced, if any."""
        text = self._channel.get(error_key(effect.scope))
        if text is None:
            return ""
        try:
            found = decode(text, "error", "another rank")
        except MessageError as error:
            return str(error)
        is_heeded = found["rank"] in missing and (effect.heeds_errors or found["final"])
        return str(found["error"]) if is_heeded else ""
