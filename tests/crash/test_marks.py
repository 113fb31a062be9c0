"""Marks of damaged checkpoints: when one is made or lifted, and what becomes of what has it."""

from __future__ import annotations

import pytest

from gds import Backend, MemoryBackend
from offload import DamagedError, open_checkpoint, verify_and_mark, verify_before_resume
from tests.crash.crash_backend import CrashBackend
from tests.crash.damaging import (
    BOTH,
    MARK,
    NEWEST,
    OTHER,
    STORE,
    after_power_cuts,
    damage,
    goes_on_from,
    mark,
    part_of,
    reason,
    store_with,
    warned,
)
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import contents, flip, overwrite, write
from tests.stores.small import memory_store
from tests.stores.training import Model, optimizer_for, options, take_step, train


def path_of(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


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


def test_a_mark_without_words_is_one() -> None:
    backend = memory_store(2)
    write(backend, f"{NEWEST}/{MARK}", b"")
    with pytest.raises(DamagedError, match="quarantined"):
        open_checkpoint(NEWEST, backend=backend)
    with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
        assert opened.quarantined
        assert opened.verify().quarantined == opened.quarantined


class TestMarking:
    """`offload verify --quarantine`, as the function that it calls."""

    @pytest.mark.parametrize(("marked", "is_damaged"), [(True, False), (True, True), (False, True)])
    def test_a_mark_is_on_what_is_damaged_durably(self, marked: bool, is_damaged: bool) -> None:
        backend = CrashBackend()
        store_with(backend, BOTH)
        if marked:
            mark(backend)
        path = damage(backend, "exp_avg") if is_damaged else ""
        with open_checkpoint(
            NEWEST, parts=[OTHER], even_quarantined=True, backend=backend
        ) as opened:
            assert bool(opened.verify().quarantined) is marked, "a look changes nothing"
            report = verify_and_mark(opened)
            assert report.quarantined == opened.quarantined
        assert report.ok is not is_damaged
        assert path in "".join(report.problems)
        for survivor in after_power_cuts(backend):
            assert bool(reason(survivor)) is is_damaged
            assert marked or "exp_avg" in reason(survivor)
        if not is_damaged:
            model = Model()
            optimizer = optimizer_for(model, BOTH, options(backend), keep=2)
            goes_on_from(optimizer.restore(), model, optimizer, 2)
            optimizer.close()

    @pytest.mark.parametrize("marked", [False, True])
    def test_what_could_not_be_read_is_neither_marked_nor_lifted(self, marked: bool) -> None:
        backend = FaultBackend(MemoryBackend())
        store_with(backend)
        if marked:
            mark(backend)
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            backend.fail("read", 2, forever=False)
            report = verify_and_mark(opened)
        assert (report.ok, report.problems) == (False, ())
        assert "injected failure of read" in report.unreadable[0]
        assert bool(report.quarantined) is marked

    @pytest.mark.parametrize("kind", ["remove", "sync_dir"])
    def test_a_mark_that_cannot_be_lifted_is_an_error(self, kind: str) -> None:
        backend = FaultBackend(MemoryBackend())
        store_with(backend)
        mark(backend)
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            backend.fail_if(lambda found, _: found == kind)
            with pytest.raises(OSError, match=f"injected failure of {kind}"):
                verify_and_mark(opened)


class TestTwoInARow:
    """Of two damaged checkpoints in a row the second is not marked: a drive may be dying."""

    @pytest.mark.parametrize(
        ("marked", "torn", "is_marked"),
        [
            ([], [], True),
            ([1], [], True),  # an older one
            ([3], [3], True),  # what generation it has is not known
            ([4], [], False),
        ],
    )
    def test_only_a_newer_one_that_is_marked_counts(
        self, marked: list[int], torn: list[int], is_marked: bool
    ) -> None:
        backend = memory_store(4)
        flip(backend, f"{path_of(2)}/exp_avg.safetensors")
        for step in marked:
            mark(backend, path_of(step))
        for step in torn:
            overwrite(backend, f"{path_of(step)}/manifest.json", b"no manifest")
        with open_checkpoint(path_of(2), backend=backend) as found:
            if is_marked:
                assert verify_before_resume(found).quarantined
            else:
                with pytest.raises(DamagedError, match="two in a row"):
                    verify_before_resume(found)
        assert (backend.stat(f"{path_of(2)}/{MARK}") is not None) == is_marked
