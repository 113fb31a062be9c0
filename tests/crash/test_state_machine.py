"""Anything may happen in any order: Hypothesis looks for an order that breaks a promise.

Rules are what a user and the world do to a store: steps, checkpoints, pins, restores, edits, other
policies, faults, bits that flip, kills and losses of power. After each of them the power is lost in
thought, and what is left must be a checkpoint that was promised, to the bit, with the pins that
were. `tests/crash/state_model.py` and `state_policy.py` say what that is.

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
from collections.abc import Callable, Mapping, Sequence
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
from offload import (
    AdamW,
    DriveTuning,
    OffloadError,
    SealHandle,
    list_checkpoints,
    open_checkpoint,
    pin,
    unpin,
)
from offload.engine.chunk_pass import STEP_THREAD
from offload.engine.seal import SEAL_THREAD
from offload.errors import (
    BrokenOptimizerError,
    CheckpointError,
    CheckpointNotFoundError,
    DamagedError,
    MismatchError,
    PinError,
    SealError,
)
from offload.store.quarantine import remove_mark, verify_and_mark
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import KINDS, FaultBackend, Kind, When
from tests.crash.state_damage import Flip, is_state, problems
from tests.crash.state_model import (
    AddHead,
    Edit,
    Event,
    Expectation,
    Forward,
    LayOut,
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
from tests.crash.state_policy import METRIC, Kept, Policy
from tests.stores.training import Model, add_head, optimizer_for, options, same_bits
from tests.threads import since

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

_UNUSABLE = (CheckpointError, MismatchError)
"""What `restore` may say if a checkpoint is damaged: none is left, or it has other groups."""

_IN_A_ROW = "two in a row"
"""What is said of a damaged checkpoint behind one that has been given up: it is not marked."""

_T = TypeVar("_T")
Uid = int
Allowed = frozenset[Uid | None]
"""What a process may find, as the numbers of checkpoints; None stands for an empty store."""

POLICIES = st.builds(
    Policy,
    last=st.integers(1, 3),
    every=st.sampled_from([None, None, 2, 3]),
    best=st.sampled_from([None, None, 1, 2]),
)

num_done = {
    "rules": 0,
    "crashes": 0,
    "faults": 0,
    "power cuts": 0,
    "checkpoints": 0,
    "pins": 0,
    "flips": 0,
    "marks of a person": 0,
}
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


class StoreMachine(RuleBasedStateMachine):
    """A user and the world; see the module.

    What may be found is kept in three places: `promised` are checkpoints one of which must be
    there (one, but while newer ones are being withdrawn); `pending` are being sealed; `doubtful`
    are those whose seal failed, which a later process may find all the same. `pins` says what each
    name may be on.

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
        keep=POLICIES,
        when=st.sampled_from(["in time", "at once", "later"]),
        resident=st.sampled_from(RESIDENT),
        overlap=st.sampled_from([None, None, "forward"]),
    )
    def begin(
        self,
        variant: Variant,
        keep: Policy,
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
        self.losses: dict[Uid, float | None] = {}
        self.pins: dict[str, Allowed] = {}
        self.damaged: dict[str, Uid] = {}
        """Checkpoints that are not usable any more, by path."""
        self.log = CrashBackend()
        self.others = threading.enumerate()
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

    @rule(
        wait=st.booleans(),
        extra=st.one_of(st.none(), st.text(max_size=5), st.tuples()),
        loss=st.sampled_from([None, 0.25, 0.5, 0.75]),
    )
    def checkpoint(self, wait: bool, extra: object, loss: float | None) -> None:
        if self.broken:
            return
        uid = len(self.sealed)
        train_state = {"uid": uid, "extra": extra}
        metrics = {} if loss is None else {METRIC: loss}
        run = self.run
        if run.num_steps == 0:
            run.apply(LayOut())
        before = [u for u in self.sealed if self.sealed[u].expectation.step == run.num_steps]
        losses = frozenset([loss]).union(*(self.sealed[u].losses for u in before))
        self.sealed[uid] = Sealed(run.expectation(), run.events, run.with_head, train_state, losses)
        self.losses[uid] = loss
        self.doubtful.add(uid)
        pins = dict(self.pins)
        pinned = [name for name in pins if not pins[name].isdisjoint(before)]
        for name in pinned:  # if only the train state is replaced it is the same checkpoint
            self.pins[name] |= {uid}
        self.note()
        refusal = (PinError,) if pinned else ()
        handle, ok = self.persist(
            lambda: self.optimizer.checkpoint(train_state, metrics=metrics), refusal=refusal
        )
        num_done["checkpoints"] += 1
        if ok:
            self.pending.append((handle, uid))
            self.doubtful.discard(uid)
        elif isinstance(handle, PinError) and not self.faults.num_failed:
            self.doubtful.discard(uid)  # nothing has changed
            self.pins = pins
            self.note()
        if wait:
            self.settle()

    @rule(seed=st.integers(0, 10_000), wait=st.booleans(), on=st.integers(0, 2))
    def train(self, seed: int, wait: bool, on: int) -> None:
        """What training mostly is: steps, a checkpoint, and steps while it is being sealed.

        With every other seed a weight is edited just before the checkpoint, which has the edit in
        its FP32 state.
        """
        self.step(seed, (), True)
        self.step(seed + 1, (), True)
        if seed % 2:
            first_or_last = 4 * (seed % 4 // 2)
            self.edit_now(Edit(first_or_last, seed, 0.5))
        self.checkpoint(wait, None, (0.25, 0.5, 0.75)[seed % 3])
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
        other = any(uid is not None and self.other_groups(uid) for uid in self.allowed())
        refusal = (MismatchError,) if other else ()
        checkpoint, error = self.attempt_twice(lambda: self.optimizer.restore(), refusal=refusal)
        if isinstance(error, MismatchError):
            assert other  # and nothing has changed
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
        self.refresh()
        older = self.listed[:-1]
        if not older:
            return
        uid = older[which % len(older)]
        newer = self.listed[self.listed.index(uid) + 1 :]
        step = self.sealed[uid].expectation.step
        if discard:
            self.promised = frozenset([uid, *newer])
            self.note()
        pinned = not set(newer).isdisjoint(self.pinned(self.log.inner).values())
        refusal: tuple[type[Exception], ...] = (PinError,) if pinned else ()
        if not discard or self.other_groups(uid):
            refusal += (MismatchError,)
        call = lambda: self.optimizer.restore(step, discard_newer=discard)  # noqa: E731
        checkpoint, error = self.attempt_twice(call, refusal=refusal)
        if isinstance(error, MismatchError | PinError):
            assert isinstance(error, refusal)
            self.promised = frozenset({self.listed[-1]})
            self.note()
        elif error is not None:
            self.not_restored(error)
            self.listed = []  # some of them may have been withdrawn
        else:
            assert discard
            assert not pinned
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
        self.edit_now(Edit(parameter, element, value))

    def edit_now(self, event: Edit) -> None:
        if self.broken:
            return
        _, ok = self.persist(self.optimizer.synchronize)
        self.settle()
        if ok:
            edit(self.model, event, with_head=self.run.with_head)
            self.run.apply(event)

    @rule(lr=st.sampled_from([1e-2, 3e-3, 0.0]))
    def set_rate(self, lr: float) -> None:
        if self.broken:
            return
        self.optimizer.param_groups[0]["lr"] = lr
        self.run.apply(SetRate(lr))

    @rule(
        keep=POLICIES,
        resident=st.sampled_from(RESIDENT),
        overlap=st.sampled_from([None, "forward"]),
    )
    def reopen(self, keep: Policy, resident: int | str, overlap: str | None) -> None:
        """Close, and go on in a new process, with other settings."""
        self.close()
        self.keep, self.resident, self.overlap = keep, resident, overlap
        self.open()

    @rule(name=st.sampled_from("ab"), which=st.integers(0, 5), outside=st.booleans())
    def pin(self, name: str, which: int, outside: bool) -> None:
        """Give a checkpoint a name, or move the name to it; `outside` is another process."""
        self.wait_for_everything()
        if not self.listed:
            return
        uid = self.listed[which % len(self.listed)]
        path = self.path_of(uid)
        self.pins[name] = self.pins.get(name, frozenset({None})) | {uid}
        self.note()
        _, error = self.attempt_twice(
            (lambda: pin(path, name, backend=self.log))
            if outside
            else (lambda: self.optimizer.pin(name, path))
        )
        if error is None:
            num_done["pins"] += 1
            assert self.pinned(self.log.inner)[name] == uid
            self.pins[name] = frozenset({uid})
            self.note()

    @rule(name=st.sampled_from("ab"), outside=st.booleans())
    def unpin(self, name: str, outside: bool) -> None:
        """Take a name away."""
        self.wait_for_everything()
        if name not in self.pinned(self.log.inner):
            return
        self.pins[name] |= {None}
        self.note()
        _, error = self.attempt(
            (lambda: unpin(STORE, name, backend=self.log))
            if outside
            else (lambda: self.optimizer.unpin(name))
        )
        if error is None:
            assert name not in self.pinned(self.log.inner)
            self.pins[name] = frozenset({None})
            self.note()

    # What the world does.

    @rule(kind=st.sampled_from(KINDS), nth=st.integers(1, 10), then=st.integers(0, 10_000))
    def fault(self, kind: Kind, nth: int, then: int) -> None:
        """Let an operation that is still to come fail, once, and train."""
        self.faults.fail(kind, nth, forever=False)
        self.train(then, False, 1)

    @rule(power=st.booleans(), back=st.integers(0, 40), seed=st.integers(0, 1 << 20))
    def crash(self, power: bool, back: int, seed: int) -> None:
        """The process is gone, as of some operations ago; the power too, or the cache stays."""
        log, promise = self.moment(back)
        with contextlib.suppress(OffloadError, OSError), _ignored():
            self.optimizer.close()  # of no effect on what was copied; ends its threads
        self.end()
        num_done["crashes"] += 1
        if power:
            image = Disk(log).power_cut(random.Random(seed))
            self.log = CrashBackend.after(image)
        else:
            self.log = CrashBackend.resumed(log)
        self.pending, self.doubtful, self.promised = [], set(), promise.newest
        self.pins = dict(promise.pins)
        self.open()

    @rule(
        which=st.sampled_from([-1, -1, -1, -2]),
        flip=st.builds(
            Flip,
            file=st.integers(0, 20),
            place=st.floats(0, 1, exclude_max=True),
            bit=st.integers(0, 7),
        ),
        in_a_row=st.sampled_from([1, 1, 2]),
    )
    def damage(self, which: int, flip: Flip, in_a_row: int) -> None:
        """A bit of a checkpoint flips while nobody trains: the one before it is taken, or none."""
        self.close()
        self.refresh()
        for _ in range(in_a_row):
            if len(self.listed) >= -which:
                self.damage_one(which, flip)
        self.open()

    def damage_one(self, which: int, flip: Flip) -> None:
        uid, path = self.listed[which], self.path_of(self.listed[which])
        file = flip.path(self.log, path)
        flip.apply(self.log, file)
        found = problems(self.log.inner, path)
        if found:
            assert file in found
            num_done["flips"] += 1
        else:  # where no parameter has state yet nothing was written
            assert is_state(file), f"{file}: {flip} is not noticed"
            with open_checkpoint(path, backend=self.log.inner) as checkpoint:
                self.check(checkpoint, self.log.inner)
        if found and which == -1 and self.is_refused(uid, file):
            self.damaged[path] = uid
            del self.listed[-1]
            self.promised = frozenset({self.listed[-1]})
        else:  # of no consequence; or not the newest; or there is none left: it is repaired
            flip.apply(self.log, file)
            remove_mark(self.log, path)
            self.log.sync_dir(path)
            assert problems(self.log.inner, path) == ""

    def is_refused(self, uid: Uid, file: str) -> bool:
        """Let a process find out that the newest is damaged; returns whether there is another."""
        older = self.listed[-2:-1]
        with_head = self.begin_process()
        checkpoint, error = self.attempt(lambda: self.optimizer.restore(), refusal=_UNUSABLE)
        if checkpoint is not None and checkpoint.train_state["uid"] == uid:
            assert is_state(file), f"{file}: restored, though it is damaged"
            set_gradients(self.model, Step(0), with_head=with_head)
            _, error = self.attempt(self.step_and_wait, refusal=(DamagedError,))
            assert error is not None, f"{file}: trained on, though it is damaged"
            assert file in str(error)
            if _IN_A_ROW not in str(error):
                checkpoint, error = self.attempt(
                    lambda: self.optimizer.restore(), refusal=_UNUSABLE
                )
        if _IN_A_ROW in str(error):
            with_head = self.let_a_person_mark(uid)
            checkpoint, error = self.attempt(lambda: self.optimizer.restore(), refusal=_UNUSABLE)
        if isinstance(error, MismatchError):
            assert any(self.sealed[u].with_head != with_head for u in older)
        elif error is not None:
            assert older == [], error
        else:
            assert [checkpoint.train_state["uid"]] == older
        self.optimizer.close()
        self.end()
        return older != []

    def let_a_person_mark(self, uid: Uid) -> bool:
        """Run `offload verify --quarantine`, and start the program again."""
        assert self.damaged, "one after it must have been given up already"
        self.optimizer.close()
        self.end()
        path = self.path_of(uid)
        with open_checkpoint(path, even_quarantined=True, backend=self.log) as opened:
            assert not opened.quarantined
            assert verify_and_mark(opened).quarantined
        num_done["marks of a person"] += 1
        return self.begin_process()

    def step_and_wait(self) -> None:
        self.optimizer.step()
        self.optimizer.synchronize()

    # What must hold.

    @invariant()
    def a_promised_checkpoint_survives(self) -> None:
        """Lose the power in thought: what is left is usable, and is what it was."""
        num_done["rules"] += 1
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
            with _ignored(), open_checkpoint(STORE, backend=backend) as found:
                uid = found.train_state["uid"]
                self.check(found, backend)
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
                    self.check(checkpoint, backend)
                    found |= dict.fromkeys(info.pins, checkpoint.train_state["uid"])
            elif info.pins:
                assert info.path in self.damaged, info.reason
                found |= dict.fromkeys(info.pins, self.damaged[info.path])
        return found

    def check(self, found: Any, backend: Backend) -> None:
        expected = self.sealed[found.train_state["uid"]]
        assert found.train_state == expected.train_state
        assert differences(found, backend, self.variant, expected.expectation) == []

    def teardown(self) -> None:
        if not hasattr(self, "optimizer"):
            return
        self.close()
        for thread in since(self.others):
            if thread.name in (SEAL_THREAD, STEP_THREAD):
                thread.join(TIMEOUT_S)  # it may have told its result, and be about to end
                assert not thread.is_alive(), "threads are left"

    # How it is done.

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
        self.model, self.run, self.broken = Model(), new_run(self.variant), False
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
            with _ignored(), open_checkpoint(STORE, backend=self.log.inner) as newest:
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
                self.check(checkpoint, backend)
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
        self, call: Callable[[], _T], *, refusal: tuple[type[Exception], ...] = ()
    ) -> tuple[Any, Exception | None]:
        """Call; an error must be a named one, and there must be a reason for it."""
        try:
            with _ignored():
                return call(), None
        except (OffloadError, StorageError) as error:
            refused = isinstance(error, refusal)
            if len(str(error)) < 20 or not (refused or self.faults.num_failed):
                raise
            return None, error

    def attempt_twice(
        self, call: Callable[[], _T], *, refusal: tuple[type[Exception], ...] = ()
    ) -> tuple[Any, Exception | None]:
        """Call again if it fails: a fault happens once. What fails for a reason fails again."""
        value, error = self.attempt(call, refusal=refusal)
        if error is None or isinstance(error, refusal):
            return value, error
        return self.attempt(call, refusal=refusal)

    def persist(
        self, call: Callable[[], _T], *, refusal: tuple[type[Exception], ...] = ()
    ) -> tuple[Any, bool]:
        """Call until it works, or is refused, or until the optimizer asks for `restore`.

        Returns:
            What the call has returned, or the error; and whether it has worked.
        """
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
        replaced = len(others) < len(self.listed)
        self.listed = [*others, uid]
        if self.pending:
            return  # the next seal may have begun to make room
        untrimmed, present = self.listed, self.present()
        assert present[-1] == uid
        kept = self.kept(untrimmed)
        if self.faults.num_failed:  # one may have been withdrawn for a seal that then failed
            known = {*self.sealed}
            assert known.issuperset(present)
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
        self.run: Run = new_run(self.variant, sealed.events)
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


@contextlib.contextmanager
def _ignored() -> Any:
    """Let the store warn of failed syncs, `restore` of failed seals, readers of damage."""
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
    record_property("state_machine", dict(num_done))
    # Hypothesis draws from constants that it finds in the library, too: how often a few examples do
    # what changes with the library's code. A campaign has so many that it must do all of it often.
    is_campaign = EXAMPLES >= 100
    for what in ("crashes", "faults", "checkpoints"):
        assert num_done[what] > (EXAMPLES // 4 if is_campaign else 0), what
    if is_campaign:
        assert num_done["pins"] > 0
        assert num_done["flips"] > 0
