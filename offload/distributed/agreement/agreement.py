"""The agreement of all ranks on one store, as one rank's optimizer uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import offload.errors
from gds.waiting import Monitor
from offload.distributed.agreement import seal
from offload.distributed.agreement.driver import Driver, Places, Quiet, Signs
from offload.distributed.agreement.effects import Channel, ChannelLostError, Program
from offload.distributed.agreement.opening import Plan, plan_opening
from offload.distributed.agreement.peers import (
    Json,
    Peers,
    announcement,
    error_key,
    exchange_scope,
    in_words,
    leave,
    seal_scope,
    who_left,
)
from offload.distributed.agreement.reports import Report
from offload.distributed.agreement.seal import EMPTY, NO_SEAL, Offer, Outcome, accept
from offload.distributed.agreement.sights import Sight
from offload.distributed.agreement.unanimous import (
    INTERRUPTS,
    Agreed,
    Exchange,
    OutOfStepError,
    await_read,
    unanimous,
)
from offload.errors import InDoubtError, OffloadError, RanksError, reason_of

T = TypeVar("T")

_LEAVE_S = 1.0
"""Most seconds for which a rank that leaves waits for the key-value store. Without its note the
others miss it after their limit."""


class Agreement:
    """Lets the ranks of one optimizer agree. There is one for each optimizer on each rank.

    `open`, `agree`, `together`, `everywhere` and `grant` are collective: every rank makes the same
    calls in the same order. The same holds for `begin_seal`. The calls that follow it, `barrier`,
    `report`, then `commit` on the writer or `await_decision` on another rank, may be made by
    another thread beside training.

    All calls together wait no longer than about one limit for a rank that gives no sign of progress
    any more: a call that follows one which has waited in vain fails at once, unless the rank has
    come meanwhile. After a rank was lost, or a seal is in doubt, every further call raises the same
    error: the job has to be restarted.
    """

    def __init__(self, channel: Channel, rank: int, size: int, *, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
        if timeout_s <= 0:
            raise ValueError(f"agreement_timeout_s must be positive, got {timeout_s:g}")
        self._peers = Peers(rank, size, timeout_s)
        # A connection for each thread: a wait on one holds up every other call on the same one.
        self._channels = [channel]
        try:
            self._channels += [channel.clone() for _ in range(2)]
        except BaseException:
            for made in self._channels:
                made.close()
            raise
        self._signs = Signs(self._channels[2], rank, timeout_s)
        quiet: dict[int, Quiet] = {}
        self._places = Places(self._signs, rank)
        self._exchanges = Driver(self._channels[0], self._signs, timeout_s, quiet, self._why_apart)
        self._seals = Driver(self._channels[1], self._signs, timeout_s, quiet)
        self._changed = Monitor()
        self._ledger = EMPTY
        self._reports: dict[int, Report] = {}
        self._decided = NO_SEAL
        self._stale: list[str] = []
        self._lost: str = ""

    @property
    def peers(self) -> Peers:
        """The ranks, and who leads them."""
        return self._peers

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the store's writer; known once the store is open."""
        return self._peers.is_leader

    @property
    def held(self) -> frozenset[str]:
        """Parts that this rank has sealed and must not write to."""
        with self._changed:
            return self._ledger.held

    def open(self, sight: Sight, enter: Callable[[Plan], object]) -> Plan:
        """Decide with all ranks how the store is opened, and open it. Collective.

        Nothing that ``enter`` has done may matter if it fails on any rank.
        """

        def make(asked: Mapping[int, Json]) -> Json:
            """Decide, on rank 0, by what all ranks see."""
            sights = [Sight.from_json(asked[rank]) for rank in sorted(asked)]
            return plan_opening(sights).as_json()

        def ready(value: Json) -> None:
            enter(Plan.from_json(value))

        agreed = self.agree("open()", make, ready, ask=sight.as_json())
        plan = Plan.from_json(agreed.offer)
        self._peers = replace(self._peers, leader=plan.writer, hosts=plan.hosts)
        return plan

    def agree(
        self,
        what: str,
        make: Callable[[Mapping[int, Json]], Json],
        ready: Callable[[Json], Json],
        *,
        ask: Json = None,
        heeds_errors: bool = True,
    ) -> Agreed:
        """Accept the writer's offer on all ranks, or raise the same error on all. Collective.

        If ranks ``ask``, which all of them do or none, the offer is made of what each has said.
        """
        self._require_whole()
        scope = self._places.begin_exchange(what)
        if text := self._why_apart():
            raise OutOfStepError(self._lose(f"{what}: {text}. Restart the job"))
        exchange = Exchange(
            peers=self._peers,
            scope=scope,
            what=what,
            ask=ask,
            make=make,
            ready=ready,
            heeds_errors=heeds_errors,
            stale=tuple(self._stale),
        )
        try:
            with self._signs.during(scope):
                agreed = self._exchanges.run(unanimous(exchange))
        except (OutOfStepError, ChannelLostError) as error:
            self._lose(str(error))
            raise
        except INTERRUPTS:
            self._lose(f"{what} was interrupted on this rank. Restart the job")
            raise
        finally:
            self._stale.append(scope)
        self._stale = [scope]
        return agreed

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Do something on every rank, and return when it has succeeded on all of them. Collective.

        The action makes no collective call. If it fails on a rank, that rank raises its error, and
        the others one that names the rank and the cause, of the same class if it is one of
        this package.
        """
        results: list[T] = []
        self.everywhere(what, lambda: results.append(action()))
        return results[0]

    def everywhere(self, what: str, action: Callable[[], Json]) -> list[Json]:
        """Do something on every rank, and return what it returns on each, by rank. Collective.

        Raises the errors of `together`.
        """
        failures: list[Exception] = []

        def ready(_: Json) -> Json:
            """Do it, and return the result or the error as the note of this rank."""
            try:
                return {"result": action()}
            except Exception as error:  # noqa: BLE001  (raised below, when all ranks know of it)
                failures.append(error)
                return {"class": type(error).__name__, "error": reason_of(error)}

        # A rank that announced an error before goes on with this call.
        notes = self.agree(what, lambda _: None, ready, heeds_errors=False).notes
        if failures:
            raise failures[0]
        for rank, note in sorted(notes.items()):
            if "error" in note:
                raise _class_of(note["class"])(f"{self._peers.name(rank)}: {note['error']}")
        return [note["result"] for _, note in sorted(notes.items())]

    def grant(
        self,
        offer: Callable[[], Offer],
        ready: Callable[[Offer, frozenset[str]], Json],
        what: str = "step()",
    ) -> Agreed:
        """Get ready with all ranks for writing into a working slot. Collective.

        Called at the first step after a seal or a restore. No rank changes a parameter or writes a
        chunk before this has returned.
        """

        def make(_: Mapping[int, Json]) -> Json:
            """Return the offer of the writer, with the seals that are decided."""
            with self._changed:
                decided = self._decided  # read first: what is published later is not named
            return replace(offer(), decided=decided).as_json()

        def get_ready(value: Json) -> Json:
            return accept(self._peers, Offer.from_json(value), self._outcome_of, choose)

        def choose(found: Offer) -> Json:
            """Get ready without the parts that this rank holds."""
            with self._changed:
                self._ledger = self._ledger.covered(found.decided)
                held = self._ledger.held
            return ready(found, held)

        agreed = self.agree(what, make, get_ready)
        return replace(agreed, offer=Offer.from_json(agreed.offer))

    def begin_seal(self, part: str, *, is_placed: bool = True) -> int:
        """Announce that this rank seals, and return the seal's number. Collective; never waits.

        From this call on the part must not be written to, except for what the seal itself writes
        before its report, until the seal is known to be aborted. `report` must follow, and then
        `commit` or `await_decision`, even if this rank fails.
        """
        self._require_whole()
        number = self._places.begin_seal(is_placed=is_placed)
        try:
            self._exchanges.run(seal.begin(self._peers, number, part, self._hold))
        except ChannelLostError as error:
            self._lose(str(error))
            raise
        self._signs.begin(seal_scope(number))
        return number

    def begin_call(self, num_steps: int) -> None:
        """Record that a call of the user begins, after so many optimizer steps."""
        self._places.num_steps = num_steps

    def progress(self) -> None:
        """Give a sign of progress: something was written or read. Any thread; cheap, never raises.

        Without it, a rank that writes for longer than the limit counts as lost.
        """
        self._signs.give()

    def barrier(self, number: int) -> None:
        """Wait in a seal until every rank has come this far, or fails. On the seal's thread."""
        self._seals.run(seal.barrier(self._peers, number))

    def report(self, number: int, report: Report) -> None:
        """Report this rank's part of a seal: it is durable, or the report says why not."""
        self._reports[number] = report
        with suppress(ChannelLostError):  # the wait for the decision finds out as well
            self._seals.run(seal.report(self._peers, number, report))

    def commit(
        self,
        number: int,
        complete: Callable[[Mapping[int, Report]], object],
        rename: Callable[[], object],
    ) -> None:
        """Decide on a seal and tell all ranks; on the writer, once, after its own `report`.

        `complete` does all that is left before the rename, with the report of each rank. After an
        error in it the checkpoint does not exist; after one in `rename` nobody knows.
        Returns when all ranks have read that the checkpoint exists, or the limit has passed.
        """
        own = self._reports.pop(number)
        program = seal.commit(self._peers, number, own, complete, rename, self._settle)
        self._conclude(number, own, self._run_seal(number, program))

    def await_decision(self, number: int) -> None:
        """Wait for the writer's decision on a seal; on every other rank, after `report`."""
        own = self._reports.pop(number)
        program = seal.await_decision(self._peers, number, own, self._settle)
        self._conclude(number, own, self._run_seal(number, program))

    def broadcast_error(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed and will not take part in the next exchange.

        They raise the error there at once, instead of waiting for the limit. Any thread; never
        waits, never raises.
        """
        peers = self._peers
        text = f"{peers.name(peers.rank)} failed: {reason_of(error)}"
        scope = exchange_scope(self._places.num_exchanges)
        self._signs.put(error_key(scope), announcement(peers.rank, text))

    def require_all_here(self, what: str) -> None:
        """Check that no rank has left. Any thread; never waits for another rank."""
        if left := who_left(self._signs.get, self._peers.others):
            text = f"{what}: {in_words(left)}. Restart the job"
            self._lose(text)
            raise RanksError(text)

    def require_same_calls(self, what: str) -> None:
        """Check that no rank has begun a seal or an exchange that this rank has not begun.

        For a step, which begins neither. Any thread; never waits for another rank.
        """
        if text := self._places.apart_in_step(self._peers, what):
            raise OutOfStepError(self._lose(f"{what}: {text}. Restart the job"))

    def close(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this one leaves, and release the connections. Idempotent.

        No exchange: other ranks may have ended already. Those that wait for this one, now or later,
        raise an error that names it. To be called after the seals of this rank have ended. The
        first rank, whose process may serve the key-value store, stays until all ranks have read how
        the last exchange has ended, or the limit has passed.
        """
        if self._peers.rank == 0 and self._stale and not self._lost:
            with suppress(ChannelLostError):
                self._exchanges.run(await_read(self._peers, self._stale[-1]))
        put = partial(self._signs.put, within_s=_LEAVE_S)
        leave(put, self._peers.rank, "" if error is None else reason_of(error))
        self._lose("the optimizer of this rank is closed")
        for channel in self._channels:
            channel.close()

    def _outcome_of(self, number: int) -> Outcome | None:
        """Wait until a seal has ended on this rank and return what became of it."""
        if number >= self._places.num_seals:
            return None
        return self._changed.wait_until(lambda: self._ledger.outcomes.get(number))

    def _hold(self, number: int, part: str) -> None:
        with self._changed:
            self._ledger = self._ledger.begun(number, part)

    def _settle(self, number: int, outcome: Outcome) -> None:
        with self._changed:
            self._ledger = self._ledger.settled(number, outcome)
            self._decided = max(self._decided, number)
            self._changed.notify_all()

    def _run_seal(self, number: int, program: Program[seal.Decision]) -> seal.Decision:
        try:
            return self._seals.run(program)
        except BaseException as error:
            with self._changed:
                if number not in self._ledger.outcomes:  # another thread may wait for one
                    self._settle(number, Outcome.IN_DOUBT)
            self._lose(f"a seal ended early on this rank ({reason_of(error)}). Restart the job")
            raise

    def _conclude(self, number: int, own: Report, decision: seal.Decision) -> None:
        self._signs.end(seal_scope(number))
        error = decision.as_error(own.step)
        if isinstance(error, InDoubtError):
            self._lose(str(error))
        if error is not None:
            raise error from decision.error

    def _why_apart(self) -> str:
        """Return why the other ranks will never come to this one's exchange, in words."""
        return self._places.apart_in_exchange(self._peers)

    def _lose(self, text: str) -> str:
        """Record, and return, why only a restart helps."""
        with self._changed:
            self._lost = self._lost or text
        return text

    def _require_whole(self) -> None:
        """Raise the error after which only a restart helps, if there was one."""
        with self._changed:
            if self._ledger.in_doubt:
                raise InDoubtError(self._lost or "it is not known what became of the last seal")
            if self._lost:
                raise RanksError(self._lost)


def _class_of(name: str) -> type[OffloadError]:
    """Return the class of this package with a name, if a message is all that it takes."""
    found = getattr(offload.errors, name, None)
    if (
        isinstance(found, type)
        and issubclass(found, OffloadError)
        and not issubclass(found, OSError)
    ):
        return found
    return RanksError
