"""A loss of power after every single operation: what was acknowledged is there, to the bit.

Each scene is played once on a `CrashBackend`. For prefixes of its log, some of the states that a
disk may then be in are opened by a new process: it must find the last acknowledged checkpoint or a
later one, hold exactly what plain torch had at that step, and go on with the same bits.

With ``FULL_TESTS=1`` the power is lost `CRASH_CUTS` times after each operation of each case.
Otherwise it is lost after each promise, in the worst way, and now and then elsewhere, in fewer
cases. ``CRASH_SEED`` chooses other states.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gds import Backend
from offload import list_checkpoints, open_checkpoint
from tests.campaigns import FULL
from tests.crash.crash_backend import CrashBackend, Disk, Image, Operation, moments
from tests.crash.scenes import (
    CASES,
    DIRECTORIES,
    EDITED,
    MILESTONES,
    SMOKE,
    STORE,
    Case,
    Position,
    Promise,
    Trainer,
)
from tests.stores.training import differences, same_bits

SEED = int(os.environ.get("CRASH_SEED", "20260711"))
CUTS_PER_OPERATION = int(os.environ.get("CRASH_CUTS", "2"))
ONE_IN = {"rename": 1, "exchange": 1, "remove": 4, "sync_dir": 8, "make_dir": 8}
"""In a smoke test one in so many operations of a kind is tried; of others one in 40."""

KILLS = 4 if FULL else 1
"""Processes killed in each case, besides those after a rename, before one that loses power."""

each_case = pytest.mark.parametrize("case", CASES if FULL else SMOKE, ids=str)


@functools.cache
def recorded(case: Case) -> tuple[Operation, ...]:
    backend = CrashBackend()
    case.play(backend)
    return tuple(backend.log)


class Tried:
    """The crash states of one case that have been checked."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seen: set[tuple[Image, Promise]] = set()
        self.num_cuts = 0
        self.num_unsynced = 0

    def check(self, disk: Disk, image: Image, promise: Promise, operation: Operation) -> None:
        """Check what a loss of power has left, unless it has been checked before."""
        self.num_cuts += 1
        self.num_unsynced += disk.num_unsynced > 0
        if (image, promise) in self.seen:
            return
        self.seen.add((image, promise))
        try:
            check(self.case, image.backend(), promise, finish=len(self.seen) % 4 == 0)
        except BaseException as error:
            error.add_note(f"CRASH_SEED={SEED}: power lost after {operation}; promised {promise}")
            raise

    def record(self, record_property: Callable[[str, object], None]) -> None:
        """Report what has been tried; the run's last lines have the sum (`tests/conftest.py`)."""
        record_property("crash_cuts", self.num_cuts)
        record_property("crash_states", len(self.seen))
        record_property("crash_seed", SEED)


def check(case: Case, backend: Backend, promise: Promise, *, finish: bool) -> None:
    """Open what a loss of power has left, as a new process would."""
    trainer = Trainer(case, backend)
    position = trainer.restore()
    assert position in promise.newest
    what_was_to_be_kept_is_there(case, backend, promise)
    if position is not None:
        trainer.history = position.history
        snapshot = case.expected(position)
        assert same_bits(dict(trainer.model.state_dict()), snapshot.model)
        with open_checkpoint(STORE, backend=backend) as checkpoint:
            assert not checkpoint.parameters_only
            assert differences(checkpoint, backend, snapshot) == []
            if checkpoint.metrics:  # they are replaced after the train state
                assert checkpoint.metrics["measured"] in (position.version, position.version - 1)
    for path in (f"{STORE}/{n}" for n in backend.list_dir(STORE) if n.startswith(".slot-")):
        whatever_reads_as_a_checkpoint_is_one(path, backend)
    if finish and (position is None or position.version != EDITED):
        last = trainer.optimizer.num_steps + 2
        trainer.seal(last - 1)
        trainer.seal(last)
        with open_checkpoint(STORE, backend=backend) as checkpoint:
            final = case.expected(Position(last, trainer.history))
            assert differences(checkpoint, backend, final) == []
        what_was_to_be_kept_is_there(case, backend, promise)
        for directory in DIRECTORIES[: case.drives]:
            names = set(backend.list_dir(directory)) - {"LOCK", "store.json", "pins"}
            assert len(names) <= case.most_slots(last), names
    trainer.close()


def what_was_to_be_kept_is_there(case: Case, backend: Backend, promise: Promise) -> None:
    """Every pin has a whole checkpoint of the right step, and so has every milestone."""
    found = list_checkpoints(STORE, backend=backend)
    steps = {pin: info.step for info in found for pin in info.pins}
    for name, any_of in promise.pins:
        assert steps.get(name) in any_of, (name, steps)
    for info in found:
        if info.pins or info.step in promise.kept or case.scene == "parameters only":
            with open_checkpoint(info.path, backend=backend) as checkpoint:
                expected = case.expected(Position(info.step))
                if info.parameters_only:  # the others have all of their state
                    assert info.step % MILESTONES.steps == 0
                    expected = replace(expected, arrays={})
                assert differences(checkpoint, backend, expected) == []
    assert promise.kept <= {info.step for info in found}


def whatever_reads_as_a_checkpoint_is_one(path: str, backend: Backend) -> None:
    """A slot that is being rewritten must not pass for a checkpoint, whoever looks into it."""
    try:
        with open_checkpoint(path, backend=backend) as checkpoint:
            assert checkpoint.verify().problems == ()
    except ValueError:  # CheckpointError
        return


def cuts(disk: Disk, operation: Operation, rng: random.Random, drives: int) -> Iterator[Image]:
    """Choose states of the disk after an operation."""
    if FULL:
        for _ in range(CUTS_PER_OPERATION if drives == 1 else max(CUTS_PER_OPERATION // 2, 1)):
            yield disk.power_cut(rng)
    elif operation.kind == "note":
        if len(operation.label.newest) == 1:  # what was acknowledged must not be in the cache only
            yield disk.power_cut(rng, names=0.0, pages=0.0)
    elif operation.kind == "write" and "/step-" in operation.path:  # a checkpoint is not torn
        yield disk.power_cut(rng, names=1.0, pages=0.5)
    elif rng.randrange(ONE_IN.get(operation.kind, 40)) == 0:
        if operation.kind in ONE_IN:  # a name must not come before what it stands for
            yield disk.power_cut(rng, names=1.0, pages=0.0)
        else:
            yield disk.power_cut(rng)


@each_case
def test_power_lost_after_any_operation(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    log, tried = recorded(case), Tried(case)
    rng = random.Random(f"{SEED}/{case}")
    for disk, operation, promise in moments(log, Promise()):
        for image in cuts(disk, operation, rng, case.drives):
            tried.check(disk, image, promise, operation)
    tried.record(record_property)
    assert tried.num_unsynced > (tried.num_cuts // 2 if FULL else 0), "there was nothing to lose"
    assert len(tried.seen) > (len(log) // (2 if case.drives == 1 else 3) if FULL else 5)


@each_case
def test_power_lost_in_the_process_that_follows_a_killed_one(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    """A kill leaves changes in the page cache: the next process sees them, the platter does not."""
    log, tried = recorded(case), Tried(case)
    rng = random.Random(f"{SEED}/killed/{case}")
    promises = [promise for _, _, promise in moments(log, Promise())]
    kinds = ("rename", "exchange", "make_dir", "remove")
    renames = [n for n, operation in enumerate(log, 1) if operation.kind in kinds]
    if not FULL or case.drives > 1:
        of_pins = [n for n in renames if "/pins/" in log[n - 1].path]
        renames = [*of_pins, *rng.sample(renames, KILLS)]
    for killed_after in {*renames, *rng.sample(range(1, len(log)), KILLS)}:
        backend = CrashBackend.resumed(log[:killed_after])
        before = promises[killed_after - 1]
        trainer = Trainer(case, backend, before=before)
        found = trainer.restore()
        assert found in before.newest
        what_was_to_be_kept_is_there(case, backend, before)
        restored = len(backend.log)
        if found is None or found.version != EDITED:
            trainer.history = found.history if found else 0
            trainer.seal(trainer.optimizer.num_steps + 1)
        trainer.close()
        later = range(restored + 1, len(backend.log) + 1)
        chosen = rng.sample(later, min(2, len(later)))
        for number, (disk, operation, promise) in enumerate(moments(backend.log), 1):
            if number in (
                restored,
                len(backend.log),
            ):  # what it relies on must not be in the cache only
                image = disk.power_cut(rng, names=0.0, pages=0.0)
                tried.check(disk, image, promise, operation)
            elif number in chosen:
                tried.check(disk, disk.power_cut(rng), promise, operation)
    tried.record(record_property)
    assert tried.num_unsynced > 0
    assert tried.num_cuts > KILLS
