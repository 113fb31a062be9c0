"""The decision on a seal: the writer takes it once, and every other rank waits for it.

Each rank makes its part durable and reports it. The writer gathers the reports. If all are well and
agree, it completes the checkpoint and renames it into place; the rename is the commit. Then it
announces one of three outcomes, and nothing else ever, for the seal's number:

- *published*: the checkpoint exists, durably.
- *aborted*: it does not exist, and never will. This is announced only if the rename was not begun.
- *in doubt*: the rename, or the sync after it, failed.

A rank that has reported knows nothing until it reads the outcome. The writer may be stopped between
the last report and the rename, for longer than any limit, and go on then. So a rank that waits in
vain holds its part for ever, and says that it is in doubt. It also says so to the writer, which
aborts if it reads that before the rename.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

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
from offload.distributed.agreement.grant import Outcome
from offload.distributed.agreement.messages import MessageError, decode, encode
from offload.distributed.agreement.peers import (
    FIRST_SIGN,
    Peers,
    begun_key,
    error_key,
    in_words,
    key,
    seal_scope,
    sign_key,
)
from offload.distributed.agreement.reports import Report, disagreement
from offload.distributed.agreement.unanimous import INTERRUPTS
from offload.errors import InDoubtError, SealError, reason_of

_FIELDS = {"outcome": str, "reason": str, "step": int}


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a seal, and why."""

    outcome: Outcome
    """What became of it."""

    reason: str = ""
    """Why it was not published, in words."""

    error: BaseException | None = None
    """Error behind it, if it was raised on this rank."""

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
        found = decode(text, "decision", _FIELDS, sender)
        if found["outcome"] not in {outcome.value for outcome in Outcome}:
            raise MessageError(f"{sender}: a decision is {found['outcome']!r}")
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
