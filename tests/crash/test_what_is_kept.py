"""What a store keeps: by policies, pins and marks, beside people who change them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest

import offload
from gds import Backend, File, LockHeldError, MemoryBackend, WrapperBackend
from offload import (
    open_checkpoint,
    verify_and_mark,
    verify_before_resume,
)
from offload.errors import DamagedError, PinError, UnreadableError
from offload.retention import read_pins
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import acquire, is_open, made, opened, path_of, steps
from tests.ranks_store.job import ONE, TWO, Job, part_paths
from tests.stores import small
from tests.stores.files import everything, flip, overwrite, remove_tree, write
from tests.stores.small import STORE

PINS = f"{STORE}/pins"


def mark_of(step: int) -> str:
    return f"{path_of(step)}/damaged.txt"


def mark(backend: Backend, step: int) -> None:
    """Mark a checkpoint as damaged, as a person might."""
    write(backend, mark_of(step), b"damaged\n")


def said(call: Callable[..., object], *arguments: object) -> list[str]:
    """Call something, and return the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments)
    return [str(one.message) for one in caught]


class TestPins:
    def test_one_that_is_moved_away_meanwhile_is_lost_by_no_power_cut(self) -> None:
        """Another process moves it, and does not make that durable, before it is looked for."""

        class Moving(WrapperBackend):
            due = False

            def list_dir(self, path: str) -> list[str]:
                if self.due and path == PINS:
                    self.due = False
                    self.inner.rename(f"{PINS}/.best.new", f"{PINS}/best")
                return super().list_dir(path)

        crash = CrashBackend()
        with small.make_optimizer(small.make_model(), crash, keep=3) as optimizer:
            small.train(optimizer, 3)
            optimizer.pin("other", 3)
            optimizer.pin("best", 1)
        crash.rename(f"{PINS}/other", f"{PINS}/.best.new")
        crash.sync_dir(PINS)
        backend = Moving(crash)
        with opened(backend, 2) as store:
            backend.due = True
            store.expire()
            assert not backend.due
            is_kept = 1 in steps(store)
        disk = Disk(crash.log)
        for seed in range(40):
            survivor = disk.power_cut(random.Random(seed)).backend()
            assert is_kept or not read_pins(survivor, STORE).names_at(path_of(1))

    def test_one_that_cannot_be_read_now_is_no_reason_to_refuse_for_good(self) -> None:
        """Nothing is known of it, so that it may be read later."""
        backend = FaultBackend(made(2))
        offload.pin(path_of(2), "kept", backend=backend)

        def start_over() -> None:
            small.make_optimizer(small.make_model(), backend, fresh=True)

        backend.fail_if(lambda kind, path: (kind, path) == ("open", f"{PINS}/kept"))
        with pytest.raises(UnreadableError, match="check the drive") as failed:
            start_over()
        assert failed.value.filename == f"{PINS}/kept"
        with pytest.raises(PinError, match="pinned as 'kept', and fresh=True would"):
            start_over()
        backend.close()


class TestChangedBeside:
    """Other programs remove checkpoints beside the process that has the store open."""

    @pytest.mark.parametrize("step", [3, 1], ids=["the newest", "an older one"])
    def test_files_of_the_newest_stay_open_until_they_are_released(self, step: int) -> None:
        """The state of the next step is read from them. Others only take space."""
        backend = made(3, 2)
        with opened(backend, num_drives=2) as store:
            slot = store.slot_of(store.find(step))
            remove_tree(backend, path_of(step))
            with pytest.warns(RuntimeWarning, match="was removed"):
                store.refresh()
            assert is_open(slot) == (step == 3)
            if step == 3:
                store.release(slot)
                assert not is_open(slot)
            assert f"{STORE}/step-{step:08d}" not in store.leftovers()[0]
            (part,) = acquire(store).parts
            assert part.path == slot.parts[0].path, "it is free then"


class TestMarks:
    @pytest.mark.parametrize("damaged", [True, False])
    def test_no_writer_takes_one_while_it_is_marked_or_its_mark_is_lifted(
        self, damaged: bool
    ) -> None:
        """Also if it is held by no lock, as the checkpoint that a seal returns is not."""

        class Asks(WrapperBackend):
            """Notes whether a reader holds the checkpoint whenever a mark is made or removed."""

            answers: list[bool] = []  # noqa: RUF012  (of one test)

            def create(self, path: str, size_bytes: int) -> File:
                self._changing(path)
                return super().create(path, size_bytes)

            def remove(self, path: str) -> None:
                self._changing(path)
                super().remove(path)

            def _changing(self, path: str) -> None:
                if path.endswith("/damaged.txt"):
                    try:
                        self.inner.lock(path_of(1)).release()
                    except LockHeldError:
                        self.answers.append(True)
                    else:
                        self.answers.append(False)

        backend = Asks(MemoryBackend())
        backend.answers = []
        with small.make_optimizer(small.make_model(), backend) as optimizer:
            small.step(optimizer)
            unlocked = optimizer.checkpoint().result()
        if damaged:
            flip(backend, f"{path_of(1)}/exp_avg.safetensors")
        else:
            mark(backend.inner, 1)
        assert bool(verify_and_mark(unlocked).quarantined) == damaged
        assert backend.answers == [True]

    def test_the_part_of_an_owner_has_one_of_its_own(self) -> None:
        backend = MemoryBackend()
        with Job([backend, backend], directories=[ONE, ONE]) as job:
            path = job.seal(1).path
        (part,) = part_paths(backend, ONE)
        for expected in ([f"{part}/damaged.txt"], []):
            flip(backend, f"{part}/exp_avg.safetensors")
            with open_checkpoint(path, backend=backend, even_quarantined=True) as found:
                assert bool(verify_and_mark(found).quarantined) == bool(expected)
            assert [p for p in everything(backend) if p.endswith("/damaged.txt")] == expected

    def test_a_copy_lifts_none_in_the_original(self) -> None:
        """A directory that only the manifest names may be that of the store it was copied from."""
        backend = MemoryBackend()
        with Job([backend, backend]) as job:
            path = job.seal(1).path
        (part,) = part_paths(backend)
        write(backend, f"{part}/damaged.txt", b"read twice\n")
        for given in (None, [TWO]):
            how = {"backend": backend, "even_quarantined": True, "parts": given}
            with open_checkpoint(path, **how) as found:
                assert bool(verify_and_mark(found).quarantined) == (given is None)
            assert (backend.stat(f"{part}/damaged.txt") is None) == (given is not None)


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
        backend = made(4)
        flip(backend, f"{path_of(2)}/exp_avg.safetensors")
        for step in marked:
            mark(backend, step)
        for step in torn:
            overwrite(backend, f"{path_of(step)}/manifest.json", b"no manifest")
        with open_checkpoint(path_of(2), backend=backend) as found:
            if is_marked:
                assert verify_before_resume(found).quarantined
            else:
                with pytest.raises(DamagedError, match="two in a row"):
                    verify_before_resume(found)
        assert (backend.stat(mark_of(2)) is not None) == is_marked

    @pytest.mark.parametrize(
        ("kind", "path", "error"),
        [
            ("stat", mark_of(2), DamagedError),  # it may be marked, and newer
            ("list_dir", STORE, UnreadableError),
        ],
    )
    def test_what_cannot_be_read_now_is_no_reason_to_mark(
        self, kind: str, path: str, error: type[Exception]
    ) -> None:
        backend = FaultBackend(made(2))
        flip(backend.inner, f"{path_of(1)}/exp_avg.safetensors")
        with open_checkpoint(path_of(1), backend=backend) as found:
            backend.fail_if(lambda what, where: (what, where) == (kind, path))
            with pytest.raises(error):
                verify_before_resume(found)
            assert backend.stat(mark_of(1)) is None
            assert verify_before_resume(found).quarantined
        backend.close()

    def test_one_that_can_be_read_in_parts_only_is_not_said_to_be_damaged(self) -> None:
        """Of two in a row, the second may be damaged because it could not be read now."""
        backend = FaultBackend(made(2))
        mark(backend.inner, 2)
        flip(backend.inner, f"{path_of(1)}/exp_avg.safetensors")
        with open_checkpoint(path_of(1), backend=backend) as found:
            backend.fail_if(lambda kind, path: kind == "read" and "master" in path)
            report = verify_before_resume(found)
            assert report.problems
            assert report.unreadable
            assert not report.quarantined
            with pytest.raises(DamagedError, match="two in a row"):
                verify_before_resume(found)
            assert backend.stat(mark_of(1)) is None
        backend.close()
