"""The decision whether a sealed checkpoint is uploaded: numbers in, a decision and its reason out.

A policy reads neither a clock nor a file. So a decision can be computed again from what is logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload.units import rate

Choice = Literal["upload", "parameters", "keep", "thin", "skip"]
"""What is done with a checkpoint:

- "upload": it is sent now.
- "parameters": its parameters are sent now, and can be used as soon as they are in the tier. The
  state goes behind them, until the parameters of a newer checkpoint are due.
- "keep": it stays on the drive only, because the tier has one that is new enough.
- "thin": it stays on the drive only, because uploads slow training down by more than is allowed, so
  that fewer checkpoints are sent.
- "skip": it stays on the drive only, although the tier could use it: it could not be sent in time.
"""

_MARGIN = 1.25
"""Factor by which an upload may take longer than the measured rate says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a decision depends on."""

    nbytes: int
    """Size in bytes of the checkpoint."""

    parameter_bytes: int | None
    """Size in bytes of its parameters; None if they cannot be sent before the state."""

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

    parameters_age_s: float | None
    """Seconds since the checkpoint was sealed whose parameters are the newest in the tier; None if
    there are none."""

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
    parameters = _parameters(now, needed_s, takes)
    if parameters is not None:
        return parameters
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
            "thin",
            f"uploads slow training down by {slowed:.1%}, at most {now.max_slowdown:.1%} is "
            "allowed",
        )
    if limit_s is not None:
        return Decision(
            "keep",
            f"the newest in the tier is {_seconds(age_s)} old, and {_seconds(limit_s)} are allowed",
        )
    return Decision("upload", takes)


def parameters_due(now: Situation) -> bool:
    """Return whether the parameters in the tier become too old without those of this checkpoint."""
    if now.bytes_per_s is None or now.parameter_bytes is None or now.max_age_s is None:
        return True
    if now.parameters_age_s is None:
        return True
    needed_s = _MARGIN * now.parameter_bytes / now.bytes_per_s
    return now.parameters_age_s + (now.interval_s or 0.0) + needed_s > now.max_age_s


def _parameters(now: Situation, needed_s: float, takes: str) -> Decision | None:
    """Return the decision if the link carries parameters in time, but not whole checkpoints."""
    if now.parameter_bytes is None or now.bytes_per_s is None:
        return None
    interval_s, limit_s = now.interval_s or 0.0, now.max_age_s
    first_s = now.parameter_bytes / now.bytes_per_s
    if limit_s is not None:
        # The next checkpoint can be sent when this one is complete.
        whole_fits = max(interval_s, _MARGIN * needed_s) + _MARGIN * needed_s <= limit_s
        first_fits = interval_s + _MARGIN * first_s <= limit_s
        if whole_fits or not first_fits:
            return None
        if not parameters_due(now):
            return Decision(
                "keep",
                f"the newest parameters in the tier are {_seconds(now.parameters_age_s or 0.0)} "
                f"old, and {_seconds(limit_s)} are allowed",
            )
        why = f"too long for an age of {_seconds(limit_s)}"
    elif (
        now.lifetime_s is None
        or needed_s <= now.lifetime_s * _MARGIN
        or first_s > now.lifetime_s / _MARGIN
    ):
        return None
    else:
        why = f"and retention recycles it after {_seconds(now.lifetime_s)}"
    return Decision("parameters", f"{takes}, {why}; the parameters take {_seconds(first_s)}")


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
