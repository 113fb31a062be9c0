"""The seals of one rank: which are decided, and which parts the rank must not write to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final


class Outcome(Enum):
    """What became of a seal, as far as a rank knows."""

    PUBLISHED = "published"
    """The checkpoint exists, durably."""

    ABORTED = "aborted"
    """The checkpoint does not exist, and never will. Its parts may be written to again."""

    IN_DOUBT = "in doubt"
    """It is not known whether the checkpoint exists or will exist: only a restart finds out."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seals in which a rank takes part, as a value that never changes.

    A part that is being sealed may become, or be, part of a checkpoint. So it may be written to
    again only after the seal was read to be aborted, or if an offer, made after the seal was
    published, does not name it any more.
    """

    parts: Mapping[int, str] = field(default_factory=dict)
    """Part of each seal that is not known to be aborted; by the seal's number."""

    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    """What became of each seal that has ended on this rank."""

    def begun(self, number: int, part: str) -> Ledger:
        """Return the ledger after this rank has begun to seal a part."""
        return replace(self, parts={**self.parts, number: part})

    def settled(self, number: int, outcome: Outcome) -> Ledger:
        """Return the ledger after a seal has ended on this rank."""
        parts = dict(self.parts)
        if outcome is Outcome.ABORTED:
            parts.pop(number, None)
        return replace(self, parts=parts, outcomes={**self.outcomes, number: outcome})

    def covered(self, decided: int) -> Ledger:
        """Return the ledger after an offer whose list of named parts counts decided seals."""
        parts = {
            number: part
            for number, part in self.parts.items()
            if number > decided or self.outcomes.get(number) is not Outcome.PUBLISHED
        }
        outcomes = {
            number: outcome
            for number, outcome in self.outcomes.items()
            if number >= decided or outcome is Outcome.IN_DOUBT
        }
        return replace(self, parts=parts, outcomes=outcomes)

    @property
    def held(self) -> frozenset[str]:
        """Parts that this rank must not write to, besides those that an offer names."""
        return frozenset(part for part in self.parts.values() if part)

    @property
    def in_doubt(self) -> tuple[int, ...]:
        """Numbers of the seals of which this rank does not know what became."""
        return tuple(n for n, outcome in self.outcomes.items() if outcome is Outcome.IN_DOUBT)


EMPTY: Final = Ledger()
"""The ledger of a rank that has sealed nothing yet."""
