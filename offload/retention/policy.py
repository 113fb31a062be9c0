"""Retention policies: small rules for the checkpoints that a store keeps, combined with ``|``.

    keep=LastK(2) | EverySteps(1000) | BestBy("val_loss")

A policy looks at records of the existing checkpoints and returns those that it keeps. A checkpoint
that no part of the policy keeps may be recycled. Two kinds of checkpoints are kept in addition: the
newest one, and those with a pin. A policy reads neither a drive nor a clock: the same records give
the same answer.

A policy never keeps a checkpoint that it has dropped before. So after each new checkpoint the
policy needs only the new record and the records that it kept last time. It then keeps the same
checkpoints as if it saw the records of all checkpoints that ever existed. Policies order records by
generation, not by time: generations always rise, but a clock may be set back.
"""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, get_args

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Record:
    """Description of one complete checkpoint for a policy."""

    step: int
    """Optimizer steps taken."""

    generation: int
    """Counter of the store, different in every record."""

    created: str = ""
    """ISO 8601 time at which the seal began, according to the clock at that time."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the checkpoint, by name; finite."""

    pins: tuple[str, ...] = ()
    """Names of the checkpoint's pins."""

    has_state: bool = True
    """Whether the checkpoint has the optimizer's state, and not its parameters only."""


class Retention(ABC):
    """A rule for the checkpoints to keep. ``a | b`` keeps what `a` keeps and what `b` keeps."""

    @property
    def most(self) -> int | None:
        """Largest number of checkpoints kept at a time; None if it grows with training."""
        return None

    @abstractmethod
    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return the generations of the checkpoints that this policy keeps.

        Args:
            records: Records of complete checkpoints, by rising generation.
        """

    @property
    def parts(self) -> tuple[Retention, ...]:
        """The policies that this one is combined from."""
        return (self,)

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            return NotImplemented
        return AnyOf(*self.parts, *other.parts)


@dataclass(frozen=True)
class LastK(Retention):
    """Keep the newest `k` checkpoints; ``keep=2`` means ``keep=LastK(2)``."""

    k: int

    def __post_init__(self) -> None:
        """Refuse a `k` that is not a whole number of at least 1, with a `ValueError`."""
        if not _is_count(self.k):
            raise ValueError(
                f"keep must be at least 1, got {self.k!r}: with 0 there would be no checkpoint "
                "while the next one is being sealed"
            )

    @property
    def most(self) -> int:
        """Largest number of checkpoints kept at a time: `k`."""
        return self.k

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return the `k` highest generations."""
        return {record.generation for record in records[-self.k :]}


@dataclass(frozen=True)
class EverySteps(Retention):
    """Keep the first checkpoint at or after each multiple of `steps` optimizer steps, for good."""

    steps: int

    def __post_init__(self) -> None:
        """Refuse `steps` that are not a whole number of at least 1, with a `ValueError`."""
        if not _is_count(self.steps):
            raise ValueError(f"steps must be a whole number of at least 1, got {self.steps!r}")

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return the first generation of each interval, but none before the first multiple."""
        found: dict[int, int] = {}
        for record in records:
            if record.step >= self.steps:
                found.setdefault(record.step // self.steps, record.generation)
        return set(found.values())


@dataclass(frozen=True)
class EverySeconds(Retention):
    """Keep a checkpoint every `seconds` seconds of the clock, for good.

    The first checkpoint is kept, and then each checkpoint that began at least `seconds` after the
    last one kept. If the clock has been set back, counting begins anew. A checkpoint whose time
    cannot be read is not kept by this policy.
    """

    seconds: float

    def __post_init__(self) -> None:
        """Refuse `seconds` that are not a finite number above 0, with a `ValueError`."""
        if not _is_number(self.seconds) or not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be a finite number above 0, got {self.seconds!r}")

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return the generations that are far enough from the one kept before."""
        found = set()
        last_s: float | None = None
        for record in records:
            now_s = _seconds(record.created)
            if now_s is None:
                continue
            if last_s is None or now_s < last_s or now_s - last_s >= self.seconds:
                found.add(record.generation)
                last_s = now_s
        return found


@dataclass(frozen=True)
class BestBy(Retention):
    """Keep the `k` checkpoints with the smallest (``"min"``) or largest (``"max"``) metric.

    Checkpoints sealed without this metric are ignored. Of two checkpoints with equal metrics the
    older one is better.
    """

    metric: str
    k: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        """Refuse an empty name, a `k` below 1 or an unknown mode, with a `ValueError`."""
        if not self.metric:
            raise ValueError(f"metric must be the name of a metric, got {self.metric!r}")
        if not _is_count(self.k):
            raise ValueError(f"k must be a whole number of at least 1, got {self.k!r}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")

    @property
    def most(self) -> int:
        """Largest number of checkpoints kept at a time: `k`."""
        return self.k

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return the generations of the best checkpoints."""
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (sign * record.metrics[self.metric], record.generation)
            for record in records
            if self.metric in record.metrics
        )
        return {generation for _, generation in ranked[: self.k]}


@dataclass(frozen=True)
class ParametersOnly(Retention):
    """Keep only the parameters of the checkpoints that `rule` keeps and no other policy does.

    Such a checkpoint gives its state files to later steps: with Adam, 2 bytes per 16-bit parameter
    stay of 14. It can be opened, exported and loaded, and `restore` does not continue from it. It
    is refused with several ranks, and with a tier.
    """

    rule: Retention

    def __post_init__(self) -> None:
        """Refuse a `rule` that is not a policy, or has this one in it, with a `TypeError`."""
        rule: object = self.rule
        if not isinstance(rule, Retention) or keeps_parameters_only(rule):
            raise TypeError(
                "ParametersOnly takes a policy that keeps whole checkpoints, such as "
                f"EverySteps(1000), got {self.rule!r}"
            )

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return what `rule` keeps."""
        return self.rule.kept(records)


class AnyOf(Retention):
    """Keep what any of several policies keeps. ``|`` makes this policy."""

    def __init__(self, *parts: Retention) -> None:
        self._parts = tuple(dict.fromkeys(parts))

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return the generations that any of the policies keeps."""
        return set[int]().union(*(part.kept(records) for part in self._parts))

    @property
    def parts(self) -> tuple[Retention, ...]:
        """The policies that this one is combined from."""
        return self._parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyOf) and set(self._parts) == set(other._parts)

    def __hash__(self) -> int:
        return hash(frozenset(self._parts))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._parts))


def as_retention(keep: int | Retention) -> Retention:
    """Return the policy for a user's ``keep=``, which is a number of checkpoints or a policy.

    Raises:
        ValueError: The number is below 1.
        TypeError: `keep` is neither a number nor a policy.
    """
    if isinstance(keep, Retention):
        return keep
    if isinstance(keep, int):
        return LastK(keep)
    raise TypeError(
        f"keep must be a number of checkpoints or a policy such as LastK(2) | EverySteps(1000), "
        f"got {keep!r}: leave it out to keep the newest 2"
    )


def keeps_parameters_only(policy: Retention) -> bool:
    """Return whether a policy keeps of some checkpoints only the parameters."""
    return any(isinstance(part, ParametersOnly) for part in policy.parts)


def metrics_of(policy: Retention) -> set[str]:
    """Return the metrics that a policy ranks by."""
    rules = (p.rule if isinstance(p, ParametersOnly) else p for p in policy.parts)
    return {part.metric for rule in rules for part in rule.parts if isinstance(part, BestBy)}


def kept_generations(policy: Retention, records: Iterable[Record]) -> set[int]:
    """Return the generations that a store keeps, whole or their parameters only.

    They are kept by its policy, by pins, and as the newest.

    Args:
        policy: Policy of the store.
        records: Records of the store's complete checkpoints, in any order.
    """
    ordered = sorted(records, key=lambda record: record.generation)
    only = [part for part in policy.parts if isinstance(part, ParametersOnly)]
    return whole_generations(policy, ordered).union(*(part.kept(ordered) for part in only))


def whole_generations(policy: Retention, records: Iterable[Record]) -> set[int]:
    """Return the generations that a store keeps with their state, if they have it.

    The newest of those that have it is always among them. The arguments are those of
    `kept_generations`.
    """
    ordered = sorted(records, key=lambda record: record.generation)
    pinned = {record.generation for record in ordered if record.pins}
    newest = {record.generation for record in (_with_state(ordered) or ordered)[-1:]}
    whole = [part for part in policy.parts if not isinstance(part, ParametersOnly)]
    return (pinned | newest).union(*(_kept_by(part, ordered) for part in whole))


def _kept_by(part: Retention, ordered: Sequence[Record]) -> set[int]:
    # The newest checkpoints are there to go on from, so those without state do not count.
    return part.kept(_with_state(ordered) if isinstance(part, LastK) else ordered)


def _with_state(ordered: Sequence[Record]) -> list[Record]:
    return [record for record in ordered if record.has_state]


def num_wanted(policy: Retention, records: Collection[Record]) -> int:
    """Return the number of checkpoints that a store needs space for, without the working slot.

    The result is a sum of two numbers. The first is the largest number of checkpoints that policies
    with a limit can keep, including the newest checkpoint, which is always kept. The second is the
    number of other existing checkpoints that are kept for good or by a pin. The result is `k` for
    ``LastK(k)`` without pins.

    Args:
        policy: Policy of the store.
        records: Records of the store's complete checkpoints, in any order.
    """
    newest = max((part.k for part in policy.parts if isinstance(part, LastK)), default=1)
    limited = [part for part in policy.parts if part.most is not None]
    others = sum(part.most or 0 for part in limited if not isinstance(part, LastK))
    ordered = sorted(records, key=lambda record: record.generation)
    within = _kept_by(LastK(newest), ordered).union(*(_kept_by(p, ordered) for p in limited))
    return newest + others + len(kept_generations(policy, ordered) - within)


def describe(policy: Retention) -> str:
    """Return what a policy keeps, in words that follow "keeping"."""
    if isinstance(policy, LastK):
        return f"{policy.k} checkpoint{'' if policy.k == 1 else 's'}"
    return repr(policy)


def as_prune_options(policy: Retention) -> str | None:
    """Return the options with which ``offload prune`` keeps what a policy keeps.

    The result is None if the command cannot keep exactly that.
    """
    options: list[str] = []
    for part in policy.parts:
        match part:
            case LastK(k):
                options += ["--keep", str(k)]
            case EverySteps(steps):
                options += ["--every", str(steps)]
            case EverySeconds(seconds):
                options += ["--every-seconds", str(seconds)]
            case BestBy(metric, k, mode) if ":" not in metric:
                options += ["--best", f"{metric}:{mode}:{k}"]
            case _:
                return None
    once = [option for option in options if option.startswith("--") and option != "--best"]
    return shlex.join(options) if len(once) == len({*once}) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(created: str) -> float | None:
    """Return a time as seconds since the epoch; None if the text is not a time.

    A time without a zone is taken for UTC.
    """
    try:
        moment = datetime.fromisoformat(created)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
