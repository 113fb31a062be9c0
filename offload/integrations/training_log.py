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
        """Return the few of `Stats.scalars`, about the time since the last call.

        Bytes written are those of all processes since the training began.
        """
        before, self._logged = self._logged, stats
        written = {f"{PREFIX}bytes_written": float(self.totals(stats)["bytes_written"])}
        return stats.scalars(PREFIX, since=before) | written

    def all_numbers(self, stats: Stats) -> dict[str, float]:
        """Return `main_numbers`, and every other value of `Stats.scalars` that is not zero.

        Zeros belong to features that are not in use, or to events that have not happened yet.
        """
        totals: dict[str, Any] = self.totals(stats)
        whole = replace(stats, **totals)
        few, every = whole.scalars(PREFIX), whole.scalars(PREFIX, all=True)
        others = {name: value for name, value in every.items() if value and name not in few}
        return others | self.main_numbers(stats)
