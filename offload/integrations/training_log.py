"""Numbers of an optimizer for the log of a training: the few that matter, or all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offload import Stats

PREFIX = "offload/"
"""Beginning of every name in a log."""

TOTALS = (
    "steps",
    "bytes_read",
    "bytes_written",
    "read_s",
    "write_s",
    "step_s",
    "beside_s",
    "compute_s",
    "wait_read_s",
    "wait_write_s",
    "wait_seal_s",
    "outside_s",
    "wait_update_s",
    "wait_device_s",
    "seals",
    "to_host_bytes",
    "to_device_bytes",
    "to_server_bytes",
    "from_server_bytes",
)
"""Fields of `Stats` that only grow. They go on after a resume; the other fields are sizes, rates,
largest values and durations of single events, which belong to one process."""


class TrainingLog:
    """Numbers of one training for its log. Totals go on after a resume.

    Args:
        stats: Statistics of the optimizer before it is restored or takes a step.
    """

    def __init__(self, stats: Stats) -> None:
        self._first = stats
        self._earlier: dict[str, float] | None = None
        """Totals of earlier processes, less those of `_first`, by name; None before `start`."""
        self._logged = stats
        """Statistics at the last log. Rates are about the time since then."""

    def start(self, stats: Stats, kept: object) -> None:
        """Note that training begins, or begins again.

        The first call adds the totals that were kept with the restored checkpoint to all later
        ones. `kept` is ignored if it is something else.
        """
        self._logged = stats
        if self._earlier is not None:
            return  # a second training with this optimizer, whose own totals simply go on
        found = kept if isinstance(kept, Mapping) else {}
        self._earlier = {
            name: found[name] - getattr(self._first, name)
            for name in TOTALS
            if isinstance(found.get(name), int | float)
        }

    def totals(self, stats: Stats) -> dict[str, float]:
        """Return the totals of all processes, to be kept with a checkpoint."""
        earlier = self._earlier or {}
        return {name: getattr(stats, name) + earlier.get(name, 0) for name in TOTALS}

    def main_numbers(self, stats: Stats) -> dict[str, float]:
        """Return the five numbers that tell how fast storage is and what it costs.

        - ``offload/step_seconds``: seconds that one optimizer step holds up training.
        - ``offload/read_gb_per_s``, ``offload/write_gb_per_s``: gigabytes (1e9 bytes) per second
          of reading and of writing.
        - ``offload/io_wait_fraction``: part of the update's time in which it waits for drives.
        - ``offload/bytes_written``: bytes written since the training began, in all processes.

        The first four are about the time since the last call. They are left out if there was
        nothing to measure in that time.
        """
        before, self._logged = self._logged, stats
        passed = {name: getattr(stats, name) - getattr(before, name) for name in TOTALS}
        waited = passed["wait_read_s"] + passed["wait_write_s"] + passed["wait_seal_s"]
        numbers = {
            "step_seconds": _ratio(passed["step_s"] + passed["wait_update_s"], passed["steps"]),
            "read_gb_per_s": _ratio(passed["bytes_read"] / 1e9, passed["read_s"]) or None,
            "write_gb_per_s": _ratio(passed["bytes_written"] / 1e9, passed["write_s"]) or None,
            "io_wait_fraction": _ratio(waited, passed["step_s"] + passed["beside_s"]),
            "bytes_written": self.totals(stats)["bytes_written"],
        }
        return {PREFIX + name: float(n) for name, n in numbers.items() if n is not None}

    def all_numbers(self, stats: Stats) -> dict[str, float]:
        """Return `main_numbers`, and every value of `Stats.scalars` that is not zero.

        Zeros belong to features that are not in use, or to events that have not happened yet.
        """
        totals: dict[str, Any] = self.totals(stats)
        every = replace(stats, **totals).scalars(PREFIX)
        return {**{n: v for n, v in every.items() if v}, **self.main_numbers(stats)}


def _ratio(amount: float, of: float) -> float | None:
    """Return the quotient; None if there is nothing to divide by."""
    return amount / of if of > 0 else None
