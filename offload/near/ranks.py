"""The engine of one of several ranks, each of which has a server of its own for its share.

The servers do not know of each other. What makes one of their checkpoints:

1. The ranks *publish* step N in their key-value store when each has reported that its server has
   sealed N durably. Only then a handle is done, and a rank steps or seals again.
2. So a server has at most one checkpoint that is newer than the last published one. As each keeps
   two at least, whatever ``keep=`` says, the last published one is on all servers.
3. Who dies in a step leaves slots that no checkpoint names. Who dies in a seal leaves N on some
   servers; the one before is on all.
4. If a seal or a step fails on one rank, all raise, and refuse everything until `restore`. It
   takes the newest checkpoint that all servers list. Newer ones were never published: each server
   withdraws its own, durably, before any rank steps. If that is cut short, the next `restore`
   chooses the same one.
5. Checkpoints of one step are told apart by a number that all ranks give them, as a metric named
   after rank and ranks: after ``fresh=True``, or of other trainings. None is replaced.
6. A rank that does not learn what was decided is in doubt, and refuses everything. A new job finds
   by rule 4 what all servers have.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from errno import ENOENT
from typing import Any, Final, NoReturn, TypeAlias

from gds.waiting import start
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import CheckpointInfo
from offload.distributed.agreement.reports import Report
from offload.distributed.rank_group import RankGroup
from offload.engine.seal_handle import SealHandle
from offload.engine.stepping import Metrics
from offload.engine.training_state import Groups
from offload.errors import (
    BrokenOptimizerError,
    CheckpointNotFoundError,
    MismatchError,
    NearError,
    SealError,
    reason_of,
)
from offload.format.document import digest_of
from offload.format.names import step_of
from offload.format.train_state import encode
from offload.near.engine import NearEngine
from offload.near.terms import encode_groups
from offload.options import Options
from offload.retention.policy import EverySeconds, LastK, Retention

_BITS: Final = 48
"""Length of the number of a checkpoint, of which a float holds each bit."""

_POLL_S: Final = 0.2
_PAUSE_S: Final = 0.002
"""Seconds for which a thread that waits for a seal asks the server, and lets others ask it."""

Mark: TypeAlias = list[Any]
"""Step of a checkpoint, and the number that all ranks gave it."""


class RankEngine(NearEngine):
    """Carries out an optimizer's calls on one of several ranks, on the server of this rank.

    The constructor, `step`, `checkpoint`, `restore`, `pin` and `unpin` are collective. Besides the
    errors of `NearEngine` they raise RanksError if another rank fails or is lost, and the
    constructor raises MismatchError if a server has checkpoints of another rank, or of another
    number of ranks. `close` closes the ranks, too.
    """

    def __init__(
        self, *arguments: Any, keep: Retention, options: Options, ranks: RankGroup, **others: Any
    ) -> None:
        self._ranks = ranks
        self._metric = f"rank_{ranks.rank}_of_{ranks.size}"
        self._pause_s = options.agreement_timeout_s / 10
        self._broken = ""
        """Why only `restore` helps, in words."""
        self._agreed_seal: SealHandle | None = None
        """Handle of the last seal."""
        self._sealed: Mark = []
        """Step of the last checkpoint, and what it was made of, if this process has made it."""
        self._common: list[Mark] = []
        """Checkpoints that all servers have, as far as this rank knows; newest last."""
        make = super().__init__

        def begin() -> list[Mark]:
            """Begin on this rank's server, and return its checkpoints."""
            if options.overlap is not None or any(type(p) is EverySeconds for p in keep.parts):
                raise NearError(
                    "overlap= and EverySeconds, whose clock is each server's, are not possible for "
                    "ranks with a server each: leave them out"
                )
            make(*arguments, keep=keep | LastK(2), options=options, ranks=ranks, **others)
            return self._listed()

        try:
            self._common = _in_all(self._everywhere("the constructor", begin))
        except BaseException:
            if hasattr(self, "_link"):
                self._link.drop()
            raise

    def step(self, groups: Groups) -> None:
        """Take a step on all servers, and bring the new values to all ranks."""
        self._settle()

        def take() -> str:
            """Take it here, and return the numbers of all parameters with a gradient as bits."""
            self._require_usable(broken)
            gradients = self._gradients(groups)
            self._exchange(groups, gradients)(None, lambda _: None)
            return f"{sum(1 << n for n, one in stored if id(one.parameter) in gradients):x}"

        stored, broken = [*enumerate(self._stored)], self._broken
        self._broken = broken or f"step {self._link.num_steps + 1} has failed"
        stepped = 0
        for text in self._everywhere("step()", take):
            stepped |= int(text, 16)
        self._ranks.bring([one for number, one in stored if stepped >> number & 1])
        self._broken = ""

    def checkpoint(
        self, groups: Groups, train_state: object, metrics: Metrics = None
    ) -> SealHandle:
        """Let all servers seal, with the metrics of rank 0."""
        self._settle()
        step, content = self._link.num_steps, list[Any]()
        is_again = self._sealed[:1] == [step]

        def prepare() -> list[Any]:
            """Check what is given here, and return the metrics, and a number."""
            self._require_usable(self._broken)
            self._require_agreed(groups)
            given = dict(metrics or {})
            content.extend([encode(train_state), encode_groups(groups), given])
            if is_again and ([step, *content] != self._sealed or self._link.is_edited):
                raise SealError(
                    f"step {step} is a checkpoint already, and several servers cannot replace it "
                    "together: call checkpoint() once after each step, or with the same content"
                )
            return [given, float(secrets.randbits(_BITS))]

        shared, number = self._everywhere("checkpoint()", prepare)[0]
        if is_again and self._agreed_seal is not None:
            return self._agreed_seal
        encoded, sent, _ = content
        agreement = self._ranks.agreement
        seal = agreement.begin_seal("")
        handle = self._agreed_seal = SealHandle(step)
        self._sealed = [step, *content]
        try:
            outcome = self._begin_seal(groups, encoded, {**shared, self._metric: number}).outcome
        except Exception as error:  # noqa: BLE001  (all ranks raise it in the same call: the next)
            outcome = _raising(error)

        def conclude() -> None:
            """Wait for this rank's server, report, and end the handle as all ranks decide."""
            report = Report(step=step, generation=0, hyper_digest=digest_of({"groups": sent}))
            found: list[Checkpoint] = []
            try:
                while not found:
                    try:
                        found.append(outcome(_POLL_S))
                    except TimeoutError:
                        self._ranks.progress()
                        time.sleep(_PAUSE_S)
            except Exception as error:  # noqa: BLE001  (all ranks raise it)
                report = Report(step=step, generation=0, error=reason_of(error))
            try:
                agreement.report(seal, report)
                if agreement.is_writer:
                    agreement.commit(seal, lambda _: None, lambda: None)
                else:
                    agreement.await_decision(seal)
                self._common.append([step, number])
                handle.succeed(found[0])
            except SealError as error:
                handle.fail(error)
            except Exception as error:  # noqa: BLE001  (who waits for the handle raises it)
                handle.fail(SealError(f"step {step}: {reason_of(error)}"))

        try:
            start(threading.Thread(target=conclude, name="offload-near-seal"))
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            conclude()
        return handle

    def fail_checkpoint(self, error: Exception) -> None:
        """Let all ranks raise an error of this one."""
        self._settle()
        self._everywhere("checkpoint()", _raising(error))

    def restore(self, groups: Groups, which: int | str | None, **how: Any) -> Checkpoint | None:  # noqa: D102
        self._settle(quietly=True)
        chosen = self._choose("restore()", which, f" (discard_newer={how['discard_newer']})")
        step = None if chosen is None else chosen[0]
        how["discard_newer"] |= [chosen] == self._common[-1:]  # then newer ones are on some servers
        restore, found = super().restore, list[Checkpoint | None]()

        def take() -> None:
            """Restore on this rank's server."""
            if step is None and self._link.num_steps:
                raise BrokenOptimizerError(
                    "steps were taken, and nothing is sealed on all servers: make model and "
                    "optimizer again on every rank"
                )
            found.append(restore(groups, step, **how))

        self._broken = "restore() has failed"
        self._everywhere("restore()", take)
        if step is not None:
            self._ranks.bring(self._stored)
        self._broken, self._agreed_seal, self._sealed = "", None, [step]
        return found[0]

    def _choose(self, call: str, which: int | str | None, how: str) -> Mark | None:
        """Return the checkpoint of all servers that all ranks ask for; None if there is none.

        Raises:
            CheckpointNotFoundError: Not all servers have it, or they have none in common.
        """
        step = step_of(which.rpartition("/")[2]) if isinstance(which, str) else which
        self._ranks.require_same(call, f"{'the newest' if which is None else step}{how}")

        def look() -> list[Mark]:
            """Return the checkpoints of this rank's server."""
            self._link.connect_again()
            return self._listed()

        listed = self._everywhere(call, look)
        self._common = _in_all(listed)
        found = [mark for mark in self._common if which is None or mark[0] == step]
        if found or not (any(listed) or which is not None):
            return found[-1] if found else None
        have = "; ".join(
            f"rank {n} has {[mark[0] for mark in own]}" for n, own in enumerate(listed)
        )
        raise CheckpointNotFoundError(
            ENOENT,
            f"this checkpoint, or any, is not on the servers of all ranks ({have}). Give each rank "
            "the server that it had, or start over with fresh=True",
            self._place.url if which is None else str(which),
        )

    def pin(self, name: str, which: int | str | None, *, require: Callable[[], None]) -> None:  # noqa: D102
        self._settle()
        chosen, pin = self._choose("pin()", which, f" as {name!r}"), super().pin
        step = None if chosen is None else chosen[0]
        self._everywhere("pin()", lambda: pin(name, step, require=require))

    def unpin(self, name: str) -> None:  # noqa: D102
        self._settle()
        unpin = super().unpin
        self._everywhere("unpin()", lambda: unpin(name))

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints of this rank's server that all servers have."""
        found = super().checkpoints()
        return [one for one in found if [one.step, one.metrics[self._metric]] in self._common]

    def _listed(self) -> list[Mark]:
        """Return all checkpoints of this rank's server, oldest first."""
        found = super().checkpoints()
        for one in found:
            if self._metric not in one.metrics:
                made_by = next((m for m in one.metrics if m.startswith("rank_")), "one process")
                raise MismatchError(
                    f"{one.path} was made by {made_by}, and this is {self._metric}: give each "
                    "rank the server that it had, with as many ranks, or name another run"
                )
        return [[one.step, one.metrics[self._metric]] for one in found]

    def synchronize(self) -> None:  # noqa: D102
        self._settle()
        super().synchronize()

    def load_reference(self, groups: Groups, reference: Mapping[str, Any]) -> NoReturn:  # noqa: ARG002
        """Refuse: a reference names the store of one rank."""
        raise NearError("load_state_dict() needs one store for all ranks: call restore()")

    def close(self) -> None:
        """Leave server and ranks. Idempotent.

        Raises:
            SealError: The last checkpoint could not be sealed on all servers.
        """
        try:
            self._settle()
        finally:
            try:
                super().close()
            finally:
                self._ranks.close()

    def _settle(self, *, quietly: bool = False) -> None:
        """Wait until this rank knows what became of the last seal, and raise its error once."""
        if (handle := self._agreed_seal) is None:
            return
        try:
            handle.outcome()
        except SealError as error:
            self._agreed_seal = None
            self._broken = "not all servers have sealed the last checkpoint"
            if not (handle.was_raised or quietly):
                raise
            if not handle.was_raised:
                warnings.warn(f"given up by restore(): {error}", RuntimeWarning, stacklevel=4)

    def _require_usable(self, broken: str) -> None:
        if broken:
            raise BrokenOptimizerError(f"{broken}: call restore() on every rank")

    def _everywhere(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; see `Ranks.everywhere`.

        The action waits for this rank's server, for which it has its own limit. Meanwhile the
        other ranks are told that this one is at work.
        """
        ended = threading.Event()

        def tell() -> None:
            """Give signs of progress."""
            while not ended.wait(self._pause_s):
                self._ranks.progress()

        thread = threading.Thread(target=tell, name="offload-near-alive", daemon=True)
        start(thread)
        try:
            return self._ranks.everywhere(what, action)
        finally:
            ended.set()
            thread.join()


def _in_all(listed: list[list[Mark]]) -> list[Mark]:
    """Return the checkpoints that are in all lists, in the order of the first one."""
    return [mark for mark in listed[0] if all(mark in own for own in listed)]


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        """Raise the error."""
        raise error

    return fail
