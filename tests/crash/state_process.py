"""A process that uses a store, and what may be found of it: the state machine without its rules."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gds import Backend, StorageError
from offload import (
    AdamW,
    BrokenOptimizerError,
    CheckpointError,
    CheckpointNotFoundError,
    DriveTuning,
    MismatchError,
    OffloadError,
    SealError,
    SealHandle,
    list_checkpoints,
    open_checkpoint,
)
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend, When
from tests.crash.state_model import (
    Event,
    Expectation,
    Forward,
    Run,
    Variant,
    differences,
    forward,
)
from tests.crash.state_policy import METRIC, Kept, Policy
from tests.stores.training import Model, optimizer_for, options, same_bits

DIRECTORIES = ("/data/run", "/fast/run")
STORE = DIRECTORIES[0]
SHARES = (2, 1)
TIMEOUT_S = 60.0
"""Of each wait: what takes so long hangs."""

Refusal = tuple[type[Exception], ...]
Uid = int
Allowed = frozenset[Uid | None]
"""What a process may find, as the numbers of checkpoints; None stands for an empty store."""

num_done: Counter[str] = Counter()
"""Of this process, for the summary."""


@dataclass(frozen=True)
class Sealed:
    """A checkpoint that was asked for, and what it must hold."""

    expectation: Expectation
    events: tuple[Event, ...]
    with_head: bool
    train_state: dict[str, Any]
    losses: frozenset[float | None]
    """Its metric; or that of what it replaced, which is replaced after the train state."""


@dataclass(frozen=True)
class Promise:
    """What a process may find."""

    newest: Allowed
    pins: Mapping[str, Allowed]
    """By name, what it may be on."""


class StoreProcess:
    """A process, and what it has promised.

    What may be found is kept in three places: `promised` are checkpoints one of which must be
    there (one, but while newer ones are being withdrawn); `pending` are being sealed; `doubtful`
    are those whose seal failed, which a later process may find all the same. `pins` says what each
    name may be on.
    """

    def begin_store(
        self,
        variant: Variant,
        keep: Policy,
        when: When,
        resident: int | str,
        overlap: str | None,
    ) -> None:
        """Begin with an empty store."""
        self.variant, self.when = variant, when
        self.keep, self.resident, self.overlap = keep, resident, overlap
        self.sealed: dict[Uid, Sealed] = {}
        self.promised: Allowed = frozenset({None})
        self.pending: list[tuple[SealHandle, Uid]] = []
        self.doubtful: set[Uid] = set()
        self.listed: list[Uid] = []
        """The checkpoints of the store, oldest first, as far as they are known."""
        self.losses: dict[Uid, float | None] = {}
        self.pins: dict[str, Allowed] = {}
        self.damaged: dict[str, Uid] = {}
        """Checkpoints that are not usable any more, by path."""
        self.log = CrashBackend()
        self.open()

    def open(self) -> None:
        """Begin a process and restore; what is found must be allowed, and is promised from now."""
        before = self.log.log[:]
        allowed = self.allowed()
        self.note()
        self.begin_process()
        checkpoint, error = self.attempt(lambda: self.optimizer.restore())
        assert error is None, f"{error} after {before[-3:]}"
        uid = None if checkpoint is None else checkpoint.train_state["uid"]
        assert uid in allowed, f"found {uid}, allowed {set(allowed)}"
        self.promised, self.doubtful, self.pending = frozenset({uid}), set(), []
        self.note()
        self.opened_at = len(self.log.log)
        assert self.check_newest(self.log.inner, self.promised) == uid
        self.check_pins(self.log.inner, self.pins)
        self.listed = self.present()
        assert (self.listed[-1:] or [None]) == [uid]
        if checkpoint is not None:
            self.restored(checkpoint.train_state)

    def begin_process(self) -> bool:
        """Construct model and optimizer; returns whether it is told of the head."""
        self.faults = FaultBackend(self.log, self.when)
        with_head = self.num_groups() == 2
        self.model, self.run, self.broken = Model(), Run(self.variant), False
        self.optimizer: AdamW = optimizer_for(
            self.model,
            list(DIRECTORIES[: self.variant.drives]),
            options(
                self.faults,
                **self.variant.options,
                drives=DriveTuning(shares=SHARES[: self.variant.drives]),
                host_memory=self.resident,
                overlap=self.overlap,
            ),
            keep=self.keep.retention(),
            with_head=with_head,
        )
        return with_head

    def close(self) -> None:
        """End the process in good order."""
        self.attempt(self.optimizer.close)
        self.settle()
        self.end()

    def end(self) -> None:
        """Take note of the end of a process."""
        num_done["faults"] += self.faults.num_failed
        self.faults.close()

    def num_groups(self) -> int:
        try:
            with ignored(), open_checkpoint(STORE, backend=self.log.inner) as newest:
                return len(newest.hyperparameters)
        except (CheckpointNotFoundError, CheckpointError):
            return 0

    def present(self) -> list[Uid]:
        """Return the checkpoints of the store, oldest first; all must be what they were."""
        backend = self.log.inner
        found = list_checkpoints(STORE, backend=backend) if backend.stat(STORE) else []
        uids = []
        for info in sorted(found, key=lambda info: info.generation):
            if not info.valid:
                assert info.path in self.damaged, info.reason
                continue
            with open_checkpoint(info.path, backend=backend) as checkpoint:
                self.check(checkpoint)
                uid = checkpoint.train_state["uid"]
            self.losses[uid] = info.metrics.get(METRIC)
            assert self.losses[uid] in self.sealed[uid].losses
            uids.append(uid)
        return uids

    def refresh(self) -> None:
        """Take note of what a step has taken since retention changed, or a name was taken away."""
        if not self.listed or self.pending:
            return
        kept, present = self.kept(self.listed), self.present()
        if not self.faults.num_failed:
            assert set(kept) <= set(present) <= set(self.listed)
        self.listed = present

    def kept(self, uids: Sequence[Uid]) -> list[Uid]:
        """Return what retention must keep of some checkpoints, oldest first."""
        pinned = set(self.pinned(self.log.inner).values())
        steps = {uid: self.sealed[uid].expectation.step for uid in uids}
        return self.keep.kept([Kept(u, steps[u], self.losses[u], u in pinned) for u in uids])

    def path_of(self, uid: Uid) -> str:
        return f"{STORE}/step-{self.sealed[uid].expectation.step:08d}"

    def allowed(self) -> Allowed:
        return self.promised | self.doubtful | {uid for _, uid in self.pending}

    def note(self) -> None:
        self.log.note(Promise(self.allowed(), dict(self.pins)))

    def moment(self, back: int) -> tuple[list[Any], Promise]:
        """Return the log up to some operations ago, in this process, and what was allowed then."""
        with self.log.order:
            log = list(self.log.log)
        log = log[: max(len(log) - back, self.opened_at)]
        return log, next(op.label for op in reversed(log) if op.kind == "note")

    def attempt(
        self, call: Callable[[], Any], *, refusal: Refusal = ()
    ) -> tuple[Any, Exception | None]:
        """Call; an error must be a named one, and there must be a reason for it."""
        try:
            with ignored():
                return call(), None
        except (OffloadError, StorageError) as error:
            refused = isinstance(error, refusal)
            if len(str(error)) < 20 or not (refused or self.faults.num_failed):
                raise
            return None, error

    def attempt_twice(
        self, call: Callable[[], Any], *, refusal: Refusal = ()
    ) -> tuple[Any, Exception | None]:
        """Call again if it fails: a fault happens once. What fails for a reason fails again."""
        value, error = self.attempt(call, refusal=refusal)
        if error is None or isinstance(error, refusal):
            return value, error
        return self.attempt(call, refusal=refusal)

    def persist(self, call: Callable[[], Any], *, refusal: Refusal = ()) -> tuple[Any, bool]:
        """Call until it works, or is refused, or until the optimizer asks for `restore`."""
        for _ in range(4):
            value, error = self.attempt(call, refusal=refusal)
            if error is None:
                return value, True
            if isinstance(error, refusal):
                return error, False
            if isinstance(error, BrokenOptimizerError):
                self.broken = True
                return error, False
        raise AssertionError(f"it does not get on: {error!r}")

    def forward(self, seed: int) -> None:
        event = Forward(seed)
        _, error = self.attempt(lambda: forward(self.model, event))
        if error is None:
            self.run.apply(event)
        else:
            self.broken = True  # the step beside it has failed: raised here, once

    def wait_for_everything(self) -> None:
        """Let nothing run beside what comes next, and learn what there is."""
        if not self.broken:
            self.persist(self.optimizer.synchronize)
        self.settle()
        self.refresh()

    def settle(self) -> None:
        """Take note of what has become of seals."""
        while self.pending:
            handle, uid = self.pending.pop(0)
            try:
                with ignored():
                    handle.result(TIMEOUT_S)
            except SealError:
                if not self.faults.num_failed:
                    raise
                self.doubtful.add(uid)
            else:
                self.acknowledged(uid)

    def acknowledged(self, uid: Uid) -> None:
        """A checkpoint is durable: retention says which others stay."""
        self.promised = frozenset({uid})
        self.doubtful = {doubtful for doubtful in self.doubtful if doubtful > uid}
        self.note()
        step = self.sealed[uid].expectation.step
        others = [u for u in self.listed if self.sealed[u].expectation.step != step]
        replaced = len(others) < len(self.listed)
        self.listed = [*others, uid]
        if self.pending:
            return  # the next seal may have begun to make room
        untrimmed, present = self.listed, self.present()
        assert present[-1] == uid
        kept = self.kept(untrimmed)
        if self.faults.num_failed:  # one may have been withdrawn for a seal that then failed
            assert {*self.sealed} >= {*present}
        elif replaced:  # if only the train state was, that is no seal; if all was, best may differ
            assert {uid, *kept[-self.keep.last :]} <= set(present) <= set(untrimmed)
        else:
            assert present == kept
        self.listed = present

    def restored(self, train_state: dict[str, Any]) -> None:
        """The live model is what the checkpoint says."""
        uid = train_state["uid"]
        assert uid in self.allowed()
        sealed = self.sealed[uid]
        assert train_state == sealed.train_state
        self.run: Run = Run(self.variant, sealed.events)
        self.broken = False
        assert self.optimizer.num_steps == sealed.expectation.step
        assert same_bits(dict(self.model.state_dict()), sealed.expectation.model)
        self.compare(waited=True)

    def not_restored(self, error: Exception) -> None:
        """There must be a reason; whatever it is, a new process can go on."""
        reasons = (StorageError, BrokenOptimizerError, OSError, CheckpointError, MismatchError)
        assert isinstance(error, reasons), repr(error)
        self.broken = True

    def other_groups(self, uid: Uid) -> bool:
        return self.sealed[uid].with_head != self.run.with_head

    def compare(self, *, waited: bool = False) -> None:
        """Compare the live parameters, unless a step may be running beside."""
        if self.broken or (self.overlap is not None and not waited):
            return
        assert same_bits(dict(self.model.state_dict()), dict(self.run.model.state_dict()))

    # What must hold.

    def check_a_power_cut(self) -> None:
        """Lose the power in thought: what is left is usable, and is what it was."""
        log, promise = self.moment(0)
        self._disk_after(log)
        seed = len(log)
        backend = self._disk.power_cut(random.Random(seed)).backend()
        num_done["power cuts"] += 1
        self.check_newest(backend, promise.newest)
        self.check_pins(backend, promise.pins)
        assert self.faults.violations == []

    def _disk_after(self, log: Sequence[object]) -> None:
        if self._disk_of is not self.log:
            self._disk_of, self._disk, self._num_applied = self.log, Disk(), 0
        for operation in log[self._num_applied :]:
            self._disk.apply(operation)
        self._num_applied = len(log)

    _disk_of: CrashBackend | None = None

    def check_newest(self, backend: Backend, allowed: Allowed) -> Uid | None:
        """Compare the newest checkpoint with what it must be; returns which it is."""
        uid: Uid | None = None
        reason = ""
        try:
            with ignored(), open_checkpoint(STORE, backend=backend) as found:
                uid = found.train_state["uid"]
                self.check(found)
        except (CheckpointNotFoundError, CheckpointError) as error:
            uid, reason = None, str(error)
        assert uid in allowed, f"found {uid}, allowed {set(allowed)} {reason}"
        return uid

    def check_pins(self, backend: Backend, pins: Mapping[str, Allowed]) -> None:
        """Every name is on what it was given to, which is still there."""
        if pins:
            found = self.pinned(backend)
            for name, allowed in pins.items():
                assert found.get(name) in allowed, f"{name!r} on {found.get(name)}, not {allowed}"

    def pinned(self, backend: Backend) -> dict[str, Uid]:
        """Return what each name is on; that must be what it was, or known to be damaged."""
        found: dict[str, Uid] = {}
        if backend.stat(f"{STORE}/pins") is None:
            return found
        for info in list_checkpoints(STORE, backend=backend):
            if info.pins and info.valid:
                with open_checkpoint(info.path, backend=backend) as checkpoint:
                    self.check(checkpoint)
                    found |= dict.fromkeys(info.pins, checkpoint.train_state["uid"])
            elif info.pins:
                assert info.path in self.damaged, info.reason
                found |= dict.fromkeys(info.pins, self.damaged[info.path])
        return found

    def check(self, found: Any) -> None:
        expected = self.sealed[found.train_state["uid"]]
        assert found.train_state == expected.train_state
        assert differences(found, expected.expectation) == []


@contextlib.contextmanager
def ignored() -> Any:
    """Let the store warn of failed syncs, `restore` of failed seals, readers of damage."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
