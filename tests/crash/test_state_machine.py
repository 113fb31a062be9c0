"""Anything may happen in any order: Hypothesis looks for an order that breaks a promise.

Rules are what a user and the world do to a store: steps, checkpoints, pins, restores, edits, other
policies, faults, bits that flip, kills and losses of power. After each of them the power is lost in
thought, and what is left must be a checkpoint that was promised, to the bit, with the pins that
were. `state_process.py`, `state_model.py` and `state_policy.py` say what that is.

A smoke test makes four short examples; ``FULL_TESTS=1`` makes more, and so does

    STATE_MACHINE_SEED=7 STATE_MACHINE_EXAMPLES=16 pytest tests/crash/test_state_machine.py
    STATE_MACHINE_MINUTES=30 pytest -s tests/crash/test_state_machine.py   # seed after seed
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

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

from offload import MismatchError, OffloadError, PinError, pin, unpin
from tests.campaigns import FULL
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import KINDS, Kind
from tests.crash.state_damage import DamagedStore, Flip
from tests.crash.state_model import (
    AddHead,
    Edit,
    LayOut,
    SetRate,
    Step,
    Variant,
    edit,
    set_gradients,
)
from tests.crash.state_policy import METRIC, Policy
from tests.crash.state_process import STORE, Sealed, ignored, num_done
from tests.stores.training import add_head

SEED = int(os.environ.get("STATE_MACHINE_SEED", "20261121"))
MINUTES = float(os.environ.get("STATE_MACHINE_MINUTES", "0"))
EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "16" if FULL or MINUTES else "4"))
STEPS = int(os.environ.get("STATE_MACHINE_STEPS", "30" if FULL or MINUTES else "15"))
SHRINK = bool(os.environ.get("STATE_MACHINE_SHRINK"))
"""Look for the shortest example that fails, which takes minutes."""

RESIDENT = (0, 40_000, "1GiB")
POLICIES = st.builds(
    Policy,
    last=st.integers(1, 3),
    every=st.sampled_from([None, None, 2, 3]),
    best=st.sampled_from([None, None, 1, 2]),
)


class StoreMachine(DamagedStore, RuleBasedStateMachine):
    """A user and the world; see the module.

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
    def begin(self, **settings: Any) -> None:
        self.begin_store(**settings)

    @invariant()
    def a_promised_checkpoint_survives(self) -> None:
        """Lose the power in thought: what is left is usable, and is what it was."""
        num_done["rules"] += 1
        self.check_a_power_cut()

    def teardown(self) -> None:
        if hasattr(self, "optimizer"):
            self.close()

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

        With every other seed a weight is edited just before the checkpoint.
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
        with contextlib.suppress(OffloadError, OSError), ignored():
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
    )
    def damage(self, which: int, flip: Flip) -> None:
        """A bit flips while nobody trains; not two in a row, which are for a person to look at."""
        self.close()
        self.refresh()
        if len(self.listed) >= -which:
            uid = self.listed[which]
            if all(given_up < uid for given_up in self.damaged.values()):
                self.damage_one(uid, flip)
        self.open()


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
    # what changes with the library's code. A campaign has so many that it must do all of it.
    if EXAMPLES >= 100:
        assert all(num_done[what] for what in ("crashes", "faults", "checkpoints", "pins", "flips"))
