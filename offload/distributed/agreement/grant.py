"""The grant of a working slot: where all ranks write from now on.

At the first step after a seal or a restore, the writer offers a slot with its generation, and says
which parts any checkpoint names. Each rank gets a part ready that neither the offer nor its own
ledger names. Nobody changes a parameter or writes a chunk before all ranks are ready. Or the writer
offers to go on *in place*, in the slot of a seal that was aborted; a rank accepts that only if it
has read itself that the seal was aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.distributed.agreement.ledger import Outcome
from offload.distributed.agreement.messages import Json, check_fields, pairs_of
from offload.distributed.agreement.peers import Peers
from offload.errors import RanksError

_FIELDS = {
    "slot": str,
    "generation": int,
    "named": list,
    "in_place_of": int,
    "decided": int,
    "reason": str,
    "content": str,
    "readable": bool,
}

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
        return {
            "slot": self.slot,
            "generation": self.generation,
            "named": [[owner, part] for owner, part in self.named],
            "in_place_of": self.in_place_of,
            "decided": self.decided,
            "reason": self.reason,
            "content": self.content,
            "readable": self.readable,
        }

    @classmethod
    def from_json(cls, value: Json) -> Offer:
        """Return the offer of a message."""
        found = check_fields(value, _FIELDS, "the offer of a slot")
        named = pairs_of(found["named"], int, str, "the offer of a slot")
        return cls(**{**found, "named": tuple(named)})


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
