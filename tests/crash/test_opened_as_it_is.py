"""A store is opened as it is: what is not needed is not read, written, or taken for its own."""

from __future__ import annotations

import errno
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest

from gds import Backend, File, MemoryBackend, StorageError, WrapperBackend
from offload import RanksError
from offload.errors import BrokenOptimizerError, DamagedError, StoreError
from offload.format.names import STORE_FILE_NAME, TABLE_NAME
from offload.store.directories import check_directories
from offload.store.opening import StoreContent, open_directories
from offload.store.poison import Poison
from offload.store.quarantine import write_quarantine
from offload.store.slots.free import try_lock
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.store.store_id import StoreIdentity, read_identity, write_store_id
from offload.stream.state_check import check_state
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import SECOND, made, opened
from tests.ranks_store import test_restores_by_one_process as by_one
from tests.ranks_store.job import ONE, TWO, Job, part_paths
from tests.ranks_store.test_many_owners import seal_with
from tests.stores import small
from tests.stores.files import everything, flip, read, remove_tree, write
from tests.stores.small import STORE, memory_store

RECORD = f"{STORE}/{STORE_FILE_NAME}"
FOREIGN = "f" * 32
OWNERS = ("owner-1", "owner-8")
MOST_GENERATIONS = 2**53 - 1


@contextmanager
def content_of(backend: Backend, directories: Sequence[str] = (STORE,)) -> Iterator[StoreContent]:
    """Open a store for writing, and let go of its locks in the end."""
    drives = [(backend, directory) for directory in directories]
    content = open_directories(drives, Poison(STORE), allow_volatile=True)
    try:
        yield content
    finally:
        content.lock.release()


class _Watched(WrapperBackend):
    """The files that are opened or made, and their paths; one belongs to another user."""

    def __init__(self, inner: Backend, protected: str = "") -> None:
        super().__init__(inner)
        self.protected = protected
        self.opened: list[str] = []
        self.files: list[File] = []

    def wrap_file(self, file: File) -> File:
        self.files.append(file)
        return file

    def open(self, path: str, *, writable: bool = False) -> File:
        if writable and path == self.protected:
            raise StorageError(errno.EACCES, "open", path)
        self.opened.append(path)
        return super().open(path, writable=writable)


class TestIdentity:
    """The file that says which store it is, before a checkpoint does."""

    @pytest.mark.parametrize("num_checkpoints", [0, 1])
    def test_a_store_of_one_directory_does_not_write_to_that_of_a_store_of_several(
        self, num_checkpoints: int
    ) -> None:
        """It may be of another user, and nobody needs it here."""
        backend = MemoryBackend(directories=[STORE])
        if num_checkpoints:
            backend = memory_store(num_checkpoints)
        write_store_id(backend, STORE, StoreIdentity(FOREIGN), Poison(STORE))
        with content_of(_Watched(backend, RECORD)) as content:
            assert len(content.checkpoints) == num_checkpoints
            assert content.is_identified

    def test_a_generation_that_another_store_has_recorded_says_nothing(self) -> None:
        """If it counted, no generation would be left for the checkpoints of this store."""
        backend = made(1, num_drives=2)
        write_store_id(backend, STORE, StoreIdentity(FOREIGN, MOST_GENERATIONS), Poison(STORE))
        with content_of(backend, [STORE, SECOND]) as content:
            assert content.store_id == content.checkpoints[0].manifest.store_id
            assert content.taken_over == 0

    def test_it_has_no_generation_unless_a_checkpoint_was_about_to_arrive(self) -> None:
        backend = made(1, num_drives=2)
        found = read_identity(backend, STORE, durable=False)
        assert found is not None
        assert json.loads(read(backend, RECORD)) == {"format": 1, "store_id": found.store_id}


class TestOwnersOnly:
    """A directory with parts of ranks, without the first directory of their store."""

    def test_the_owners_are_named_by_rising_number(self) -> None:
        backend = MemoryBackend()
        seal_with(backend, STORE, 9)
        for name in backend.list_dir(STORE):
            if name.startswith(("step-", ".slot-", "owner-")) and name not in OWNERS:
                remove_tree(backend, f"{STORE}/{name}")
        backend.remove(RECORD)
        with pytest.raises(StoreError, match=rf"\({', '.join(OWNERS)}\)"):
            check_directories([(backend, STORE)], fresh=False)


@pytest.mark.parametrize("is_last", [False, True], ids=["named before", "named after"])
def test_an_old_copy_of_an_owners_parts_does_not_hide_those_of_the_newest_checkpoint(
    is_last: bool,
) -> None:
    """The parts have the same names in both directories, and one process opens all of them."""
    backend, copy = MemoryBackend(directories=["/copy"]), "/copy/run"
    with Job([backend, backend]) as job:
        job.seal(1)
    for directory in (copy, f"{copy}/owner-1"):
        backend.make_dir(directory)
    for path, data in everything(backend, f"{TWO}/owner-1").items():
        target = path.replace(TWO, copy)
        if data is None:
            backend.make_dir(target)
        else:
            write(backend, target, data)
    with Job([backend, backend]) as job:
        job.seal(2)
        job.seal(3)
    assert {*part_paths(backend, copy)} & {p.replace(TWO, copy) for p in part_paths(backend, TWO)}
    with content_of(backend, [ONE, *([TWO, copy] if is_last else [copy, TWO])]) as content:
        assert max(one.manifest.step for one in content.checkpoints) == 3


class TestMark:
    """The mark of a damaged checkpoint."""

    @pytest.mark.parametrize("fails", [False, True])
    def test_its_file_is_closed_whether_it_could_be_written_or_not(self, fails: bool) -> None:
        backend = _Watched(memory_store(1))
        failing = FaultBackend(backend)
        path = f"{STORE}/step-00000001"
        failing.fail_if(lambda kind, _: fails and kind == "sync")
        with pytest.raises(StorageError) if fails else nullcontext():
            write_quarantine(failing, path, "damaged", Poison(STORE))
        (file,) = backend.files
        with pytest.raises(StorageError, match="closed"):
            file.read_bytes(0, 1)


class TestNotRead:
    """Files that say nothing about a checkpoint do not keep anybody from opening it."""

    def test_parts_of_owners_that_no_checkpoint_names(self) -> None:
        """One process has gone on with a store that ranks had made."""
        backend = memory_store(1)
        part = f"{STORE}/owner-1/part-1"
        for directory in (f"{STORE}/owner-1", part):
            backend.make_dir(directory)
        write(backend, f"{part}/{TABLE_NAME}", b"left")
        failing = FaultBackend(backend)
        failing.fail_if(lambda kind, path: kind == "open" and path.startswith(part))
        with content_of(failing) as content:
            assert [checkpoint.manifest.step for checkpoint in content.checkpoints] == [1]
            assert content.refused == []

    @pytest.mark.parametrize("num_drives", [1, 2])
    def test_checkpoints_that_are_as_they_were_when_the_store_was_opened(
        self, num_drives: int
    ) -> None:
        backend = _Watched(made(3, num_drives))
        with opened(backend, 3, num_drives) as store:
            backend.opened.clear()
            store.census.update()
            assert store.steps == [1, 2, 3]
            assert backend.opened == []


class TestOpenFiles:
    """Files of a checkpoint that this process keeps open."""

    def test_an_interrupt_as_they_are_opened_leaves_none_whose_digests_are_unknown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their state would be trained on without being compared with anything."""

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with opened(memory_store(1), 1) as store:
            with monkeypatch.context() as patch:
                patch.setattr(Slot, "opened_sealed", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    store.open(1)
            found = {name: tuple(values) for name, values in store.open(1).digests.items()}
            assert found == store.step(1).manifest.digests


class TestRestore:
    """A restore beside what has gone wrong before it."""

    def test_it_is_not_logged_that_it_fell_back_if_its_warning_ended_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "offload")
        backend = memory_store(2)
        flip(backend, f"{STORE}/step-00000002/model.safetensors")
        with small.make_optimizer(small.make_model(), backend) as optimizer:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(RuntimeWarning, match="continuing from the one before it"):
                    optimizer.restore()
            assert "fell back" not in caplog.text

    def test_a_check_of_all_state_trusts_nothing_that_was_checked_before(self) -> None:
        backend = memory_store(1)
        with small.make_optimizer(small.make_model(), backend) as optimizer:
            found = optimizer.restore(verify=True)
            assert found is not None
            state = optimizer._engine.state
            assert state.store.newest is not None
            slot = state.store.slot_of(state.store.newest)
            flip(backend, f"{found.path}/exp_avg.safetensors")
            state.memory.reset()  # what is in memory is not what is on the drive
            with pytest.raises(DamagedError, match=r"exp_avg\.safetensors"):
                check_state(state.ring(), slot, state.chunks(), state.meter)

    def test_a_step_that_failed_is_named_although_a_transfer_was_its_cause(self) -> None:
        backend = FaultBackend(MemoryBackend())
        with small.make_optimizer(small.make_model(), backend) as optimizer:
            small.train(optimizer, 2)
            backend.fail("write", 1, forever=False)
            with pytest.raises(StorageError, match="injected failure of write"):
                small.step(optimizer)
            with pytest.raises(BrokenOptimizerError, match=r"^step 3 failed half way .*injected"):
                small.step(optimizer)

    def test_ranks_that_have_gone_leave_no_part_of_a_checkpoint_locked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = MemoryBackend()
        by_one.made(backend)
        (part,) = part_paths(backend, ONE)

        def fetch(*_: object) -> None:
            """Send train states to ranks that do not answer."""
            raise RanksError("rank 1 has gone")

        with by_one.opened(backend, by_one.Net()) as optimizer:
            monkeypatch.setattr(Store, "fetch", fetch)
            with pytest.raises(RanksError, match="rank 1 has gone"):
                optimizer.restore()
            lock = try_lock(backend, part)
            assert lock is not None
            lock.release()
            monkeypatch.undo()
            found = optimizer.restore()
            assert found is not None
            assert found.step == 1
