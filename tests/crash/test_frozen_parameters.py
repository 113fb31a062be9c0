"""Losses of power, kills and failures where a seal believes what a slot holds already.

A seal of a model that is mostly frozen writes little: it goes by what this process has written, by
what it reads back of an earlier one's slots, and it clones. None of that may be believed too much.

With ``FULL_TESTS=1`` each operation is tried, and otherwise one in `STRIDE`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from gds import Backend
from offload import open_checkpoint
from tests.campaigns import FULL
from tests.crash.crash_backend import CrashBackend, Image, moments
from tests.stores.frozen_model import STORE, Process, Reference, differences, make_units_small

SEED = int(os.environ.get("CRASH_SEED", "20260711"))
STRIDE = 1 if FULL else 9
KEEP = 2
EDITED = 4
"""The step before which a frozen tensor is edited."""

LAST_STEP = 5
AFTERWARDS = 3
"""Seals of a process that follows: all slots are written."""

each_way = pytest.mark.parametrize("clones", [False, True], ids=["", "clones"])


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    make_units_small(monkeypatch)


class Noted(Process):
    """Notes in the log which checkpoints may be the newest from then on; 0 stands for none."""

    def train(self, last_step: int) -> None:
        assert isinstance(self.backend, CrashBackend)
        while self.step_number < last_step:
            if self.step_number + 1 == EDITED:
                self.edit("base", 20_000, 7.0)
            self.step()
            self.backend.note({self.step_number - 1, self.step_number})
            self.check(self.seal())
            self.backend.note({self.step_number})


def reference_at(step: int, *, edited: bool = True) -> Reference:
    reference = Reference()
    for number in range(1, step + 1):
        if edited and number == EDITED:
            reference.model.base.data[20_000] = 7.0
        reference.step(number)
    return reference


def recorded(clones: bool) -> CrashBackend:
    backend = CrashBackend(clones=clones)
    run = Noted(backend, keep=KEEP)
    run.train(LAST_STEP)
    run.close()
    return backend


def newest_in(backend: Backend, *, edited: bool = True) -> int:
    """Check the newest checkpoint; returns its step, 0 if there is none."""
    names = backend.list_dir(STORE) if backend.stat(STORE) is not None else []
    if not any(name.startswith("step-") for name in names):
        return 0
    with open_checkpoint(STORE, backend=backend) as found:
        expected = reference_at(found.step, edited=edited).after[found.step]
        assert differences(found, expected) == []
        return found.step


def check(image: Image, promised: set[int], *, clones: bool, finish: bool) -> None:
    """Open what a loss of power has left: all of it is whole, and the training goes on."""
    backend = CrashBackend.after(image, clones=clones)
    newest = newest_in(backend)
    assert newest in promised
    if finish:
        run = Noted(backend, reference_at(newest), keep=KEEP)
        assert run.step_number == newest
        run.train(newest + AFTERWARDS)
        run.close()


@each_way
def test_power_lost_after_any_operation(
    clones: bool, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(f"{SEED}/frozen/{clones}")
    seen, num_cuts = set(), 0
    for number, (disk, operation, promised) in enumerate(moments(recorded(clones).log, {0})):
        if number % STRIDE and operation.kind not in ("rename", "exchange"):
            continue
        num_cuts += 1
        image = disk.power_cut(rng)
        if (state := (hash(image), frozenset(promised))) in seen:
            continue
        seen.add(state)
        try:
            check(image, promised, clones=clones, finish=len(seen) % 8 == 0)
        except BaseException as error:
            error.add_note(f"CRASH_SEED={SEED}: power lost after {operation}, promised {promised}")
            raise
    record_property("crash_cuts", num_cuts)
    record_property("crash_states", len(seen))
    record_property("crash_seed", SEED)
    assert len(seen) > num_cuts // 3


@each_way
def test_what_a_killed_process_left_in_the_cache_is_durable_when_it_is_believed(
    clones: bool, record_property: Callable[[str, object], None]
) -> None:
    """A seal that finds the right bytes in a slot does not write them: its sync covers them."""
    log = recorded(clones).log
    rng = random.Random(f"{SEED}/frozen/killed/{clones}")
    writes = [
        n
        for n, operation in enumerate(log, 1)
        if operation.kind == "write" and "model.safetensors" in operation.path
    ]
    killed = {*rng.sample(writes, 8 if FULL else 2), *rng.sample(range(1, len(log)), 4)}
    promises = [promised for _, _, promised in moments(log, {0})]
    num_cuts = 0
    for killed_after in sorted(killed)[: None if FULL else 3]:
        backend = CrashBackend.resumed(log[:killed_after], clones=clones)
        newest = newest_in(backend)
        assert newest in promises[killed_after - 1]
        backend.note({newest})
        run = Noted(backend, reference_at(newest), keep=KEEP)
        run.train(newest + AFTERWARDS)
        run.close()
        later = range(killed_after + 2, len(backend.log) + 1)
        cuts = {len(backend.log), *rng.sample(later, 4)}
        for number, (disk, _, promised) in enumerate(moments(backend.log), 1):
            if number in cuts:  # all that was not synced is gone, or any of it
                num_cuts += 1
                for image in (disk.power_cut(rng, names=0.0, pages=0.0), disk.power_cut(rng)):
                    check(image, promised, clones=clones, finish=False)
    record_property("crash_cuts", num_cuts)
    record_property("crash_states", num_cuts)
