"""What becomes of the space and the name of a checkpoint that is marked as damaged."""

from __future__ import annotations

import pytest

from gds import Backend, MemoryBackend
from offload import DamagedError, open_checkpoint
from tests.crash.damaging import (
    BOTH,
    MARK,
    NEWEST,
    STORE,
    damage,
    goes_on_from,
    mark,
    part_of,
    store_with,
    warned,
)
from tests.stores.files import contents
from tests.stores.training import Model, optimizer_for, options, take_step, train


def files_of(backend: Backend, drives: int) -> dict[str, bytes]:
    """Return the files of the newest checkpoint, on all drives, but for a mark."""
    places = [NEWEST, *([part_of(backend)] if drives == 2 else [])]
    found = {f"{p}/{name}": data for p in places for name, data in contents(backend, p).items()}
    found.pop(f"{NEWEST}/{MARK}", None)
    return found


@pytest.mark.parametrize("keep", [1, 2])
def test_its_place_is_taken_when_training_comes_to_its_step_again(keep: int) -> None:
    """With keep=2 its slot is the next to be used: the mark in it must not be sealed."""
    backend = MemoryBackend()
    store_with(backend, BOTH)
    damage(backend, "model")
    model = Model()
    optimizer = optimizer_for(model, BOTH, options(backend), keep=keep)
    with warned("is quarantined"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 1)
    with open_checkpoint(STORE, backend=backend) as newest:
        assert (newest.step, newest.verify().ok) == (3, True)
    optimizer.close()
    for directory in BOTH:
        slots = [n for n in backend.list_dir(directory) if n.startswith((".slot", "step", "part"))]
        assert len(slots) <= keep + 1, slots
    for name in backend.list_dir(STORE):
        assert not name.startswith((".slot", "step")) or MARK not in backend.list_dir(
            f"{STORE}/{name}"
        )


@pytest.mark.parametrize("drives", [1, 2])
def test_its_files_stay_as_they_are(drives: int) -> None:
    """Somebody may want to look at it: it is written to no more, nor is what it has elsewhere."""
    backend, where = MemoryBackend(), BOTH[:drives]
    store_with(backend, where)
    damage(backend, "exp_avg")
    model = Model()
    optimizer = optimizer_for(model, where, options(backend), keep=2)
    assert optimizer.restore().step == 2
    before = files_of(backend, drives)
    with pytest.raises(DamagedError):
        take_step(model, optimizer, 3)
    with warned("not using", NEWEST):
        optimizer.restore()
    take_step(model, optimizer, 2)
    train(model, optimizer, 3, 4, 5, 6)
    assert MARK in backend.list_dir(NEWEST)
    assert files_of(backend, drives) == before
    optimizer.close()


@pytest.mark.parametrize("drives", [1, 2])
def test_what_was_marked_before_training_starts_over_stays(drives: int) -> None:
    """For somebody to look at, or to repair: ``fresh=True`` takes back what can be restored."""
    backend, where = MemoryBackend(), BOTH[:drives]
    store_with(backend, where)
    damage(backend, "model")
    mark(backend)
    before = files_of(backend, drives)
    model = Model()
    with optimizer_for(model, where, options(backend), keep=1, fresh=True) as optimizer:
        for step in (1, 2, 3, 4):
            take_step(model, optimizer, step)
            if step != 2:  # which would take its place
                optimizer.checkpoint({"step": step}).result()
    assert files_of(backend, drives) == before
    names = [name for name in backend.list_dir(STORE) if name.startswith("step-")]
    assert names == ["step-00000002", "step-00000004"]


def test_a_mark_made_beside_the_training_does_not_outlive_its_checkpoint() -> None:
    """`offload verify --quarantine` marks what ``fresh=True`` then takes back and rewrites."""
    backend, model = MemoryBackend(), Model()
    store_with(backend)
    optimizer = optimizer_for(model, STORE, options(backend), keep=1, fresh=True)
    for step in (1, 2):
        mark(backend, f"{STORE}/step-{step:08d}")
    for step in (1, 2, 3, 4):
        train(model, optimizer, step)
        with open_checkpoint(STORE, backend=backend) as newest:
            assert newest.step == step
    optimizer.close()
