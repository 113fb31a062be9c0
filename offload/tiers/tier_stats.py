"""What became of checkpoints that were offered to a tier, for `stats`."""

from __future__ import annotations

from dataclasses import dataclass

NUM_EVENTS = 32
"""Number of events that are remembered."""


@dataclass(frozen=True, slots=True)
class TierEvent:
    """What became of one checkpoint."""

    step: int
    choice: str
    """Decision: ``upload``, ``parameters``, ``keep``, ``thin`` or ``skip``."""

    reason: str
    outcome: str
    """What has happened since: empty, ``complete``, ``parameters`` if only those were sent,
    ``recycled``, ``stopped`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """State of the uploads of one optimizer."""

    url: str
    bytes_sent: int
    """Bytes of objects that were sent and checked since construction."""

    num_complete: int
    """Number of checkpoints that the tier has got since construction."""

    newest_step: int | None
    """Step of the newest checkpoint that the tier has got from this process; None if none."""

    bytes_per_s: float | None
    """Rate of the link, as measured; None if nothing was sent."""

    slowdown: float | None
    """Share by which steps beside uploads take longer, as measured; None if it is not known."""

    events: tuple[TierEvent, ...]
    """The last decisions, the newest last."""
