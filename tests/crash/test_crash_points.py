"""A loss of power after every single operation: what was acknowledged is there, to the bit.

Each scenario is run once on a `CrashBackend`. For every prefix of its log, a few of the states that
a disk may then be in are opened by a new process: it must find the last acknowledged checkpoint or
a later one, hold exactly what plain torch had at that step, and reach the end with the same bits.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import offload
from gds import Backend
from offload import (
    AdamW,
    Checkpoint,
    DriveTuning,
    EverySteps,
    LastK,
    Retention,
    list_checkpoints,
    open_checkpoint,
)
from tests.crash.crash_backend import CrashBackend, Disk, Image, Operation
from tests.stores.training import (
    Model,
    Reference,
    Snapshot,
    add_head,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)

SEED = int(os.environ.get("CRASH_SEED", "20260711"))
CUTS_PER_OPERATION = int(os.environ.get("CRASH_CUTS", "2"))
STORE = "/data/run"
OTHERS = ("/fast/run", "/slow/run")
"""The directories on the further drives of a store that has three."""

SHARES = (1, 2, 1)
RESIDENT_BYTES = 40_000
"""Of memory for state that stays: some of the chunks."""

HEAD_FROM = 4
"""The step before which the scenario ``added group`` begins to train the head."""

KILLS = 4
"""Processes killed in each case, besides those after a rename, before one that loses power."""

EDITED = 7
"""The version in which the scenario ``sealed twice`` has edited a buffer."""


@dataclass(frozen=True)
class Position:
    """Which checkpoint this is, as its train state says."""

    step: int
    history: int = 0
    version: int = 0

    def train_state(self) -> dict[str, object]:
        """Return what is passed to `checkpoint`: also what fills pages, so that it can be torn."""
        seed = self.step * 10_000 + self.history * 100 + self.version
        random_state = torch.Generator().manual_seed(seed).get_state()
        return {
            "step": self.step,
            "history": self.history,
            "version": self.version,
            "random_state": random_state,
        }

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Position:
        """Return which checkpoint it is, all of whose train state must say so."""
        found = dict(checkpoint.train_state)
        random_state = found.pop("random_state")
        position = cls(**found)
        assert torch.equal(random_state, position.train_state()["random_state"])
        return position


@dataclass(frozen=True)
class Promise:
    """What a process may find, whenever it comes."""

    newest: frozenset[Position | None] = frozenset({None})
    """One of these is the newest checkpoint; None stands for an empty store."""

    pins: frozenset[tuple[str, frozenset[int | None]]] = frozenset()
    """By name: the steps one of which it pins; None for no such pin. A pin has a checkpoint."""

    kept: frozenset[int] = frozenset()
    """Steps whose checkpoints are there, because retention keeps them for good."""


MILESTONES = EverySteps(2)


def policy_of(name: str, keep: int) -> int | Retention:
    """Return what a scenario passes as ``keep=``."""
    return LastK(keep) | MILESTONES if name == "every second step" else keep


def num_extra(name: str, last_step: int) -> int:
    """Return how many slots a scenario may have at the end, besides `keep` and one."""
    return {"every second step": last_step // MILESTONES.steps, "pinned": 2}.get(name, 0)


@functools.cache
def reference(history: int, with_head: bool) -> Reference:
    return Reference(history, HEAD_FROM if with_head else None)


def expected(position: Position, with_head: bool) -> Snapshot:
    snapshot = reference(position.history, with_head).after(position.step)
    if position.version != EDITED:
        return snapshot
    edited = torch.zeros_like(snapshot.model["norm.running_mean"])
    return replace(snapshot, model={**snapshot.model, "norm.running_mean": edited})


class Trainer:
    """One process: it trains, seals, and notes in the log what has been promised."""

    def __init__(
        self,
        backend: Backend,
        *,
        keep: int | Retention,
        drives: int = 1,
        history: int = 0,
        with_head: bool = False,
        promised: Position | None = None,
        fresh: bool = False,
        host_memory: int | str = 0,
        before: Promise = Promise(),
    ) -> None:
        self.backend = backend
        self.history = history
        self.with_head = with_head
        self.promised = promised
        self.pins = dict(before.pins)
        self.kept = before.kept
        self.milestones = range(0) if isinstance(keep, int) else range(0, 100, MILESTONES.steps)
        self.model = Model(history)
        self.optimizer: AdamW = optimizer_for(
            self.model,
            [STORE, *OTHERS[: drives - 1]],
            options(backend, drives=DriveTuning(shares=SHARES[:drives]), host_memory=host_memory),
            keep=keep,
            fresh=fresh,
            with_head=with_head and num_groups(backend) == 2,
        )

    def note(self, *allowed: Position | None) -> None:
        if isinstance(self.backend, CrashBackend):
            promise = Promise(frozenset(allowed), frozenset(self.pins.items()), self.kept)
            self.backend.note(promise)

    def pin(self, name: str, step: int | None, how: Callable[[], object]) -> None:
        """Pin a step, or nothing: while that goes on the name may be found on either."""
        self.pins[name] = self.pins.get(name, frozenset({None})) | {step}
        self.note(self.promised)
        how()
        self.pins[name] = frozenset({step})
        self.note(self.promised)

    def restore(self, step: int | None = None) -> Position | None:
        """Restore, and promise from then on what was restored."""
        checkpoint = self.optimizer.restore(step, discard_newer=step is not None)
        found = None if checkpoint is None else Position.of(checkpoint)
        self.promised = found
        self.note(found)
        return found

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            if self.with_head and step == HEAD_FROM:
                add_head(self.model, self.optimizer)
            backward(self.model, step, self.history)
            self.optimizer.step()

    def seal(
        self, step: int, *, version: int = 0, meanwhile: int = 0, measured: bool = False
    ) -> None:
        """Seal, training up to the step `meanwhile` behind it."""
        position = Position(step, self.history, version)
        self.note(self.promised, position)
        metrics = {"version": version} if measured else None
        handle = self.optimizer.checkpoint(position.train_state(), metrics=metrics)
        if meanwhile:
            self.train(step + 1, meanwhile)
        handle.result()
        self.promised = position
        if step in self.milestones:
            self.kept |= {step}
        self.note(position)

    def close(self) -> None:
        self.optimizer.close()


def num_groups(backend: Backend) -> int:
    """Return how many parameter groups the newest checkpoint of the store has."""
    try:
        with open_checkpoint(STORE, backend=backend) as newest:
            return len(newest.hyperparameters)
    except (OSError, ValueError):
        return 0


def three_checkpoints(backend: CrashBackend, keep: int, drives: int) -> None:
    trainer = Trainer(backend, keep=keep, drives=drives)
    for step in (2, 4, 6):
        trainer.train(step - 1, step)
        trainer.seal(step)
    trainer.close()


def sealed_behind_training(backend: CrashBackend, keep: int, drives: int) -> None:
    trainer = Trainer(backend, keep=keep, drives=drives)
    trainer.train(1, 1)
    trainer.seal(1, meanwhile=3)
    trainer.seal(3, meanwhile=5)
    trainer.seal(5, meanwhile=6)
    trainer.close()


def resident_state(backend: CrashBackend, keep: int, drives: int) -> None:
    """Some of the state is written by seals only, while the next step wants to change it."""
    trainer = Trainer(backend, keep=keep, drives=drives, host_memory=RESIDENT_BYTES)
    trainer.train(1, 2)
    trainer.seal(2, meanwhile=3)
    assert trainer.optimizer.stats().resident_bytes
    trainer.seal(3, meanwhile=5)
    trainer.seal(5)
    trainer.close()
    trainer = Trainer(
        backend, keep=keep, drives=drives, host_memory="1GiB", promised=trainer.promised
    )
    assert trainer.restore() == Position(5)
    trainer.train(6, 6)
    trainer.seal(6)
    trainer.close()


def two_processes(backend: CrashBackend, keep: int, drives: int) -> None:
    trainer = Trainer(backend, keep=keep, drives=drives)
    trainer.train(1, 1)
    trainer.seal(1)
    trainer.train(2, 3)
    trainer.seal(3)
    trainer.train(4, 4)
    trainer.close()
    trainer = Trainer(backend, keep=keep, drives=drives, promised=trainer.promised)
    assert trainer.restore() == Position(3)
    trainer.train(4, 5)
    trainer.seal(5)
    trainer.close()


def replaced_train_state(backend: CrashBackend, keep: int, drives: int) -> None:
    trainer = Trainer(backend, keep=keep, drives=drives)
    trainer.train(1, 2)
    for version in range(3):
        trainer.seal(2, version=version, measured=True)
    trainer.train(3, 3)
    trainer.seal(3)
    trainer.seal(3, version=1, measured=True)
    trainer.train(4, 4)
    trainer.seal(4)
    trainer.close()


def added_group(backend: CrashBackend, keep: int, drives: int) -> None:
    trainer = Trainer(backend, keep=keep, drives=drives, with_head=True)
    trainer.train(1, 2)
    trainer.seal(2)
    trainer.train(3, 4)
    trainer.seal(4)
    trainer.train(5, 5)
    trainer.seal(5)
    trainer.close()


def started_over(backend: CrashBackend, keep: int, drives: int) -> None:
    """`fresh=True`: the old history stays until the new one is durable; its names are met again."""
    trainer = Trainer(backend, keep=keep, drives=drives)
    for step in (1, 2):
        trainer.train(step, step)
        trainer.seal(step)
    trainer.close()
    trainer = Trainer(
        backend, keep=keep, drives=drives, history=1, promised=trainer.promised, fresh=True
    )
    for step in (1, 2, 3):
        trainer.train(step, step)
        trainer.seal(step)
    trainer.close()


def gone_back(backend: CrashBackend, keep: int, drives: int) -> None:
    """`discard_newer=True`: until it returns any checkpoint may be the newest; then the chosen."""
    trainer = Trainer(backend, keep=keep, drives=drives)
    for step in (1, 2):
        trainer.train(step, step)
        trainer.seal(step)
    oldest = min(c.manifest.step for c in trainer.optimizer._engine.store.checkpoints)
    trainer.note(*(Position(step) for step in range(oldest, 3)))
    assert trainer.restore(oldest) == Position(oldest)
    trainer.train(oldest + 1, 3)
    trainer.seal(3)
    trainer.train(4, 4)
    trainer.seal(4)
    trainer.close()


def sealed_twice(backend: CrashBackend, keep: int, drives: int) -> None:
    """The same step with an edited buffer, and as it was: the new one takes the old one's name."""
    trainer = Trainer(backend, keep=keep, drives=drives)
    trainer.train(1, 2)
    trainer.seal(2)
    saved = trainer.model.norm.running_mean.clone()
    trainer.model.norm.running_mean.zero_()
    trainer.seal(2, version=EDITED)
    trainer.model.norm.running_mean.copy_(saved)
    trainer.seal(2, version=EDITED + 1)
    trainer.train(3, 3)
    trainer.seal(3)
    trainer.close()


def pinned(backend: CrashBackend, keep: int, drives: int) -> None:
    """Names are given, moved and removed, by the process that trains and beside it."""
    trainer = Trainer(backend, keep=keep, drives=drives)
    trainer.train(1, 1)
    trainer.seal(1)
    trainer.pin("best", 1, lambda: trainer.optimizer.pin("best"))
    trainer.train(2, 2)
    trainer.seal(2, meanwhile=3)
    trainer.pin("other", 2, lambda: offload.pin(f"{STORE}/step-00000002", "other", backend=backend))
    trainer.seal(3)
    trainer.pin("best", 3, lambda: trainer.optimizer.pin("best", 3))
    trainer.train(4, 4)
    trainer.seal(4)
    trainer.close()
    before = Promise(pins=frozenset(trainer.pins.items()))
    trainer = Trainer(backend, keep=keep, drives=drives, promised=trainer.promised, before=before)
    assert trainer.restore() == Position(4)
    trainer.pin("other", None, lambda: offload.unpin(STORE, "other", backend=backend))
    trainer.pin("best", None, lambda: trainer.optimizer.unpin("best"))
    trainer.train(5, 5)
    trainer.seal(5)
    trainer.close()


def every_second_step(backend: CrashBackend, keep: int, drives: int) -> None:
    """More and more checkpoints have come to stay, beside those that are recycled."""
    policy = policy_of("every second step", keep)
    trainer = Trainer(backend, keep=policy, drives=drives)
    for step in range(1, 4):
        trainer.train(step, step)
        trainer.seal(step)
    trainer.train(4, 4)
    trainer.seal(4, meanwhile=5)
    trainer.seal(5)
    trainer.close()


SCENARIOS: dict[str, Callable[[CrashBackend, int, int], None]] = {
    "three checkpoints": three_checkpoints,
    "sealed behind training": sealed_behind_training,
    "resident state": resident_state,
    "two processes": two_processes,
    "replaced train state": replaced_train_state,
    "added group": added_group,
    "started over": started_over,
    "gone back": gone_back,
    "sealed twice": sealed_twice,
    "pinned": pinned,
    "every second step": every_second_step,
}
CASES = [
    pytest.param(name, keep, 1, id=f"{name.replace(' ', '-')}-keep={keep}")
    for name in SCENARIOS
    for keep in ((1, 2) if name != "every second step" else (1,))
]
ON_SEVERAL_DRIVES = [
    pytest.param(name, keep, drives, id=f"{name.replace(' ', '-')}-keep={keep}-drives={drives}")
    for name, keep, drives in [
        ("three checkpoints", 1, 2),
        ("sealed behind training", 2, 3),
        ("two processes", 1, 2),
        ("added group", 1, 2),
        ("started over", 1, 2),
        ("gone back", 2, 2),
        ("sealed twice", 1, 3),
    ]
]


@functools.cache
def recorded(name: str, keep: int, drives: int) -> tuple[Operation, ...]:
    backend = CrashBackend()
    SCENARIOS[name](backend, keep, drives)
    return tuple(backend.log)


def allowed_at(log: Sequence[Operation]) -> Iterator[Promise]:
    """Yield, for each operation, what may be found after it."""
    allowed = Promise()
    for operation in log:
        if operation.kind == "note":
            allowed = operation.label
        yield allowed


def check(
    image: Image, allowed: Promise, *, keep: int, drives: int, name: str, finish: bool
) -> None:
    """Open what a loss of power has left, as a new process would."""
    backend = image.backend()
    with_head = name == "added group"
    policy = policy_of(name, keep)
    trainer = Trainer(backend, keep=policy, drives=drives, with_head=with_head)
    position = trainer.restore()
    assert position in allowed.newest
    what_was_to_be_kept_is_there(backend, allowed)
    if position is not None:
        trainer.history = position.history
        snapshot = expected(position, with_head)
        assert same_bits(dict(trainer.model.state_dict()), snapshot.model)
        with open_checkpoint(STORE, backend=backend) as checkpoint:
            assert differences(checkpoint, backend, snapshot) == []
            if checkpoint.metrics:
                assert checkpoint.metrics["version"] in (position.version, position.version - 1)
    for path in (f"{STORE}/{n}" for n in backend.list_dir(STORE) if n.startswith(".slot-")):
        whatever_reads_as_a_checkpoint_is_one(path, backend)
    if finish and (position is None or position.version != EDITED):
        start = position.step if position else 0
        for step in (start + 1, start + 2):
            trainer.train(step, step)
            trainer.seal(step)
        final = expected(Position(start + 2, trainer.history), with_head)
        with open_checkpoint(STORE, backend=backend) as checkpoint:
            assert checkpoint.step == start + 2
            assert differences(checkpoint, backend, final) == []
        what_was_to_be_kept_is_there(backend, allowed)
        for directory in (STORE, *OTHERS[: drives - 1]):
            names = set(backend.list_dir(directory)) - {"LOCK", "store.json", "pins"}
            assert len(names) <= keep + 1 + num_extra(name, start + 2), names
    trainer.close()


def what_was_to_be_kept_is_there(backend: Backend, allowed: Promise) -> None:
    """Every pin has a whole checkpoint of the right step, and so has every milestone."""
    found = list_checkpoints(STORE, backend=backend)
    steps = {pin: info.step for info in found for pin in info.pins}
    for name, any_of in allowed.pins:
        assert steps.get(name) in any_of, (name, steps)
    for info in found:
        if info.pins or info.step in allowed.kept:
            with open_checkpoint(info.path, backend=backend) as checkpoint:
                snapshot = expected(Position(info.step), with_head=False)
                assert differences(checkpoint, backend, snapshot) == []
    assert allowed.kept <= {info.step for info in found}


def whatever_reads_as_a_checkpoint_is_one(path: str, backend: Backend) -> None:
    """A slot that is being rewritten must not pass for a checkpoint, whoever looks into it."""
    try:
        with open_checkpoint(path, backend=backend) as checkpoint:
            assert checkpoint.verify().problems == ()
    except ValueError:  # CheckpointError
        return


class Tried:
    """The crash states of one case that have been checked."""

    def __init__(self, name: str, keep: int, drives: int) -> None:
        self.name = name
        self.keep = keep
        self.drives = drives
        self.seen: set[tuple[Image, Promise]] = set()
        self.num_cuts = 0
        self.num_unsynced = 0

    def check(self, disk: Disk, rng: random.Random, allowed: Promise, operation: Operation) -> None:
        """Cut the power, and check what is left unless it has been before."""
        self.num_cuts += 1
        self.num_unsynced += disk.num_unsynced > 0
        state = (disk.power_cut(rng), allowed)
        if state in self.seen:
            return
        self.seen.add(state)
        try:
            check(
                *state,
                keep=self.keep,
                drives=self.drives,
                name=self.name,
                finish=len(self.seen) % 4 == 0,
            )
        except BaseException as error:
            error.add_note(f"CRASH_SEED={SEED}: power lost after {operation}; allowed {allowed}")
            raise

    def record(self, record_property: Callable[[str, object], None]) -> None:
        """Report what has been tried; the run's last lines have the sum (`tests/conftest.py`)."""
        print(self)
        record_property("crash_cuts", self.num_cuts)
        record_property("crash_states", len(self.seen))
        record_property("crash_seed", SEED)

    def __str__(self) -> str:
        what = f"{self.num_cuts} cuts, {len(self.seen)} different states"
        return f"{self.name}, keep={self.keep}, {self.drives} drives, seed {SEED}: {what}"


@pytest.mark.parametrize(("name", "keep", "drives"), CASES + ON_SEVERAL_DRIVES)
def test_power_lost_after_any_operation(
    name: str, keep: int, drives: int, record_property: Callable[[str, object], None]
) -> None:
    log = recorded(name, keep, drives)
    rng = random.Random(f"{SEED}/{name}/{keep}/{drives}")
    disk = Disk()
    tried = Tried(name, keep, drives)
    for operation, allowed in zip(log, allowed_at(log), strict=True):
        disk.apply(operation)
        for _ in range(CUTS_PER_OPERATION if drives == 1 else max(CUTS_PER_OPERATION // 2, 1)):
            tried.check(disk, rng, allowed, operation)
    tried.record(record_property)
    assert tried.num_unsynced > tried.num_cuts // 2, "most cuts must have something to lose"
    assert len(tried.seen) > len(log) // (2 if drives == 1 else 3)


@pytest.mark.parametrize(("name", "keep", "drives"), CASES + ON_SEVERAL_DRIVES)
def test_power_lost_in_the_process_that_follows_a_killed_one(
    name: str, keep: int, drives: int, record_property: Callable[[str, object], None]
) -> None:
    """A kill leaves changes in the page cache: the next process sees them, the platter does not."""
    log = recorded(name, keep, drives)
    rng = random.Random(f"{SEED}/killed/{name}/{keep}/{drives}")
    allowed = list(allowed_at(log))
    renames = {n for n, op in enumerate(log, 1) if op.kind in ("rename", "exchange", "make_dir")}
    tried = Tried(name, keep, drives)
    if drives > 1:
        renames = set(rng.sample(sorted(renames), KILLS))
    for killed_after in sorted(renames | set(rng.sample(range(len(log)), KILLS))):
        backend = CrashBackend.resumed(log[:killed_after])
        before = allowed[killed_after - 1] if killed_after else Promise()
        trainer = Trainer(
            backend,
            keep=policy_of(name, keep),
            drives=drives,
            with_head=name == "added group",
            before=before,
        )
        found = trainer.restore()
        assert found in before.newest
        what_was_to_be_kept_is_there(backend, before)
        restored = len(backend.log)
        if found is None or found.version != EDITED:
            trainer.history = found.history if found else 0
            start = found.step if found else 0
            trainer.train(start + 1, start + 1)
            trainer.seal(start + 1)
        trainer.close()
        later = range(killed_after + 1, len(backend.log) + 1)
        cuts = {restored, *rng.sample(later, min(2, len(later)))}
        disk = Disk()
        for number, (operation, what) in enumerate(
            zip(backend.log, allowed_at(backend.log), strict=True), 1
        ):
            disk.apply(operation)
            if number in cuts:
                tried.check(disk, rng, what, operation)
    tried.record(record_property)
    assert tried.num_unsynced > 0
    assert tried.num_cuts > KILLS
