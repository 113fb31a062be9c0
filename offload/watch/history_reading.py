"""Reader of ``history.jsonl``, which a training process leaves in the first directory of its store.

Every line is a JSON object with a ``kind``: ``checkpoint`` is written after each seal, ``steps``
about every 30 seconds, with the totals since the last such line, and ``start`` by a process that
begins to train. The file is never synced and anybody may have edited it: what does not look like
such a line is left out.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from offload.errors import UnreadableError
from offload.format.metrics import MAX_METRICS, MAX_NAME_CHARACTERS
from offload.format.strict_json import parse_json

HISTORY_NAME: Final = "history.jsonl"
"""Name of the file. It may be removed at any time."""

_MAX_BYTES = 16 << 20
"""Largest number of bytes that is read, from the end of the file. A writer thins it at 8 MiB."""

_MAX_LINE_BYTES = 1 << 16
_MAX_LINE_VALUES = 1000
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


def read_history(store: str | os.PathLike[str]) -> History:
    """Return the history of a store; an empty one if there is none.

    A run that was killed takes some steps again. Of the lines about the same step, the last ones
    count. A torn last line is left out, and so is every line with a value that is no finite number
    of a sensible size. Time and memory are bounded, whatever the file is.

    Args:
        store: First directory of the store.

    Raises:
        UnreadableError: The file is there and cannot be read, or it is not a regular file.
    """
    content = _tail(os.path.join(os.fsdecode(store), HISTORY_NAME))
    reader = _Reader()
    num_unreadable = 0
    for number, line in enumerate(io.BytesIO(content)):
        if not line.strip():
            continue
        try:
            reader.take(number, _parsed(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            num_unreadable += line.endswith(b"\n")  # else its writer was killed
    return History(
        [stretch for _, stretch in reader.stretches],
        [seal for _, seal in reader.seals],
        reader.resumed_at,
        num_unreadable,
    )


def _tail(path: str) -> bytes:
    """Return the end of a file from the beginning of a line on; nothing if there is no file."""
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _unreadable(path, 0, "not a regular file")
            skipped = file.seek(max(0, status.st_size - _MAX_BYTES))
            content = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return b""
    except UnreadableError:
        raise
    except OSError as error:
        raise _unreadable(path, error.errno or 0, error.strerror) from error
    return content.partition(b"\n")[2] if skipped else content


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe in its place."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unreadable(path: str, number: int, why: str | None) -> UnreadableError:
    return UnreadableError(
        number,
        f"the history of the run cannot be read ({why}): make it readable, or remove it",
        path,
    )


def _parsed(line: bytes) -> dict[str, Any]:
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError("a line of this length is never written")
    value = parse_json(line, max_values=_MAX_LINE_VALUES)
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


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
