"""What an optimizer tells the recorder of its run; nothing here waits for training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from offload.engine.engine import Engine
from offload.engine.stats import Stats
from offload.options import Options
from offload.record.recorder import Look, Recorder
from offload.store.shared import Serving
from offload.tiers.background import BackgroundUploads
from offload.tiers.rank_uploads import FollowingUploads
from offload.tiers.upload_thread import TierStats

Uploads = BackgroundUploads | FollowingUploads | None


def start_recorder(
    options: Options, engine: Engine, uploads: Uploads, serving: Serving | None
) -> Recorder | None:
    """Begin to record a run; None if that is not wanted here, or is another rank's task.

    The recorder refers to the engine and not to the optimizer, which may be garbage-collected.
    """
    is_elsewhere = options.backend is not None or (serving is not None and not serving.is_writer)
    if is_elsewhere or not options.record:
        return None
    recorder = Recorder(
        engine.store.directory,
        lambda: _look_at(engine, uploads),
        num_ranks=engine.state.ranks.size,
    )
    recorder.start()
    return recorder


def _look_at(engine: Engine, uploads: Uploads) -> Look:
    stats = engine.stats()
    tier = None if uploads is None else uploads.stats()
    return Look(
        step=engine.num_steps,
        totals=_totals(stats),
        drives=engine.state.drives.totals_of_each(),
        update_code=stats.update_code,
        tier={} if tier is None else _tier(tier),
        warnings=[*_warnings(engine, tier)],
    )


def _totals(stats: Stats) -> dict[str, float]:
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    values["drive_writes"] = stats.drive_writes
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _tier(stats: TierStats) -> dict[str, Any]:
    """Return what a status says of the uploads: their totals, and the last event."""
    body: dict[str, Any] = {
        "url": stats.url,
        "bytes_sent": stats.bytes_sent,
        "num_complete": stats.num_complete,
        "newest_step": stats.newest_step,
        "bytes_per_s": stats.bytes_per_s,
        "slowdown": stats.slowdown,
    }
    if stats.events:
        last = stats.events[-1]
        body |= {"last_step": last.step, "choice": last.choice}
        body |= {"reason": last.reason, "outcome": last.outcome}
    return body


_MOST_WARNINGS = 5
_ENDS = ("complete", "parameters", "failed")
"""Outcomes of an upload that say whether the tier can be reached."""


def _warnings(engine: Engine, tier: TierStats | None) -> Iterator[str]:
    """Yield what somebody who watches the run should know."""
    if broken := engine.state.lifecycle.why_broken():
        yield f"no step is possible: {broken}"
    if failed := engine.state.meter.failed_seal:
        yield failed
    ended = [event for event in tier.events if event.outcome in _ENDS] if tier else []
    if tier and ended and ended[-1].outcome == "failed":
        yield f"the upload of step {ended[-1].step} failed: {tier.failure}"
    if engine.store.poisoned:
        yield "a rename or sync has failed: no checkpoint is recycled any more"
    for path, reason in engine.store.refused[:_MOST_WARNINGS]:
        yield f"{os.path.basename(path)} is not usable: {reason}"
