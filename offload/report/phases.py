"""Phases of a step: which there are, and how the time of steps is divided into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from offload.report.history import Stretch

TITLES: Final = {
    "compute": "updating",
    "wait_read": "waiting for reads",
    "wait_write": "waiting for writes",
    "wait_seal": "waiting for seals",
    "wait_device": "waiting for the device",
}
"""Phases that every history has, in the order in which they are drawn, with names for people."""

REST: Final = "everything else"

_NOT_IN_STEPS = ("step", "beside", "outside", "wait_update", "read", "write")
"""Clocks beside the phases, if a history has that of whole steps."""

_MAX_PHASES = 8


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all steps of a history."""

    num_steps: int
    seconds: Mapping[str, float]
    """Seconds by clock, as in the history."""

    elapsed_s: float
    """Seconds of the run, with the model's; 0 if not known of all steps."""

    read_bytes: float
    written_bytes: float

    @property
    def step_s(self) -> float:
        """Seconds of all steps."""
        return sum(phases_of(self.seconds).values())

    @property
    def is_beside(self) -> bool:
        """Whether steps ran beside the model, so that only waits for them cost time."""
        return self.seconds.get("beside", 0.0) > 0

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the time of the steps, by phase; empty if no time was measured."""
        phases, total = phases_of(self.seconds), self.step_s
        return {name: seconds / total for name, seconds in phases.items()} if total else {}


def totals_of(stretches: Iterable[Stretch]) -> Totals:
    """Return the sums over stretches of steps."""
    seconds: Counter[str] = Counter()
    num_steps, elapsed, read_bytes, written_bytes = 0, list[float](), 0.0, 0.0
    for one in stretches:
        seconds.update(one.seconds)
        num_steps += one.num_steps
        elapsed.append(one.elapsed_s)
        read_bytes += one.read_bytes
        written_bytes += one.written_bytes
    elapsed_s = sum(elapsed) if all(elapsed) else 0.0
    return Totals(num_steps, dict(seconds), elapsed_s, read_bytes, written_bytes)


def phases_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Divide the time of steps into phases, the known ones first and the rest last.

    Steps that ran beside the model have no time of their own in the training thread: what is
    divided is then the time beside it.
    """
    total = seconds.get("beside") or seconds.get("step", 0.0)
    left_out = _NOT_IN_STEPS if total else ()
    found = {name: seconds[name] for name in TITLES if seconds.get(name)}
    others = {
        name: value
        for name, value in seconds.items()
        if value and name not in TITLES and name not in left_out
    }
    for name in sorted(others, key=lambda name: -others[name])[: _MAX_PHASES - len(TITLES) - 1]:
        found[name] = others.pop(name)
    rest = max(total - sum(found.values()), sum(others.values()))
    return found | ({REST: rest} if rest > 0 else {})


def title_of(phase: str) -> str:
    """Return the name of a phase for people."""
    return TITLES.get(phase, phase.replace("_", " "))
