"""What retention must keep, said another way than the library says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload import BestBy, EverySteps, LastK, Retention

METRIC = "loss"


@dataclass(frozen=True)
class Kept:
    """What counts of a checkpoint."""

    uid: int
    step: int
    loss: float | None
    """None if nobody has measured it."""

    is_pinned: bool


@dataclass(frozen=True)
class Policy:
    """A policy of up to three parts."""

    last: int = 1
    every: int | None = None
    best: int | None = None

    def retention(self) -> Retention:
        """Return what the optimizer is constructed with."""
        policy: Retention = LastK(self.last)
        if self.every is not None:
            policy = policy | EverySteps(self.every)
        if self.best is not None:
            policy = policy | BestBy(METRIC, k=self.best)
        return policy

    def kept(self, found: Sequence[Kept]) -> list[int]:
        """Return which checkpoints stay, of those there are, oldest first."""
        stay = {one.uid for one in [*found[-self.last :], *found[-1:]]}
        stay |= {one.uid for one in found if one.is_pinned}
        if self.every is not None:
            for multiple in range(self.every, max(f.step for f in found) + 1, self.every):
                stay.add(next(one.uid for one in found if one.step >= multiple))
        left = [(one.loss, at) for at, one in enumerate(found) if one.loss is not None]
        for _ in range(self.best or 0):
            if left:
                best = min(left)
                left.remove(best)
                stay.add(found[best[1]].uid)
        return [one.uid for one in found if one.uid in stay]
