"""What is known of a run: its history, joined with the checkpoints that its store has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.listing import CheckpointInfo, list_checkpoints
from offload.format.metrics import describes_the_run
from offload.report.history import History, Seal, Stretch, read_history
from offload.report.phases import Totals, totals_of

_MAX_METRICS = 8
"""Largest number of metrics that are drawn."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint that was made, whether the store still has it or not."""

    step: int
    at: float
    """Time in seconds since 1970; 0 if it is not known."""

    metrics: Mapping[str, float]
    seal: Seal | None
    """What the history says of it; None if it says nothing."""

    kept: CheckpointInfo | None
    """What the store has of it; None if it was recycled."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that a report is made from."""

    store: str
    """Path of the store."""

    entries: Sequence[Entry]
    """Checkpoints by rising step."""

    history: History
    totals: Totals

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that are drawn, losses first."""
        found = Counter(name for entry in self.entries for name in entry.metrics)
        names = [name for name in found if not describes_the_run(name)]
        names.sort(key=lambda name: ("loss" not in name.lower(), -found[name], name))
        return names[:_MAX_METRICS]

    @property
    def steps(self) -> tuple[int, int]:
        """Number of steps at the beginning and at the end of what is known."""
        bounds = [entry.step for entry in (*self.entries[:1], *self.entries[-1:])]
        for one in (*self.history.stretches[:1], *self.history.stretches[-1:]):
            bounds += [one.start, one.step]
        return min(bounds, default=0), max(bounds, default=0)


def look_back(store: str | os.PathLike[str], *, parts: PartDirectories = None) -> Run:
    """Return what a store says of the run that trained into it. It may still go on.

    Args:
        store: First directory of the store.
        parts: Directories of the parts on other drives, as in `open_checkpoint`.

    Raises:
        CheckpointNotFoundError: Nothing exists at `store`.
        CheckpointError: `store` is not a store.
        UnreadableError: Something could not be read.
    """
    directory = os.path.abspath(os.fsdecode(store))
    # The history last: of a checkpoint that is sealed meanwhile it says more than the list.
    kept = {info.step: info for info in list_checkpoints(directory, parts=parts)}
    history = read_history(directory)
    seals = {seal.step: seal for seal in history.seals}
    entries = [
        _entry(step, seals.get(step), kept.get(step)) for step in sorted(seals.keys() | kept.keys())
    ]
    return Run(directory, entries, history, totals_of(history.stretches))


def _entry(step: int, seal: Seal | None, kept: CheckpointInfo | None) -> Entry:
    metrics = dict(kept.metrics) if kept else {}
    at = seal.at if seal else 0.0
    if kept and not seal:
        with suppress(ValueError, OverflowError):
            at = datetime.fromisoformat(kept.created).timestamp()
    return Entry(step, at, metrics or (seal.metrics if seal else {}), seal, kept)


def merged(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """Join neighbours until there are no more than a number of stretches. Sums stay the same."""
    size = -(-len(stretches) // most)
    if size <= 1:
        return list(stretches)
    joined = []
    for first in range(0, len(stretches), size):
        group = stretches[first : first + size]
        sums = totals_of(group)
        joined.append(
            Stretch(
                group[0].start,
                group[-1].step,
                sums.num_steps,
                group[-1].at,
                sums.seconds,
                sums.elapsed_s,
                sums.read_bytes,
                sums.written_bytes,
            )
        )
    return joined
