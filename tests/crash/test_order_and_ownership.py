"""Files and slots after a failed call: what is closed while the error lives, and what goes on.

An error that somebody keeps has a traceback, which refers to all that the failed calls had. So a
file that is only closed when nobody refers to it stays open as long as the error, and keeps the
space of what has been removed.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gds import Backend, MemoryBackend, PosixBackend, StorageError
from gds.contract import File
from offload.errors import StoreBusyError, StoreError
from offload.format.boxes import Box
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.model_shard import ModelShard
from offload.format.slot_files import slot_sizes
from offload.format.train_state import encode
from offload.retention.policy import LastK
from offload.store.poison import Poison
from offload.store.sealing import Prepared
from offload.store.slots.free import FreeSlots, ReaderWait
from offload.store.slots.part import adopt_part, create_part, open_part
from offload.store.slots.part_pool import PartPool
from offload.store.slots.slot import adopt_slot, create_slot
from offload.store.store import Store
from tests.crash.fault_backend import FaultBackend, Kind
from tests.crash.opened import SECOND, made, opened
from tests.crash.test_free_parts import manifest_of
from tests.stores.small import STORE

DRIVES = [SECOND, "/third/run", "/fourth/run"]
STORE_ID = "0123456789abcdef" * 2
PARAMETER = ParameterSpec("a", "BF16", (90, 100), 0, ("master", "exp_avg"))
MODEL = (ModelTensor("a", "BF16", (90, 100)),)


class _Files(FaultBackend):
    """Fails where it is told to, and knows which of its files are open."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend(directories=[STORE, *DRIVES]))
        self.made: list[_Counted] = []

    def wrap_file(self, file: File) -> File:
        """Return a file that is counted."""
        self.made.append(_Counted(file))
        return super().wrap_file(file)

    @property
    def open_paths(self) -> list[str]:
        """Paths of the files that nobody has closed."""
        return [one.file.path for one in self.made if not one.is_closed]


class _Counted:
    """A file, and whether it has been closed."""

    def __init__(self, file: File) -> None:
        self.file = file

    @property
    def is_closed(self) -> bool:
        try:
            self.file.read_bytes(0, 0)
        except StorageError:
            return True
        return False


def layout_on(num_drives: int) -> Layout:
    return Layout((PARAMETER,), MODEL, 1024, shares=(1,) * num_drives)


ALONE = layout_on(1)
ON_TWO = layout_on(2)
ON_THREE = layout_on(3)


def sizes_of(layout: Layout) -> dict[str, int]:
    return slot_sizes(layout, 1, train_state_bytes=4096)


def writer(backend: Backend) -> Store:
    """Open a store on one drive that keeps one checkpoint."""
    return Store(backend, STORE, keep=LastK(1), train_state_bytes=8192, allow_volatile=True)


def pool_on(backend: Backend, num_further: int) -> PartPool:
    """Return the parts of a store with some further drives."""
    drives = [(backend, directory) for directory in DRIVES[:num_further]]
    return PartPool(drives, STORE_ID, [], {}, Poison(STORE))


def left_over(backend: _Files, layout: Layout, *numbers: int) -> None:
    """Make parts that nobody uses, on all further drives of a layout."""
    for number in numbers:
        for drive, directory in enumerate(DRIVES[: len(layout.shares) - 1], 1):
            create_part(backend, directory, f"part-{number}", layout, drive).close()
    assert backend.open_paths == []


class TestPartsAfterAnError:
    def test_no_part_of_a_checkpoint_is_open_if_one_of_them_cannot_be_opened(self) -> None:
        backend, layout = _Files(), layout_on(4)
        left_over(backend, layout, 1)
        pool = pool_on(backend, 3)
        backend.fail_if(lambda kind, path: kind == "open" and path.startswith(DRIVES[2]))
        with pytest.raises(StorageError, match="injected failure of open") as raised:
            pool.open(replace(manifest_of(1, 1, 1), layout=layout), writable=True)
        assert backend.open_paths == [], raised.value
        assert len(backend.made) > len(layout.shares)

    def test_a_reused_part_is_closed_if_the_next_one_cannot_be_made(self) -> None:
        backend = _Files()
        create_part(backend, DRIVES[0], "part-1", ON_THREE, 1).close()  # none on the other drive
        pool = pool_on(backend, 2)
        backend.fail_if(lambda kind, path: kind == "create" and path.startswith(DRIVES[1]))
        with pytest.raises(StorageError, match="for part of a slot") as raised:
            pool.take(ON_THREE)
        assert backend.open_paths == [], raised.value
        assert backend.list_dir(DRIVES[0]) == ["part-1"]

    def test_parts_are_closed_if_the_slot_that_was_to_have_them_cannot_be_adopted(self) -> None:
        backend = _Files()
        left_over(backend, ON_THREE, 1)
        slot = f"{STORE}/.slot-1"
        create_slot(backend, slot, ON_THREE, sizes_of(ON_THREE)).close()
        free = FreeSlots(backend, STORE, [slot], pool_on(backend, 2), Poison(STORE))
        backend.fail_if(lambda kind, path: kind == "open" and path.startswith(slot))
        with pytest.raises(StorageError, match="injected failure of open") as raised:
            free.take(ON_THREE, sizes_of(ON_THREE))
        assert backend.open_paths == [], raised.value

    def test_a_part_that_cannot_be_made_is_closed_and_removed(self) -> None:
        backend = _Files()
        backend.fail_if(lambda kind, path: kind == "create" and path.endswith("part.json"))
        with pytest.raises(StorageError, match="injected failure of create") as raised:
            create_part(backend, DRIVES[0], "part-1", ON_TWO, 1)
        assert backend.open_paths == [], raised.value
        assert backend.made != []
        assert backend.list_dir(DRIVES[0]) == []

    def test_a_part_that_cannot_be_removed_is_closed(self) -> None:
        backend = _Files()
        part = create_part(backend, DRIVES[0], "part-1", ON_TWO, 1)
        backend.fail("remove", 1, forever=False)
        with pytest.raises(StorageError, match="injected failure of remove"):
            part.remove()
        assert backend.open_paths == []

    @pytest.mark.parametrize("kind", ["write_bytes", "sync"])
    def test_a_part_that_cannot_be_made_ready_is_closed(self, kind: Kind) -> None:
        backend = _Files()
        left_over(backend, ON_TWO, 1)
        backend.fail(kind, 1, forever=False)
        with pytest.raises(StorageError, match=f"injected failure of {kind}") as raised:
            adopt_part(backend, DRIVES[0], "part-1", ON_TWO, 1)
        assert backend.open_paths == [], raised.value

    def test_a_part_of_which_a_file_cannot_be_opened_is_closed(self) -> None:
        backend = _Files()
        left_over(backend, ON_TWO, 1)
        backend.fail("open", 3, forever=False)
        with pytest.raises(StorageError, match="injected failure of open") as raised:
            open_part(backend, DRIVES[0], "part-1", ON_TWO, 1, writable=False)
        assert backend.open_paths == [], raised.value


class TestRoom:
    def test_the_error_of_a_slot_that_finds_no_space_says_how_much_it_needs(self) -> None:
        backend = _Files()
        free = FreeSlots(backend, STORE, [], pool_on(backend, 0), Poison(STORE))
        backend.fail("create", 2, forever=False)
        with pytest.raises(StorageError, match=r"reserve .* for a slot, with .* free"):
            free.create(ALONE, sizes_of(ALONE))
        assert backend.list_dir(STORE) == []

    def test_a_step_that_waits_for_no_reader_may_have_one_slot_more_at_once(self) -> None:
        assert ReaderWait(STORE, 0.0).is_spare_due
        assert not ReaderWait(STORE, 1.0).is_spare_due

    @pytest.mark.filterwarnings("ignore:.*every expired checkpoint is being read")
    def test_readers_get_a_moment_before_a_step_fails_that_waits_for_no_reader(self) -> None:
        wait = ReaderWait(STORE, 0.0)
        wait.wait()
        with pytest.raises(StoreBusyError, match="still hold every expired checkpoint"):
            wait.wait()


class TestSlotsThatCannotBeRemoved:
    def test_they_keep_no_other_slot_from_being_removed(self) -> None:
        backend = _Files()
        paths = [f"{STORE}/.slot-{number}" for number in (1, 2)]
        for path in paths:
            create_slot(backend, path, ALONE, sizes_of(ALONE)).close()
        free = FreeSlots(backend, STORE, paths, pool_on(backend, 0), Poison(STORE))
        backend.fail_if(lambda kind, path: kind == "remove" and path.startswith(paths[0]))
        with pytest.raises(StorageError, match="injected failure of remove"):
            free.drop(1)
        assert free.paths() == paths[1:]
        free.drop(1)
        assert backend.list_dir(STORE) == [".slot-1"]

    def test_they_do_not_fail_the_next_step(self) -> None:
        """What could not be removed when there was no need for it is left to a later process."""
        backend = _Files()
        slot = f"{STORE}/.slot-1"
        create_slot(backend, slot, ALONE, sizes_of(ALONE)).close()
        poison = Poison(STORE)
        free = FreeSlots(backend, STORE, [slot], pool_on(backend, 0), poison)
        backend.fail_if(lambda kind, path: kind == "remove" and path.endswith("manifest.json"))
        with pytest.raises(StorageError, match="injected failure of remove"):
            free.drop(1)
        backend.fail("remove", 1, forever=True)
        assert free.take(ALONE, sizes_of(ALONE)) is None
        assert not poison


SHARDED = Layout((PARAMETER,), MODEL, 1024, shard=ModelShard(0, (("a", Box((0, 0), (45, 100))),)))


class TestFolderOfAShard:
    def test_a_slot_whose_folder_is_a_link_is_given_up(self, tmp_path: Path) -> None:
        """A user has moved it to a larger drive, and what is there now is the user's."""
        with PosixBackend() as backend:
            slot = tmp_path / ".slot-1"
            create_slot(backend, str(slot), SHARDED, sizes_of(SHARDED)).close()
            (slot / "model").rename(tmp_path / "moved")
            (slot / "model").symlink_to(tmp_path / "moved")
            assert adopt_slot(backend, str(slot), SHARDED, sizes_of(SHARDED)) is None
            assert (slot / "model").is_symlink()


class TestWhatCannotBeRemoved:
    """What stays because of an error keeps nothing else on the drives."""

    def test_a_free_part_keeps_no_superfluous_slot(self) -> None:
        backend = FaultBackend(made(3, 2))
        backend.make_dir(f"{SECOND}/part-9")
        with opened(backend, 1, 2) as store:
            for step in (1, 2):
                assert store.withdrawal.withdraw(store.step(step))
            before = store.on_drive
            backend.fail_if(lambda kind, path: kind == "remove" and path.endswith("part-9"))
            with pytest.raises(StorageError, match="injected failure of remove"):
                store.withdrawal.drop_spare_slots()
            assert len(store.free) == 1
            assert len(store.on_drive) == len(before) - 1

    def test_a_directory_named_like_an_unfinished_pin_keeps_no_slot(self) -> None:
        backend = made(2)
        backend.make_dir(f"{STORE}/pins")
        backend.make_dir(f"{STORE}/pins/.mine.new")
        with closing(writer(backend)) as store:
            with pytest.raises(StorageError, match=r"\.mine\.new"):
                store.prune()
            names = backend.list_dir(STORE)
        assert "step-00000002" in names
        assert [name for name in names if name.startswith((".slot-", "step-"))] == ["step-00000002"]


class TestPublication:
    """A seal between the moment at which all is durable and its end."""

    @staticmethod
    def prepared(store: Store, step: int) -> Prepared:
        """Announce a seal of a new slot, and make all of the slot durable."""
        slot = store.acquire(ALONE, 1)
        for digests in slot.digests.values():
            digests[:] = ["0" * 16] * ALONE.num_chunks
        composition = store.sealing.compose(
            slot,
            encode({"step": step}),
            step=step,
            torch_version="2.13.0",
            optimizer="torch.optim.adamw.AdamW",
            groups=[{"lr": 0.1}],
            scalars=(None,),
            order=None,
        )
        store.sealing.begin(composition.manifest)
        return store.sealing.prepare(slot, composition, composition.manifest.model_digests)

    def test_what_is_published_is_no_seal_in_flight(self) -> None:
        """So a step need not wait until all ranks have been told of the checkpoint."""
        with closing(writer(MemoryBackend())) as store:
            store.sealing.publish(self.prepared(store, 1))
            assert store.sealing.incoming is None
            assert store.acquire(ALONE, 1).path != f"{STORE}/step-00000001"

    def test_a_store_that_was_moved_is_what_the_error_tells_of(self) -> None:
        """To call `checkpoint` again, as after a change of the slot alone, would be of no use."""
        backend = MemoryBackend()
        with closing(writer(backend)) as store:
            prepared = self.prepared(store, 1)
            backend.rename(STORE, f"{STORE}-moved")
            with pytest.raises(StoreError, match="not the directory that was opened"):
                store.sealing.publish(prepared)
            names = backend.list_dir(f"{STORE}-moved")
        assert "step-00000001" not in names
