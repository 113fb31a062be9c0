"""Anything may happen in any order: Hypothesis looks for an order that breaks a promise.

Rules are what a user and the world do to a store: steps, checkpoints, restores, edits, faults,
kills and losses of power. After each of them the power is lost in thought, and what is left must be
a checkpoint that was promised, to the bit. `tests/crash/state_model.py` says what that is.

    STATE_MACHINE_SEED=7 pytest tests/crash/test_state_machine.py          # other examples
    STATE_MACHINE_MINUTES=30 pytest -s tests/crash/test_state_machine.py   # seed after seed
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from gds import Backend, StorageError
from offload import AdamW, OffloadError, SealHandle, list_checkpoints, open_checkpoint
from offload.errors import (
    BrokenOptimizerError,
    CheckpointError,
    CheckpointNotFoundError,
    MismatchError,
    SealError,
)
from offload.seal import SEAL_THREAD
from offload.state_pass import STEP_THREAD
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import KINDS, FaultBackend, Kind, When
from tests.crash.state_model import (
    AddHead,
    Edit,
    Event,
    Expectation,
    Forward,
    Run,
    SetRate,
    Step,
    Variant,
    differences,
    edit,
    forward,
    new_run,
    set_gradients,
)
from tests.crash.training import Model, add_head, optimizer_for, options, same_bits

SEED = int(os.environ.get("STATE_MACHINE_SEED", "20261121"))
MINUTES = float(os.environ.get("STATE_MACHINE_MINUTES", "0"))
EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "16"))
STEPS = int(os.environ.get("STATE_MACHINE_STEPS", "30"))
SHRINK = bool(os.environ.get("STATE_MACHINE_SHRINK"))
"""Look for the shortest example that fails, which takes minutes."""

DIRECTORIES = ("/data/run", "/fast/run")
STORE = DIRECTORIES[0]
SHARES = (2, 1)
RESIDENT = (0, 40_000, "1GiB")
TIMEOUT_S = 60.0
"""Of each wait: what takes so long hangs."""

_T = TypeVar("_T")
Uid = int
Allowed = frozenset[Uid | None]
"""What a process may find, as the numbers of checkpoints; None stands for an empty store."""

num_done = {"rules": 0, "crashes": 0, "faults": 0, "power cuts": 0, "checkpoints": 0}
"""Of this process, for the summary."""


@dataclass(frozen=True)
class Sealed:
    """A checkpoint that was asked for, and what it must hold."""

    expectation: Expectation
    events: tuple[Event, ...]
    with_head: bool
    train_state: dict[str, Any]


class StoreMachine(RuleBasedStateMachine):
    """A user and the world; see the module.

    What may be found is kept in three places: `promised` are checkpoints one of which must be
    there (one, but while newer ones are being withdrawn); `pending` are being sealed; `doubtful`
    are those whose seal failed, which a later process may find all the same.

    What is drawn must not depend on how far a thread has come, so no rule has a precondition: one
    that makes no sense at the moment does nothing.
    """

    @initialize(
        variant=st.builds(
            Variant,
            master=st.sampled_from(["float32", "float32", "split"]),
            state_dtype=st.sampled_from(["float32", "float32", "bfloat16", "int8"]),
            chunk_bytes=st.sampled_from([4096, 8192, 1 << 20]),
            drives=st.sampled_from([1, 1, 2]),
        ),
        keep=st.integers(1, 3),
        when=st.sampled_from(["in time", "at once", "later"]),
        resident=st.sampled_from(RESIDENT),
        overlap=st.sampled_from([None, None, "forward"]),
    )
    def begin(
        self,
        variant: Variant,
        keep: int,
        when: When,
        resident: int | str,
        overlap: str | None,
    ) -> None:
        self.variant = variant
        self.when = when
        self.keep, self.resident, self.overlap = keep, resident, overlap
        self.sealed: dict[Uid, Sealed] = {}
        self.promised: Allowed = frozenset({None})
        self.pending: list[tuple[SealHandle, Uid]] = []
        self.doubtful: set[Uid] = set()
        self.listed: list[Uid] = []
        """The checkpoints of the store, oldest first, as far as they are known."""
        self.log = CrashBackend()
        self.open()

    # What users do.

    @rule(
        seed=st.integers(0, 10_000),
        without=st.one_of(
            st.just(frozenset()), st.frozensets(st.integers(0, 7), max_size=4), st.just(range(8))
        ),
        through=st.booleans(),
    )
    def step(self, seed: int, without: Sequence[int], through: bool) -> None:
        """Take a step; `through` says whether a forward comes before it."""
        if self.broken:
            return
        if through:
            self.forward(seed)
            if self.broken:
                return
        event = Step(seed, frozenset(without))
        set_gradients(self.model, event, with_head=self.run.with_head)
        _, ok = self.persist(self.optimizer.step)
        if ok:
            self.run.apply(event)
            self.compare()

    @rule(wait=st.booleans(), extra=st.one_of(st.none(), st.text(max_size=5), st.tuples()))
    def checkpoint(self, wait: bool, extra: object) -> None:
        if self.broken:
            return
        uid = len(self.sealed)
        train_state = {"uid": uid, "extra": extra}
        run = self.run
        self.sealed[uid] = Sealed(run.expectation(), run.events, run.with_head, train_state)
        self.doubtful.add(uid)
        self.note()
        handle, ok = self.persist(lambda: self.optimizer.checkpoint(train_state))
        num_done["checkpoints"] += 1
        if ok:
            self.pending.append((handle, uid))
            self.doubtful.discard(uid)
        if wait:
            self.settle()

    @rule(seed=st.integers(0, 10_000), wait=st.booleans(), on=st.integers(0, 2))
    def train(self, seed: int, wait: bool, on: int) -> None:
        """What training mostly is: steps, a checkpoint, and steps while it is being sealed."""
        self.step(seed, (), True)
        self.step(seed + 1, (), True)
        self.checkpoint(wait, None)
        for number in range(on):
            self.step(seed + 2 + number, (), True)

    @rule()
    def wait(self) -> None:
        self.settle()

    @rule()
    def synchronize(self) -> None:
        if self.broken:
            return
        self.persist(self.optimizer.synchronize)
        self.settle()
        self.compare(waited=True)

    @rule()
    def restore(self) -> None:
        """Restore the newest, in the same process."""
        self.settle()
        refusal = any(uid is not None and self.other_groups(uid) for uid in self.allowed())
        checkpoint, error = self.attempt(lambda: self.optimizer.restore(), refusal=refusal)
        if error is not None and not isinstance(error, MismatchError):
            # A fault happens once: what fails for another reason fails again.
            checkpoint, error = self.attempt(lambda: self.optimizer.restore(), refusal=refusal)
        if isinstance(error, MismatchError):
            assert refusal  # and nothing has changed
        elif error is not None:
            self.not_restored(error)
        elif checkpoint is None:
            assert None in self.promised
        else:
            self.restored(checkpoint.train_state)

    @rule(which=st.integers(0, 5), discard=st.sampled_from([True, True, False]))
    def go_back(self, which: int, discard: bool) -> None:
        """Restore one that is not the newest."""
        self.settle()
        older = self.listed[:-1]
        if not older:
            return
        uid = older[which % len(older)]
        step = self.sealed[uid].expectation.step
        if discard:
            self.promised = frozenset(self.listed[self.listed.index(uid) :])
            self.note()
        call = lambda: self.optimizer.restore(step, discard_newer=discard)  # noqa: E731
        checkpoint, error = self.attempt(call, refusal=not discard or self.other_groups(uid))
        if error is not None and not isinstance(error, MismatchError):
            checkpoint, error = self.attempt(call, refusal=self.other_groups(uid))
        if isinstance(error, MismatchError):
            assert not discard or self.other_groups(uid)
            self.promised = frozenset({self.listed[-1]})
            self.note()
        elif error is not None:
            self.not_restored(error)
            self.listed = []  # some of them may have been withdrawn
        else:
            assert discard
            assert checkpoint.train_state == self.sealed[uid].train_state
            self.listed = self.listed[: self.listed.index(uid) + 1]
            self.promised = frozenset({uid})
            self.note()
            self.restored(checkpoint.train_state)

    @rule()
    def add_group(self) -> None:
        if self.broken or self.run.with_head:
            return
        _, ok = self.persist(lambda: add_head(self.model, self.optimizer))
        if ok:
            self.run.apply(AddHead())

    @rule(
        parameter=st.integers(0, 7),
        element=st.integers(0, 2000),
        value=st.sampled_from([0.5, -1.25, 3.0, -0.0078125]),
    )
    def edit(self, parameter: int, element: int, value: float) -> None:
        """Set an element by hand, when nothing reads it."""
        if self.broken:
            return
        _, ok = self.persist(self.optimizer.synchronize)
        self.settle()
        if ok:
            event = Edit(parameter, element, value)
            edit(self.model, event, with_head=self.run.with_head)
            self.run.apply(event)

    @rule(lr=st.sampled_from([1e-2, 3e-3, 0.0]))
    def set_rate(self, lr: float) -> None:
        if self.broken:
            return
        self.optimizer.param_groups[0]["lr"] = lr
        self.run.apply(SetRate(lr))

    @rule(
        keep=st.integers(1, 3),
        resident=st.sampled_from(RESIDENT),
        overlap=st.sampled_from([None, "forward"]),
    )
    def reopen(self, keep: int, resident: int | str, overlap: str | None) -> None:
        """Close, and go on in a new process, with other settings."""
        self.attempt(self.optimizer.close)
        self.settle()
        self.end()
        self.keep, self.resident, self.overlap = keep, resident, overlap
        self.open()

    # Here is the place for `pin`, `unpin` and `policy`: call the optimizer through `persist`, note
    # in `listed` what may then be withdrawn, and follow in `acknowledged`, which says what stays.

    # What the world does.

    @rule(kind=st.sampled_from(KINDS), nth=st.integers(1, 10), then=st.integers(0, 10_000))
    def fault(self, kind: Kind, nth: int, then: int) -> None:
        """Let an operation that is still to come fail, once, and train."""
        self.faults.fail(kind, nth, forever=False)
        self.train(then, False, 1)

    @rule(power=st.booleans(), back=st.integers(0, 40), seed=st.integers(0, 1 << 20))
    def crash(self, power: bool, back: int, seed: int) -> None:
        """The process is gone, as of some operations ago; the power too, or the cache stays."""
        log, allowed = self.moment(back)
        with contextlib.suppress(OffloadError, OSError), _ignored():
            self.optimizer.close()  # of no effect on what was copied; ends its threads
        self.end()
        num_done["crashes"] += 1
        if power:
            image = Disk(log).power_cut(random.Random(seed))
            self.log = CrashBackend.after(image)
        else:
            self.log = CrashBackend.resumed(log)
        self.pending, self.doubtful, self.promised = [], set(), allowed
        self.open()

    # Here is the place for `damage`: change bytes of a checkpoint of `listed` in `self.log`, take
    # it out of `promised` if it was there, and let `opened` expect that it is refused.

    # What must hold.

    @invariant()
    def a_promised_checkpoint_survives(self) -> None:
        """Lose the power in thought: what is left is usable, and is what it was."""
        num_done["rules"] += 1
        log, allowed = self.moment(0)
        self._disk_after(log)
        seed = len(log)
        backend = self._disk.power_cut(random.Random(seed)).backend()
        num_done["power cuts"] += 1
        self.check_newest(backend, allowed)
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
            with open_checkpoint(STORE, backend=backend) as found:
                uid = found.train_state["uid"]
                self.check(found, backend)
        except (CheckpointNotFoundError, CheckpointError) as error:
            uid, reason = None, str(error)
        assert uid in allowed, f"found {uid}, allowed {set(allowed)} {reason}"
        return uid

    def check(self, found: Any, backend: Backend) -> None:
        expected = self.sealed[found.train_state["uid"]]
        assert found.train_state == expected.train_state
        assert differences(found, backend, self.variant, expected.expectation) == []

    def teardown(self) -> None:
        if not hasattr(self, "optimizer"):
            return
        self.attempt(self.optimizer.close)
        self.settle()
        self.end()
        left = {thread.name for thread in threading.enumerate()} & {SEAL_THREAD, STEP_THREAD}
        assert not left, "threads are left"

    # How it is done.

    def open(self) -> None:
        """Begin a process and restore; what is found must be allowed, and is promised from now."""
        self.faults = FaultBackend(self.log, self.when)
        before = self.log.log[:]
        allowed = self.allowed()
        self.log.note(allowed)
        with_head = self.num_groups() == 2
        self.model, self.run, self.broken = Model(), new_run(self.variant), False
        resident, overlap = self.resident, self.overlap
        self.optimizer: AdamW = optimizer_for(
            self.model,
            list(DIRECTORIES[: self.variant.drives]),
            options(
                self.faults,
                **self.variant.options,
                shares=SHARES[: self.variant.drives],
                host_memory=resident,
                overlap=overlap,
            ),
            keep=self.keep,
            with_head=with_head,
        )
        checkpoint, error = self.attempt(lambda: self.optimizer.restore())
        assert error is None, f"{error} after {before[-3:]}"
        uid = None if checkpoint is None else checkpoint.train_state["uid"]
        assert uid in allowed, f"found {uid}, allowed {set(allowed)}"
        self.promised, self.doubtful, self.pending = frozenset({uid}), set(), []
        self.note()
        self.opened_at = len(self.log.log)
        assert self.check_newest(self.log.inner, self.promised) == uid
        self.listed = self.present()
        assert (self.listed[-1:] or [None]) == [uid]
        if checkpoint is not None:
            self.restored(checkpoint.train_state)

    def end(self) -> None:
        """Take note of the end of a process."""
        num_done["faults"] += self.faults.num_failed
        self.faults.close()

    def num_groups(self) -> int:
        try:
            with open_checkpoint(STORE, backend=self.log.inner) as newest:
                return len(newest.hyperparameters)
        except (CheckpointNotFoundError, CheckpointError):
            return 0

    def present(self) -> list[Uid]:
        """Return the checkpoints of the store, oldest first; all must be what they were."""
        backend = self.log.inner
        found = list_checkpoints(STORE, backend=backend) if backend.stat(STORE) else []
        uids = []
        for info in sorted(found, key=lambda info: info.generation):
            assert info.valid, info.reason
            with open_checkpoint(info.path, backend=backend) as checkpoint:
                self.check(checkpoint, backend)
                uids.append(checkpoint.train_state["uid"])
        return uids

    def allowed(self) -> Allowed:
        return self.promised | self.doubtful | {uid for _, uid in self.pending}

    def note(self) -> None:
        self.log.note(self.allowed())

    def moment(self, back: int) -> tuple[list[Any], Allowed]:
        """Return the log up to some operations ago, in this process, and what was allowed then."""
        with self.log.order:
            log = list(self.log.log)
        log = log[: max(len(log) - back, self.opened_at)]
        return log, next(op.label for op in reversed(log) if op.kind == "note")

    def attempt(
        self, call: Callable[[], _T], *, refusal: bool = False
    ) -> tuple[Any, Exception | None]:
        """Call; an error must be a named one, and there must be a reason for it."""
        try:
            with _ignored():
                return call(), None
        except (OffloadError, StorageError) as error:
            refused = refusal and isinstance(error, MismatchError)
            if len(str(error)) < 20 or not (refused or self.faults.num_failed):
                raise
            return None, error

    def persist(self, call: Callable[[], _T]) -> tuple[Any, bool]:
        """Call until it works, or until the optimizer asks for `restore`."""
        for _ in range(4):
            value, error = self.attempt(call)
            if error is None:
                return value, True
            if isinstance(error, BrokenOptimizerError):
                self.broken = True
                return None, False
        raise AssertionError(f"it does not get on: {error!r}")

    def forward(self, seed: int) -> None:
        event = Forward(seed)
        _, error = self.attempt(lambda: forward(self.model, event))
        if error is None:
            self.run.apply(event)
        else:
            self.broken = True  # the step beside it has failed: raised here, once

    def settle(self) -> None:
        """Take note of what has become of seals."""
        while self.pending:
            handle, uid = self.pending[0]
            self.pending.pop(0)
            try:
                with _ignored():
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
        untrimmed = [*others, uid]
        replaced = len(untrimmed) == len(self.listed)
        self.listed = untrimmed[-self.keep :]
        if self.pending:
            return  # the next seal may have begun to make room
        present = self.present()
        assert present[-1] == uid
        if self.faults.num_failed:  # one may have been withdrawn for a seal that then failed
            known = {*self.sealed}
            assert known.issuperset(present)
            self.listed = present
        elif replaced and present == untrimmed:
            self.listed = present  # only the train state was replaced: that is no seal
        assert present == self.listed

    def restored(self, train_state: dict[str, Any]) -> None:
        """The live model is what the checkpoint says."""
        uid = train_state["uid"]
        assert uid in self.allowed()
        sealed = self.sealed[uid]
        assert train_state == sealed.train_state
        self.run: Run = new_run(self.variant, sealed.events)
        self.broken = False
        assert self.optimizer.state_dict()["step"] == sealed.expectation.step
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


@contextlib.contextmanager
def _ignored() -> Any:
    """Let the store warn of failed syncs, and `restore` of seals that failed before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def test_nothing_that_was_promised_is_ever_lost(
    record_property: Callable[[str, object], None],
) -> None:
    until = time.monotonic() + 60 * MINUTES
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    seed = SEED
    while True:
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(StoreMachine), settings=chosen)
        except BaseException as error:
            error.add_note(
                f"STATE_MACHINE_SEED={seed} STATE_MACHINE_EXAMPLES={EXAMPLES} "
                f"STATE_MACHINE_STEPS={STEPS}"
            )
            raise
        if time.monotonic() >= until:
            break
        seed += 1
        print(f"up to seed {seed}: {num_done}", flush=True)
    print(f"state machine, seeds {SEED} to {seed}: {num_done}")
    record_property("state_machine", num_done)
    assert num_done["crashes"] > EXAMPLES // 4
    assert num_done["faults"] > EXAMPLES // 4
    assert num_done["checkpoints"] > EXAMPLES
