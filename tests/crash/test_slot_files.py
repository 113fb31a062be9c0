"""The files of one slot: what each call of `Slot` does to them, in which order, and what it closes.

The slots here have parts on two further drives, and nobody but the test has them open.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace

import pytest

from gds import Backend, StorageError
from gds.contract import File, Stat
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError
from offload.format.digests import DigestContext
from offload.format.known_leaves import KnownLeaves
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import Manifest
from offload.format.names import MANIFEST_NAME, QUARANTINE_NAME, TRAIN_STATE_NAME
from offload.format.slot_files import slot_sizes
from offload.store.arrivals import Arrivals
from offload.store.slots.part import Part, create_part
from offload.store.slots.slot import Slot, SlotState, adopt_slot, create_slot, open_slot
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import everything, overwrite, read, write

ONE, TWO, THREE = "/one", "/two", "/three"
SLOT = f"{ONE}/.slot-1"
SHAPE = (96, 64)
LAYOUT = Layout(
    (ParameterSpec("weight", "BF16", SHAPE, 0, ("master", "exp_avg")),),
    (ModelTensor("weight", "BF16", SHAPE),),
    1024,
    shares=(1, 1, 1),
)
SIZES = slot_sizes(LAYOUT, 1, train_state_bytes=8192)
CONTEXT = DigestContext("0123456789abcdef" * 2, 7)


class _Files(FaultBackend):
    """Logs, fails when it is told to, and knows which of its files are open."""

    def __init__(self) -> None:
        self.logged = CrashBackend()
        super().__init__(self.logged)
        self._made: list[File] = []
        self.symbolic_links: set[str] = set()
        """Paths of files that are links to something of that size, as far as anybody can see."""
        for directory in (ONE, TWO, THREE):
            self.make_dir(directory)

    def wrap_file(self, file: File) -> File:
        self._made.append(file)
        return super().wrap_file(file)

    def stat(self, path: str) -> Stat | None:
        found = super().stat(path)
        if found is not None and path in self.symbolic_links:
            return replace(found, kind="other")
        return found

    @property
    def open_paths(self) -> list[str]:
        return [file.path for file in self._made if is_open(file)]

    def since(self, start: int) -> list[str]:
        """Return what was done since the log had a length, in words."""
        return [f"{op.kind} {op.path}" for op in self.logged.log[start:]]


@pytest.fixture
def backend() -> _Files:
    return _Files()


def is_open(file: File) -> bool:
    try:
        file.read_bytes(0, 1)
    except StorageError as error:
        if error.errno == errno.EBADF:
            return False
        raise
    return True


def parts_of_a_slot(backend: Backend) -> tuple[Part, ...]:
    return tuple(
        create_part(backend, directory, "part-1", LAYOUT, drive)
        for drive, directory in enumerate((TWO, THREE), 1)
    )


def slot_with_parts(backend: Backend) -> Slot:
    slot = create_slot(backend, SLOT, LAYOUT, SIZES)
    slot.add_parts(parts_of_a_slot(backend))
    return slot


def manifest_of(slot: Slot) -> Manifest:
    """Fill in a digest for every chunk, and return the manifest that a seal would write."""
    for digests in slot.digests.values():
        digests[:] = ["f" * 16] * LAYOUT.num_chunks
    return Manifest(
        store_id=CONTEXT.store_id,
        generation=CONTEXT.generation,
        step=3,
        created="2026-01-01T00:00:00+00:00",
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=({"lr": 0.1},),
        layout=LAYOUT,
        scalars=((("step", "f32", 3.0),),),
        digests={name: tuple(digests) for name, digests in slot.digests.items()},
        model_digests=("0" * 16,),
        parts=slot.part_references,
    )


class TestStages:
    def test_from_free_to_a_checkpoint_and_back(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        assert (slot.state, slot.writable) == (SlotState.FREE, True)
        slot.begin_generation(CONTEXT)
        assert slot.state is SlotState.WORKING
        slot.begin_publication()
        assert slot.state is SlotState.IN_DOUBT
        slot.published()
        assert slot.state is SlotState.SEALED
        slot.invalidate()
        assert slot.state is SlotState.FREE

    def test_one_that_is_opened_is_a_checkpoint_with_unchecked_state(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        opened = open_slot(backend, SLOT, LAYOUT, writable=False)
        opened.opened_sealed(manifest_of(slot), None)
        assert (opened.state, opened.unchecked) == (SlotState.SEALED, True)
        assert opened.context == CONTEXT
        assert not opened.writable

    def test_another_generation_begins_with_nothing_of_the_last_one(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        slot.digests["master"][0] = "f" * 16
        slot.distrust()
        slot.arriving(Arrivals([0]))
        slot.begin_generation(DigestContext(CONTEXT.store_id, 8))
        assert not slot.unchecked, "all that is read has been written by this process"
        assert slot.has_arrived(0)
        assert {digest for chunks in slot.digests.values() for digest in chunks} == {None}
        assert slot.context.generation == 8

    def test_chunks_are_waited_for_until_they_have_arrived(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        slot.wait_arrived(0)
        arrivals = Arrivals([1, 1])
        slot.arriving(arrivals)
        slot.wait_arrived(0)
        arrivals.add(1)
        assert [slot.has_arrived(chunk) for chunk in (0, 1)] == [True, False]
        arrivals.fail(ConnectionError("gone"))
        with pytest.raises(ConnectionError, match="gone"):
            slot.wait_arrived(1)


class TestModelFile:
    @pytest.mark.parametrize("same", [True, False], ids=["the same", "another"])
    def test_what_is_known_of_it_is_used_if_it_is_the_same_file(
        self, backend: _Files, same: bool
    ) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        manifest, known = manifest_of(slot), slot.model_leaves
        found = backend.stat(slot.model.path)
        assert found is not None
        assert known.inode == found.inode
        if not same:
            write(backend, slot.model.path, read(backend, slot.model.path))
        opened = open_slot(backend, SLOT, LAYOUT, writable=True)
        opened.opened_sealed(manifest, known)
        assert (opened.model_leaves is known) == same

    def test_of_an_unknown_inode_nothing_is_known(self, backend: _Files) -> None:
        """Two files whose inodes are both unknown are not the same file."""
        hiding = _HidingModel(backend)
        slot = create_slot(hiding, SLOT, LAYOUT, SIZES)
        slot.begin_generation(CONTEXT)
        known = KnownLeaves(readable=True)
        assert slot.model_leaves.inode == known.inode == 0
        manifest = manifest_of(slot)
        opened = open_slot(hiding, SLOT, LAYOUT, writable=True)
        opened.opened_sealed(manifest, known)
        assert opened.model_leaves is not known

    def test_a_new_one_has_nothing_that_may_be_read_back(self, backend: _Files) -> None:
        assert not create_slot(backend, SLOT, LAYOUT, SIZES).model_leaves.readable
        assert open_slot(backend, SLOT, LAYOUT, writable=True).model_leaves.readable


class _HidingModel(FaultBackend):
    """Has a model file that has just been removed by hand, as far as anybody can see."""

    def stat(self, path: str) -> Stat | None:
        return None if path.endswith("model.safetensors") else super().stat(path)


class TestParts:
    def test_chunks_are_in_the_files_of_their_drives(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        assert [part.path for part in slot.parts] == [f"{TWO}/part-1", f"{THREE}/part-1"]
        found = {
            LAYOUT.drives[chunk]: slot.array("master", chunk).path.rpartition("/")[0]
            for chunk in range(LAYOUT.num_chunks)
        }
        assert found == {0: SLOT, 1: f"{TWO}/part-1", 2: f"{THREE}/part-1"}

    def test_all_of_them_are_invalidated_after_the_manifest(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        start = len(backend.logged.log)
        slot.invalidate()
        assert backend.since(start) == [
            f"{kind} {path}"
            for path in (
                f"{SLOT}/{MANIFEST_NAME}", f"{TWO}/part-1/part.json", f"{THREE}/part-1/part.json",
            )
            for kind in ("write", "sync")
        ]  # fmt: skip

    def test_an_invalid_manifest_is_none(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        manifest = manifest_of(slot)
        slot.manifest.write_bytes(manifest.encode(slot.manifest.size_bytes), 0)
        assert decode_manifest(backend, SLOT).generation == CONTEXT.generation
        slot.invalidate()
        with pytest.raises(CheckpointError):
            decode_manifest(backend, SLOT)

    def test_everything_but_the_manifest_is_made_durable(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        start = len(backend.logged.log)
        slot.sync()
        synced = [one.removeprefix("sync ") for one in backend.since(start) if "sync " in one]
        own = {path for path in synced if path.startswith(SLOT)}
        assert own == {f"{SLOT}/{name}" for name in {*SIZES} - {MANIFEST_NAME}}
        assert {f"{TWO}/part-1/part.json", f"{THREE}/part-1/part.json"} < {*synced}


class TestPlace:
    def test_files_are_known_by_the_new_path_of_their_directory(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        new = f"{ONE}/.slot-2"
        backend.rename(SLOT, new)
        slot.renamed(new)
        assert slot.path == new
        own = [slot.manifest, slot.train_state, slot.model, slot.array("exp_avg", 0)]
        assert {file.path.rpartition("/")[0] for file in own} == {new}
        assert slot.is_in_place()

    @pytest.mark.parametrize(
        ("directory", "at_path"),
        [(SLOT, False), (f"{TWO}/part-1", True), (f"{THREE}/part-1", True)],
    )
    def test_a_file_with_the_same_bytes_is_not_the_one_that_is_open(
        self, backend: _Files, directory: str, at_path: bool
    ) -> None:
        slot = slot_with_parts(backend)
        assert (slot.is_in_place(), slot.is_at_path()) == (True, True)
        path = f"{directory}/exp_avg.safetensors"
        write(backend, path, read(backend, path))
        assert (slot.is_in_place(), slot.is_at_path()) == (False, at_path)

    @pytest.mark.parametrize("directory", [SLOT, f"{TWO}/part-1", f"{THREE}/part-1"])
    def test_a_file_may_have_another_name(self, backend: _Files, directory: str) -> None:
        slot = slot_with_parts(backend)
        assert not slot.is_linked()
        backend.logged.link(f"{directory}/exp_avg.safetensors", "/backup")
        assert slot.is_linked()


class TestLock:
    def test_it_is_shared_and_taken_once(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.hold()
        backend.lock(SLOT, shared=True).release()
        with pytest.raises(StorageError, match="held"):
            backend.lock(SLOT)
        slot.hold()
        slot.close()
        backend.lock(SLOT).release()

    def test_a_checkpoint_is_not_held(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        slot.hold()
        slot.begin_publication()
        slot.published()
        backend.lock(SLOT).release()


class TestClosing:
    def test_no_file_stays_open(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        assert len(backend.open_paths) > len(SIZES)
        slot.close()
        assert backend.open_paths == []
        slot.close()

    @pytest.mark.parametrize("nth", range(1, len(SIZES) + 1))
    def test_nor_any_of_a_slot_that_cannot_be_opened(self, backend: _Files, nth: int) -> None:
        create_slot(backend, SLOT, LAYOUT, SIZES).close()
        backend.fail("open", nth, forever=False)
        with pytest.raises(StorageError, match="injected failure of open"):
            open_slot(backend, SLOT, LAYOUT, writable=True)
        assert backend.open_paths == []


class TestReplacing:
    def test_the_new_file_is_durable_before_it_has_the_name(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        old, path = slot.train_state, f"{SLOT}/{TRAIN_STATE_NAME}"
        file = slot.write_replacement(TRAIN_STATE_NAME, b"new".ljust(8192))
        start = len(backend.logged.log)
        slot.replace(TRAIN_STATE_NAME, file)
        assert backend.since(start) == [
            f"sync {path}.new",
            f"rename {path}.new",
            f"sync_dir {SLOT}",
        ]
        assert slot.train_state is file
        assert (is_open(file), is_open(old)) == (True, False)
        assert file.path == path
        assert read(backend, path) == b"new".ljust(8192)
        assert slot.is_in_place()

    def test_one_that_cannot_be_written_is_closed(self, backend: _Files) -> None:
        slot = slot_with_parts(backend)
        before = backend.open_paths
        backend.fail("write_bytes", 1, forever=False)
        with pytest.raises(StorageError, match="injected failure of write_bytes"):
            slot.write_replacement(TRAIN_STATE_NAME, b"new".ljust(8192))
        assert backend.open_paths == before

    @pytest.mark.parametrize("kind", ["sync", "rename", "sync_dir"])
    def test_one_that_does_not_get_the_name_is_closed(self, backend: _Files, kind: str) -> None:
        slot = slot_with_parts(backend)
        before = backend.open_paths
        file = slot.write_replacement(TRAIN_STATE_NAME, b"new".ljust(8192))
        backend.fail(kind, 1, forever=False)
        with pytest.raises(StorageError, match=f"injected failure of {kind}"):
            slot.replace(TRAIN_STATE_NAME, file)
        assert backend.open_paths == before


def lose_a_file(backend: _Files) -> None:
    backend.remove(f"{SLOT}/exp_avg.safetensors")


def mark_as_damaged(backend: _Files) -> None:
    write(backend, f"{SLOT}/{QUARANTINE_NAME}", b"damaged")


def link_a_file(backend: _Files) -> None:
    backend.logged.link(f"{SLOT}/exp_avg.safetensors", "/backup")


def put_a_symbolic_link_there(backend: _Files) -> None:
    backend.symbolic_links.add(f"{SLOT}/exp_avg.safetensors")


def cut_a_file(backend: _Files) -> None:
    write(backend, f"{SLOT}/exp_avg.safetensors", b"short")


class TestAdopting:
    @staticmethod
    def leftover(backend: Backend) -> None:
        """Leave a slot with a manifest that is valid, as after a withdrawal that was cut short."""
        slot = slot_with_parts(backend)
        slot.begin_generation(CONTEXT)
        manifest = manifest_of(slot)
        slot.manifest.write_bytes(manifest.encode(slot.manifest.size_bytes), 0)
        slot.close()
        assert decode_manifest(backend, SLOT) == manifest

    def test_it_is_durably_invalid_before_anything_else_is_written(self, backend: _Files) -> None:
        self.leftover(backend)
        overwrite(backend, f"{SLOT}/exp_avg.safetensors", b"\xff" * 8)
        start = len(backend.logged.log)
        slot = adopt_slot(backend, SLOT, LAYOUT, SIZES)
        assert slot is not None
        log = backend.since(start)
        assert log[:2] == [f"write {SLOT}/{MANIFEST_NAME}", f"sync {SLOT}/{MANIFEST_NAME}"]
        assert f"write {SLOT}/exp_avg.safetensors" in log[2:]
        with pytest.raises(CheckpointError):
            decode_manifest(backend, SLOT)
        assert read(backend, f"{SLOT}/exp_avg.safetensors")[:8] != b"\xff" * 8

    def test_files_of_no_checkpoint_are_removed(self, backend: _Files) -> None:
        self.leftover(backend)
        for name in ("config.json", "tokenizer.json", "vocab.txt"):
            write(backend, f"{SLOT}/{name}", b"of the model")
        assert adopt_slot(backend, SLOT, LAYOUT, SIZES) is not None
        assert {*backend.list_dir(SLOT)} == {*SIZES}

    @pytest.mark.parametrize(
        "change", [lose_a_file, mark_as_damaged, link_a_file, put_a_symbolic_link_there, cut_a_file]
    )
    def test_what_must_not_be_rewritten_is_not_touched(
        self, backend: _Files, change: Callable[[_Files], None]
    ) -> None:
        self.leftover(backend)
        change(backend)
        before = everything(backend)
        assert adopt_slot(backend, SLOT, LAYOUT, SIZES) is None
        assert everything(backend) == before
