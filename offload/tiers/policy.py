"""The decision whether a sealed checkpoint is uploaded: numbers in, a decision and its reason out.

A policy reads neither a clock nor a file. So a decision can be computed again from what is logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload.units import rate

Choice = Literal["upload", "keep", "skip"]
"""What is done with a checkpoint:

- "upload": it is sent now.
- "keep": it stays on the drive only, because the tier has one that is new enough.
- "skip": it stays on the drive only, although the tier could use it: it could not be sent in time,
  or sending it would slow training more than allowed.
"""

_MARGIN = 1.25
"""Factor by which an upload may take longer than the measured rate says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a decision depends on."""

    nbytes: int
    """Size in bytes of the checkpoint."""

    interval_s: float | None
    """Seconds between checkpoints, as measured; None after the first one."""

    lifetime_s: float | None
    """Seconds after which retention recycles the checkpoint; None if it is not known."""

    bytes_per_s: float | None
    """Rate at which the tier took objects, checks included; None if nothing was sent yet."""

    unmeasured: int
    """Number of checkpoints since the rate was measured."""

    newest_age_s: float | None
    """Seconds since the newest checkpoint in the tier was sealed; None if there is none."""

    slowdown: float | None
    """Share by which steps beside an upload take longer, as measured; None if it is not known."""

    busy_share: float
    """Share of the time during which uploads were running lately."""

    max_slowdown: float
    """Largest share by which training may be slowed down."""

    max_age_s: float | None
    """Age in seconds that the newest checkpoint in the tier should not exceed; None if the tier
    should get as many as it can."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, with its reason."""

    choice: Choice
    reason: str
    """Reason in words that follow the choice and a colon."""


def decide(now: Situation) -> Decision:
    """Return what to do with a checkpoint that has just been sealed."""
    age_s, limit_s = now.newest_age_s, now.max_age_s
    if now.bytes_per_s is None:
        return Decision("upload", "the rate of the link is not known yet")
    needed_s = now.nbytes / now.bytes_per_s
    takes = f"it takes {_seconds(needed_s)} at {rate(now.bytes_per_s)}"
    if now.lifetime_s is not None and needed_s > now.lifetime_s * _MARGIN:
        if now.unmeasured >= 1:
            return Decision("upload", "the link may have become faster, so it is measured again")
        return Decision(
            "skip",
            f"{takes}, and retention recycles it after {_seconds(now.lifetime_s)}: a larger keep= "
            "gives it the time",
        )
    if age_s is None:
        return Decision("upload", f"the tier has no checkpoint yet; {takes}")
    # What the age would be if only the next checkpoint were sent.
    next_s = age_s + (now.interval_s or 0.0) + _MARGIN * needed_s
    if limit_s is not None and next_s > limit_s:
        return Decision(
            "upload",
            f"the newest in the tier is {_seconds(age_s)} old, and would become older than "
            f"{_seconds(limit_s)}; {takes}",
        )
    slowed = (now.slowdown or 0.0) * now.busy_share
    if slowed > now.max_slowdown:
        return Decision(
            "skip",
            f"uploads slow training down by {slowed:.1%}, at most {now.max_slowdown:.1%} is "
            "allowed",
        )
    if limit_s is not None:
        return Decision(
            "keep",
            f"the newest in the tier is {_seconds(age_s)} old, and {_seconds(limit_s)} are allowed",
        )
    return Decision("upload", takes)


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
