"""The history of a run with every step once: lines of `offload.record.history`, checked and joined.

Anybody may have edited the file: lines that are not as a training process writes them are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from offload.format.metrics import MAX_METRICS, MAX_NAME_CHARACTERS
from offload.record.history import read_lines

_MAX_PHASES = 24
_MAX_COUNT: Final = 2.0**53
_MAX_METRIC: Final = 1e300
"""Larger values, which are no losses, would overflow where a chart computes with them."""

_END_OF_TIME: Final = 253_402_300_799.0
"""The last second that a date with four digits of the year can name."""

_Record = TypeVar("_Record", "Stretch", "Seal")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Totals of some consecutive steps."""

    start: int
    """Number of steps taken before the first of them."""

    step: int
    """Number of steps taken after the last of them."""

    num_steps: int
    """Number of steps that the totals are of."""

    at: float
    """Time of the last of them, in seconds since 1970."""

    seconds: Mapping[str, float]
    """Seconds by phase, without the ending ``_s`` of their names."""

    elapsed_s: float
    """Seconds from the first to the last of them, the model's own included; 0 if not known."""

    read_bytes: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class Seal:
    """A checkpoint when it was sealed. It may have been recycled since."""

    step: int
    at: float
    """Time in seconds since 1970."""

    bytes_written: float
    stall_s: float
    """Seconds for which training stood still."""

    seal_s: float
    """Seconds that the seal took, behind training."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class History:
    """What the file says about the steps that led to the present state, each step once."""

    stretches: list[Stretch]
    """By rising step, without overlaps. There may be gaps."""

    seals: list[Seal]
    """By rising step, at most one for each step."""

    resumed_at: list[int]
    """Steps from which later processes went on, by rising step, as far as that is known."""

    num_unreadable: int
    """Number of lines that were left out because they are not what a writer writes."""


def read_history(store: str) -> History:
    """Return the history of a store; an empty one if there is none.

    A run that was killed takes some steps again. Of the lines about the same step, the last ones
    count.

    Args:
        store: First directory of the store.

    Raises:
        StoreError: The file is there and cannot be read, or no run has written it.
    """
    lines, num_unreadable = read_lines(store)
    reader = _Reader()
    for number, line in enumerate(lines):
        try:
            reader.take(number, line)
        except (ValueError, KeyError, TypeError, AttributeError):
            num_unreadable += 1
    return History(
        [stretch for _, stretch in reader.stretches],
        [seal for _, seal in reader.seals],
        reader.resumed_at,
        num_unreadable,
    )


class _Reader:
    """Takes the lines in their order, and forgets those about steps that a later process repeats.

    A ``start`` line says that the run has gone back. If there is none, a line of steps or of a seal
    says so to lines of its own kind only, because the line of a seal that took long may follow
    those of later steps. Lines of the other kind are then forgotten if they come before the last
    line that is certainly of the earlier process.
    """

    def __init__(self) -> None:
        self.stretches: list[tuple[int, Stretch]] = []
        self.seals: list[tuple[int, Seal]] = []
        self.resumed_at: list[int] = []
        self._has_gone_on = False
        self._started = math.inf
        """Number of the last ``start`` line."""

    def take(self, number: int, line: Mapping[str, Any]) -> None:
        """Add what a line says. Kinds that a later version may write are passed over.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: No writer writes such a line.
        """
        match line["kind"]:
            case "start":
                self._take_start(number, _count(line["step"]))
            case "steps":
                self._take_stretch(number, _stretch(line))
            case "checkpoint":
                self._take_seal(number, _seal(line))

    def _take_start(self, number: int, step: int) -> None:
        self._started = number
        self._go_back(step, number)
        self._has_gone_on |= step > 0
        self._mark(step)

    def _take_stretch(self, number: int, stretch: Stretch) -> None:
        if self.stretches and self.stretches[-1][1].step > stretch.start:
            self._go_back(stretch.start, self.stretches[-1][0])
        self._mark(stretch.start)
        if stretch.num_steps:
            self.stretches.append((number, stretch))

    def _take_seal(self, number: int, seal: Seal) -> None:
        if self.seals and self.seals[-1][1].step > seal.step:
            self._go_back(seal.step - 1, self.seals[-1][0])
        if self.seals and self.seals[-1][1].step == seal.step:
            earlier_number, earlier = self.seals.pop()
            if self._started < earlier_number:  # the same checkpoint, whose metrics were replaced
                seal = _sum(earlier, seal)
        self.seals.append((number, seal))

    def _go_back(self, step: int, last_number: int) -> None:
        """Forget the lines up to one, of an earlier process, about steps after that step."""
        num_before = len(self.stretches) + len(self.seals)
        _forget(self.stretches, step, last_number)
        _forget(self.seals, step, last_number)
        self._has_gone_on |= len(self.stretches) + len(self.seals) < num_before

    def _mark(self, step: int) -> None:
        """Remember the step from which a later process has gone on, if this is one."""
        if self._has_gone_on:
            self._has_gone_on = False
            while self.resumed_at and self.resumed_at[-1] >= step:
                self.resumed_at.pop()
            self.resumed_at.append(step)


def _forget(records: list[tuple[int, _Record]], step: int, last_number: int) -> None:
    """Remove records up to a line about steps after one. All calls together take linear time."""
    newer = []
    while records and records[-1][0] > last_number:
        newer.append(records.pop())
    while records and records[-1][1].step > step:
        records.pop()
    records += reversed(newer)


def _stretch(line: Mapping[str, Any]) -> Stretch:
    step, num_steps = _count(line["step"]), _count(line["steps"])
    if num_steps > step:
        raise ValueError("more steps than were taken")
    seconds = _numbers(line["seconds"], _MAX_PHASES)
    return Stretch(
        step - num_steps,
        step,
        num_steps,
        _number(line["at"], most=_END_OF_TIME),
        {name.removesuffix("_s"): value for name, value in seconds.items()},
        _number(line.get("elapsed_s", 0)),
        _number(line["read_bytes"]),
        _number(line["written_bytes"]),
    )


def _seal(line: Mapping[str, Any]) -> Seal:
    return Seal(
        _count(line["step"]),
        _number(line["at"], most=_END_OF_TIME),
        _number(line["bytes_written"]),
        _number(line["stall_s"]),
        _number(line["seal_s"]),
        _numbers(line["metrics"], MAX_METRICS, least=-_MAX_METRIC, most=_MAX_METRIC),
    )


def _sum(earlier: Seal, seal: Seal) -> Seal:
    """Return a checkpoint that was written in two turns: work adds up, the last metrics count."""
    return replace(
        seal,
        bytes_written=earlier.bytes_written + seal.bytes_written,
        stall_s=earlier.stall_s + seal.stall_s,
        seal_s=earlier.seal_s + seal.seal_s,
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_COUNT:
        raise ValueError("not a count")
    return value


def _number(value: Any, *, least: float = 0.0, most: float = _MAX_COUNT) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError("not a number of a sensible size")
    return float(value)


def _numbers(values: Any, most_values: int, **limits: float) -> dict[str, float]:
    if len(values) > most_values or any(len(name) > MAX_NAME_CHARACTERS for name in values):
        raise ValueError("too many values, or a name that is too long")
    return {name: _number(value, **limits) for name, value in values.items()}
