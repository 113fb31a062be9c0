"""Runs programs of the protocol over a channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from offload.distributed.agreement.effects import (
    Act,
    Arrived,
    Await,
    Channel,
    Delete,
    Effect,
    Get,
    Program,
    Put,
)
from offload.distributed.agreement.messages import MessageError, decode
from offload.distributed.agreement.peers import ANNOUNCED, error_key, sign_key, who_left
from offload.distributed.agreement.signs import Signs

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


class QuietRanks:
    """What the waits of this rank have seen of ranks that did not come. Any thread.

    A seal waits several times, and the next call waits again. A rank that has ended is silent in
    all of them; together they wait for one limit only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, Quiet] = {}

    def note(self, rank: int, quiet: Quiet) -> None:
        """Record that a wait has ended without a rank."""
        with self._lock:
            self._found[rank] = quiet

    def of(self, rank: int) -> Quiet | None:
        """Return the silence of a rank; None if it has come since, or was never missed."""
        with self._lock:
            return self._found.get(rank)

    def forget(self, rank: int) -> None:
        """Record that a message or sign of a rank has come."""
        with self._lock:
            self._found.pop(rank, None)


class Driver:
    """Runs programs over one channel, on one thread at a time.

    Args:
        channel: A channel that nothing else uses.
        signs: Signs of progress of this rank, which are given while it waits.
        timeout_s: Seconds without a sign of progress after which a rank counts as lost.
        quiet: Ranks that were waited for in vain, by this or another driver of the rank.
        look: Function that is called whenever a wait has looked at the others. It returns an error
            in words if they will never come, which ends the wait.
    """

    def __init__(
        self,
        channel: Channel,
        signs: Signs,
        timeout_s: float,
        quiet: QuietRanks,
        look: Callable[[], str] | None = None,
    ) -> None:
        self._look = look
        self._channel = channel
        self._signs = signs
        self._timeout_s = timeout_s
        self._quiet = quiet
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
                    self._quiet.note(rank, Quiet(effect.scope, signs[rank], quiet_s[rank]))
                return Arrived(values, lost=frozenset(lost))
        return Arrived(values)

    def _quiet_before(self, rank: int, scope: str, sign: str | None) -> float:
        """Return how long a rank has been silent already, as an earlier wait has seen it."""
        before = self._quiet.of(rank)
        if before is None:
            return 0.0
        if before.scope != scope:
            newest = None if sign is not None else self._channel.get(sign_key(before.scope, rank))
            is_same = sign is None and newest == before.sign
        else:
            is_same = sign == before.sign
        if not is_same:
            self._quiet.forget(rank)
            return 0.0
        return before.quiet_s

    def _take(
        self, missing: dict[int, str], values: dict[int, str], rank: int, value: str | None
    ) -> None:
        if value is not None:
            values[rank] = value
            del missing[rank]
            self._quiet.forget(rank)

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
            found = decode(text, "error", ANNOUNCED, "another rank")
        except MessageError as error:
            return str(error)
        is_heeded = found["rank"] in missing and (effect.heeds_errors or found["final"])
        return str(found["error"]) if is_heeded else ""
