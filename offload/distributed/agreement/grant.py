"""The grant of a working slot, and the seals that say which parts may not be written to.

At the first step after a seal or a restore, the writer offers a slot with its generation, and says
which parts any checkpoint names. Each rank gets a part ready that neither the offer nor the ledger
of its own seals names. Nobody changes a parameter or writes a chunk before all ranks are ready. Or
the writer offers to go on *in place*, in the slot of a seal that was aborted; a rank accepts that
only if it has read itself that the seal was aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Final

from offload.distributed.agreement.messages import Json, tuples_of
from offload.distributed.agreement.peers import Peers
from offload.errors import RanksError

NO_SEAL = -1
"""Number in an offer that stands for no seal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the writer offers all ranks to write into."""

    slot: str
    """Name of the working slot's directory."""

    generation: int
    """Generation of the state that is going to be written."""

    named: tuple[tuple[int, str], ...] = ()
    """Parts that any checkpoint names, or that the seal in flight will name: owner and part."""

    in_place_of: int = NO_SEAL
    """Number of the aborted seal whose slot all ranks go on writing to; `NO_SEAL` for a new
    slot."""

    decided: int = NO_SEAL
    """Number of the newest seal that was decided when the offer was made."""

    reason: str = ""
    """Why the seal was aborted, in words."""

    content: str = ""
    """Name of the content of the slot's model file; see `offload.format.digests.Content`."""

    readable: bool = False
    """Whether that content may be read back."""

    @property
    def is_in_place(self) -> bool:
        """Whether all ranks go on in the slot that they have."""
        return self.in_place_of != NO_SEAL

    def as_json(self) -> Json:
        """Return the offer as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Offer:
        """Return the offer of a message."""
        return cls(**tuples_of(value))


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


def accept(
    peers: Peers,
    offer: Offer,
    outcome_of: Callable[[int], Outcome | None],
    ready: Callable[[Offer], Json],
) -> Json:
    """Get this rank ready for an offer, or raise why it cannot be."""
    if offer.is_in_place:
        outcome = outcome_of(offer.in_place_of)
        if outcome is not Outcome.ABORTED:
            known = (
                "has not taken part in it" if outcome is None else f"knows it as {outcome.value}"
            )
            raise RanksError(
                f"{peers.name(peers.leader)} goes on in the slot of seal {offer.in_place_of}, "
                f"which was aborted; this rank {known}: restart the job"
            )
    return ready(offer)
