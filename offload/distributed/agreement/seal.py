"""The grant of a working slot, and the decision on a seal.

*Grant*: at the first step after a seal or a restore, the writer offers a slot with its generation,
and says which parts any checkpoint names. Each rank gets a part ready that neither the offer nor
the ledger of its own seals names. Or the writer offers to go on *in place*, in the slot of an
aborted seal; a rank accepts that only if it has read itself that the seal was aborted.

*Seal*: each rank makes its part durable and reports it. If all reports are well and agree, the
writer completes the checkpoint and renames it into place; the rename is the commit. Then it
announces one `Outcome`, and nothing else ever, for the seal's number.

A rank that has reported knows nothing until it reads the outcome. The writer may be stopped between
the last report and the rename, for longer than any limit, and go on then. So a rank that waits in
vain holds its part for ever, and says that it is in doubt. It also says so to the writer, which
aborts if it reads that before the rename.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Final

from offload.distributed.agreement.effects import (
    Act,
    Arrived,
    Await,
    ChannelLostError,
    Delete,
    Get,
    Program,
    Put,
)
from offload.distributed.agreement.peers import (
    FIRST_SIGN,
    Json,
    MessageError,
    Peers,
    begun_key,
    decode,
    encode,
    error_key,
    in_words,
    key,
    seal_scope,
    sign_key,
    tuples_of,
)
from offload.distributed.agreement.reports import Report, disagreement
from offload.distributed.agreement.unanimous import INTERRUPTS
from offload.errors import InDoubtError, RanksError, SealError, reason_of

NO_SEAL = -1
"""Number in an offer that stands for no seal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the writer offers all ranks to write into."""

    slot: str
    generation: int
    named: tuple[tuple[int, str], ...] = ()
    """Parts that any checkpoint names, or that the seal in flight will name: owner and part."""

    in_place_of: int = NO_SEAL
    """Number of the aborted seal whose slot all ranks go on writing to; `NO_SEAL` for a new
    slot."""

    decided: int = NO_SEAL
    """Number of the newest seal that was decided when the offer was made."""

    reason: str = ""
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

    ABORTED = "aborted"
    """The checkpoint does not exist, and never will. Its parts may be written to again. Announced
    only if the rename was not begun."""

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


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a seal, and why."""

    outcome: Outcome
    reason: str = ""
    error: BaseException | None = None
    step: int | None = None
    """Number of optimizer steps after which the writer sealed; None if it did not say so."""

    def as_error(self, own_step: int) -> SealError | None:
        """Return the error that every rank raises; None if the checkpoint exists."""
        step = own_step if self.step is None else self.step
        match self.outcome:
            case Outcome.PUBLISHED:
                return None
            case Outcome.ABORTED:
                return SealError(
                    f"sealing step {step} failed, so it is not a checkpoint on any rank; "
                    f"earlier checkpoints are untouched: {self.reason}"
                )
            case Outcome.IN_DOUBT:
                return InDoubtError(
                    f"it is not known whether step {step} is a checkpoint: {self.reason}. "
                    "What was written for it stays as it is. Restart the job: opening the store "
                    "finds out"
                )

    def encode(self, step: int) -> str:
        """Return the decision as a message, with the step at which the writer sealed."""
        fields = {"outcome": self.outcome.value, "reason": self.reason, "step": step}
        return encode("decision", fields)

    @classmethod
    def decode(cls, text: str, sender: str) -> Decision:
        """Return the decision in the message of a rank, which is named in words."""
        found = decode(text, "decision", sender)
        return cls(Outcome(found["outcome"]), found["reason"], step=found["step"])


def begin(
    peers: Peers, number: int, part: str, hold: Callable[[int, str], object]
) -> Program[None]:
    """Begin a seal on this rank, before anything else may choose a part to write to.

    `hold` notes that the part may become part of a checkpoint from now on.
    """
    yield Act(hold, (number, part))
    yield Put(sign_key(seal_scope(number), peers.rank), FIRST_SIGN)


def report(peers: Peers, number: int, own: Report) -> Program[None]:
    """Report this rank's part. After a `ChannelLostError` the report may have been sent."""
    if not peers.is_leader:  # the writer has its own report
        yield Put(key(seal_scope(number), "report", peers.rank), own.encode())


def barrier(peers: Peers, number: int) -> Program[None]:
    """Wait until every rank has written its blocks of the model file, or is known to fail.

    Nothing is decided here. If a rank does not come in time, its report will not come either.
    """
    scope = seal_scope(number)
    try:
        if peers.is_leader:
            yield Await(tuple((rank, key(scope, "written", rank)) for rank in peers.others), scope)
            yield Put(key(scope, "all-written"), "written")
        else:
            yield Put(key(scope, "written", peers.rank), "written")
            yield Await(((peers.leader, key(scope, "all-written")),), scope)
    except ChannelLostError:
        return  # the report finds out as well


def commit(
    peers: Peers,
    number: int,
    own: Report,
    complete: Callable[[Mapping[int, Report]], object],
    rename: Callable[[], object],
    settle: Callable[[int, Outcome], object],
) -> Program[Decision]:
    """Decide on a seal, once, on the writer, and announce the outcome; see `Agreement.commit`.

    When this returns the decision, all ranks have read it, or the limit has passed.
    """
    scope = seal_scope(number)
    reports, problem, lost = yield from _gather(peers, number, own)
    decision = Decision(Outcome.ABORTED, problem)
    interrupt: BaseException | None = None
    if not problem:
        try:
            yield Act(complete, (reports,))
            left = yield Get(key(scope, "left"))
            if left is not None:
                decision = Decision(
                    Outcome.ABORTED,
                    f"{left} waited for the decision for {peers.timeout_s:g} s, and gave up",
                )
            else:
                decision = yield from _rename(rename)
        except Exception as error:  # noqa: BLE001  (the decision carries it to all ranks)
            reason = f"{peers.name(peers.rank)}: {reason_of(error)}"
            decision = Decision(Outcome.ABORTED, reason, error)
        except INTERRUPTS as error:
            decision = Decision(Outcome.ABORTED, f"{peers.name(peers.rank)} was interrupted", error)
            interrupt = error
    if isinstance(decision.error, INTERRUPTS):
        interrupt = decision.error
    yield Act(settle, (number, decision.outcome))
    yield from _announce(peers, scope, decision.encode(own.step), {*peers.others} - lost)
    if interrupt is not None:
        raise interrupt
    return decision


def await_decision(
    peers: Peers, number: int, own: Report, settle: Callable[[int, Outcome], object]
) -> Program[Decision]:
    """Wait for the writer's decision on a seal, on a rank that has reported."""
    scope, leader = seal_scope(number), peers.name(peers.leader)
    error: BaseException | None = None
    try:
        arrived: Arrived = yield Await(((peers.leader, key(scope, "decision")),), scope)
        if peers.leader in arrived.values:
            decision = Decision.decode(arrived.values[peers.leader], leader)
            yield Act(settle, (number, decision.outcome))
            with suppress(ChannelLostError):  # the writer then stays until the limit has passed
                yield Put(key(scope, "read", peers.rank), "read")
            return decision
        begun = yield Get(sign_key(scope, peers.leader))
        if arrived.error:
            what = arrived.error
        elif arrived.left:
            what = f"{in_words(arrived.left)} before it decided"
        elif begun is None:
            what = (
                f"{leader}, which decides, has not called checkpoint() or hangs: call it on every "
                "rank"
            )
        else:
            what = f"{leader}, which decides, gave no sign of progress for {peers.timeout_s:g} s"
        yield Put(key(scope, "left"), peers.name(peers.rank))
    except (ChannelLostError, MessageError) as failure:
        what, error = str(failure), failure
    if own.error:  # nothing can be published without this rank's part
        decision = Decision(Outcome.ABORTED, f"{peers.name(peers.rank)}: {own.error}", error)
    else:
        decision = Decision(Outcome.IN_DOUBT, what, error)
    yield Act(settle, (number, decision.outcome))
    return decision


def _gather(
    peers: Peers, number: int, own: Report
) -> Program[tuple[dict[int, Report], str, frozenset[int]]]:
    """Return the reports, why no checkpoint can be made of them, in words, and the ranks lost."""
    scope = seal_scope(number)
    reports, refused = {peers.rank: own}, dict[int, str]()
    wanted = tuple((rank, key(scope, "report", rank)) for rank in peers.others)
    try:
        arrived: Arrived = yield Await(wanted, scope)
        begun = {peers.rank}
        for rank in peers.others:
            if rank not in arrived.values and (yield Get(sign_key(scope, rank))) is not None:
                begun.add(rank)
    except ChannelLostError as error:
        return reports, str(error), frozenset(peers.others)
    for rank, text in arrived.values.items():
        try:
            reports[rank] = Report.decode(text, peers.name(rank))
        except MessageError as error:
            refused[rank] = str(error)
    problem = arrived.error or disagreement(
        peers, reports, refused, begun, arrived.lost, arrived.left
    )
    return reports, problem, arrived.lost


def _rename(rename: Callable[[], object]) -> Program[Decision]:
    """Publish; from here on nothing is aborted."""
    try:
        yield Act(rename)
    except (Exception, *INTERRUPTS) as error:  # noqa: BLE001  (the decision carries it)
        return Decision(Outcome.IN_DOUBT, reason_of(error), error)
    return Decision(Outcome.PUBLISHED)


def _announce(peers: Peers, scope: str, decision: str, others: Collection[int]) -> Program[None]:
    """Announce a decision, and stay until other ranks have read it or the limit has passed.

    The keys are deleted only if every rank has read it: a slow rank may still come.
    """
    try:
        yield Put(key(scope, "decision"), decision)
        wanted = tuple((rank, key(scope, "read", rank)) for rank in sorted(others))
        arrived: Arrived = yield Await(wanted, scope)
        if arrived.values.keys() == {*peers.others}:
            per_rank = ("written", "report", "read", "sign")
            keys = [key(scope, what, rank) for what in per_rank for rank in range(peers.size)]
            common = ("all-written", "decision", "left")
            keys += [key(scope, what) for what in common]
            yield Delete((*keys, begun_key(scope), error_key(scope)))
    except ChannelLostError:
        return  # the others will find themselves in doubt, which is true of them
