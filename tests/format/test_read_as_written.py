"""What readers say of documents and directories that are wrong, and what a seal leaves alone."""

from __future__ import annotations

import errno
import gc
import json
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gds import Buffer, File, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import Stat
from offload import open_checkpoint
from offload.checkpoint import Checkpoint
from offload.checkpoint.reading import check_parts, decode_manifest, read_part
from offload.checkpoint.second_read import read_document
from offload.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
    RecycledError,
    UnreadableError,
)
from offload.format import digests, manifest
from offload.format.document import signed
from offload.format.known_leaves import KnownLeaves
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import reserved_bytes
from offload.format.part_file import PART_FILE_BYTES
from offload.model import model_file, model_writing
from offload.model.model_file import digest_model, read_model
from offload.model.model_writing import CloneSource
from offload.store.maintenance.pruning import prune
from tests.attacks import good
from tests.crash import opened
from tests.crash.test_model_and_train_state import (
    BLOCK,
    CONTEXT,
    LEAF,
    Call,
    Late,
    Scene,
    with_flips,
)
from tests.ranks_store import test_three_owners as three_owners
from tests.stores import small
from tests.stores.files import contents, everything, flip, remove_tree, write


def document(backend: MemoryBackend, path: str, data: bytes) -> File:
    write(backend, path, data)
    return backend.open(path)


def refuse(data: bytes) -> None:
    """Refuse a document as a parser does, which says what was behind it."""
    try:
        int(data)
    except ValueError as error:
        raise ManifestError(f"manifest.json: {data.decode()}") from error


class OtherwiseAgain(WrapperFile):
    """A file whose second read has the bytes of another file."""

    def __init__(self, first: File, second: File) -> None:
        super().__init__(first)
        self._second = second

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        return self._second.read_again(into, offset, direct=direct)


class TestDocumentsThatAreWrongTwice:
    def test_the_error_still_says_what_was_behind_it(self) -> None:
        file = document(MemoryBackend(), "/manifest.json", b"wrong")
        with pytest.raises(ManifestError, match=": wrong") as found:
            read_document(file, 5, refuse, ManifestError)
        assert isinstance(found.value.__cause__, ValueError)

    def test_the_error_is_that_of_the_first_read_if_they_differ(self) -> None:
        backend = MemoryBackend()
        first = document(backend, "/manifest.json", b"first")
        file = OtherwiseAgain(first, document(backend, "/other", b"other"))
        with pytest.raises(ManifestError, match=": first"):
            read_document(file, 5, refuse, ManifestError)


class TestDocumentsThatPeopleRead:
    @pytest.mark.parametrize("compact", [False, True])
    def test_only_a_compact_one_has_no_spaces(self, compact: bool) -> None:
        text = signed(1, {"a": [1, 2], "b": "x"}, compact=compact)
        assert (b" " in text) is not compact
        assert json.loads(text)["body"] == {"a": [1, 2], "b": "x"}

    @pytest.mark.parametrize("num_parts", [0, 2])
    def test_a_manifest_whose_parts_are_not_one_for_each_directory_says_how_many_there_are(
        self, num_parts: int
    ) -> None:
        body = good.two_drives()
        body["parts"] = body["parts"] * num_parts
        with pytest.raises(ManifestError, match=f"{num_parts} parts for 2 directories"):
            manifest.decode(good.manifest(body), "manifest.json")


class Unreachable(WrapperBackend):
    """A backend that cannot look at paths below one directory, as if its drive did not answer."""

    def __init__(self, inner: MemoryBackend, directory: str) -> None:
        super().__init__(inner)
        self._directory = directory

    def stat(self, path: str) -> Stat | None:
        if path.startswith(self._directory):
            raise StorageError(errno.EIO, "injected failure of stat", path)
        return super().stat(path)


def test_a_part_that_cannot_be_looked_at_is_unreadable_and_the_advice_is_given() -> None:
    inner = opened.made(1, num_drives=2)
    backend = Unreachable(inner, f"{opened.SECOND}/part-")
    path = f"{small.STORE}/step-00000001"
    sealed = decode_manifest(backend, path)
    assert sealed.parts
    with pytest.raises(UnreadableError, match=f"move {path} out of the store"):
        check_parts(backend, path, sealed, None)


class OneBlockEach(WrapperBackend):
    """A backend whose directories take one block, as those of many file systems do."""

    def stat(self, path: str) -> Stat | None:
        found = super().stat(path)
        if found is None or found.kind != "directory":
            return found
        return replace(found, size_bytes=PART_FILE_BYTES)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_has_the_size_of_a_parts_file_and_is_none_is_named(kind: str) -> None:
    """So is a file of another size."""
    backend = OneBlockEach(MemoryBackend())
    for path in ("/run", "/run/part-1"):
        backend.make_dir(path)
    size_bytes = PART_FILE_BYTES if kind == "directory" else PART_FILE_BYTES + 1
    if kind == "directory":
        backend.make_dir("/run/part-1/part.json")
    else:
        write(backend, "/run/part-1/part.json", bytes(size_bytes))
    expected = f"part.json: a {kind} of {size_bytes} bytes, expected a file of {PART_FILE_BYTES} "
    with pytest.raises(CheckpointError, match=expected):
        read_part(backend, "/run/part-1")


def test_a_leaf_that_is_reported_as_a_whole_is_digested_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A digest takes longer than all else that a report does."""
    digested: list[int] = []
    leaf_digest = digests.leaf_digest

    def noted(leaf: memoryview) -> bytes:
        digested.append(len(leaf))
        return leaf_digest(leaf)

    monkeypatch.setattr(digests, "leaf_digest", noted)
    data = memoryview(bytes(2 * digests.LEAF_BYTES + 100))
    found = digests.ChunkDigests({"master": data})
    for start in range(0, len(data), digests.LEAF_BYTES):
        found.written("master", start, min(start + digests.LEAF_BYTES, len(data)))
    assert found.finish(CONTEXT, 0, digests.one_by_one)
    assert digested == [digests.LEAF_BYTES, digests.LEAF_BYTES, 100]


def test_an_abandoned_checkpoint_that_a_warning_keeps_has_no_lock_any_more() -> None:
    """Whoever reads it learns that it has been recycled, and takes nothing for damage."""
    backend = small.memory_store(2)
    path = f"{small.STORE}/step-00000001"
    found: Checkpoint | None = open_checkpoint(path, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = None
        gc.collect()
    (kept,) = [one.source for one in caught if one.category is ResourceWarning]
    assert isinstance(kept, Checkpoint)
    remove_tree(backend, path)
    with pytest.raises(RecycledError):
        kept.verify()
    with pytest.raises(RecycledError):
        _ = kept.train_state
    kept.close()
    assert found is None


class TestVerifyingBeforePruning:
    @pytest.mark.parametrize("step", [1, 2])
    def test_damage_in_any_kept_checkpoint_prevents_it(self, step: int) -> None:
        backend = small.memory_store(2)
        flip(backend, f"{small.STORE}/step-{step:08d}/model.safetensors")
        before = everything(backend)
        with pytest.raises(DamagedError, match=f"step-{step:08d}: damaged"):
            prune(small.STORE, verify=True, backend=backend)
        assert everything(backend) == before

    def test_parts_are_read_where_the_caller_says_that_they_are(self) -> None:
        """Their directory has another path by now than the one at which they were sealed."""
        backend = opened.made(2, num_drives=2)
        backend.rename(opened.SECOND, "/moved")
        report = prune(small.STORE, verify=True, parts=["/moved"], backend=backend)
        assert (report.verified, report.checkpoints) == (True, ())
        (part, *_) = [name for name in backend.list_dir("/moved") if name.startswith("part-")]
        flip(backend, f"/moved/{part}/exp_avg.safetensors")
        with pytest.raises(DamagedError, match=f"/moved/{part}/exp_avg.safetensors"):
            prune(small.STORE, verify=True, parts=["/moved"], backend=backend)


class TestStoresWithoutCheckpoints:
    """A directory with a ``LOCK`` is a store: nobody needs to look for others below it."""

    @pytest.mark.parametrize("path", ["/run", "/step-00000002"])
    def test_one_is_told_that_it_has_no_checkpoint_and_nothing_else(self, path: str) -> None:
        backend = MemoryBackend()
        backend.make_dir(path)
        write(backend, f"{path}/LOCK", b"")
        with pytest.raises(CheckpointError) as found:
            open_checkpoint(path, backend=backend)
        assert str(found.value).endswith("no usable checkpoint here: it has no step-<N> directory")


def test_what_cannot_be_newer_than_the_newest_checkpoint_needs_no_warning() -> None:
    """Another store's checkpoint of the same generation, of which something is missing."""
    other = MemoryBackend()
    with small.make_optimizer(small.make_model(), other) as optimizer:
        small.train(optimizer, 2, seal_at=[2])
    backend, foreign = small.memory_store(1), f"{small.STORE}/step-00000002"
    backend.make_dir(foreign)
    for name, data in contents(other, foreign).items():
        if name != "train_state.safetensors":
            write(backend, f"{foreign}/{name}", data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with open_checkpoint(small.STORE, backend=backend) as found:
            assert (found.step, found.generation) == (1, 1)
    with open_checkpoint(foreign, backend=other) as found:
        assert found.generation == 1


def test_the_files_of_a_checkpoint_are_those_that_it_was_sealed_with() -> None:
    """A file that somebody has put into the part of an owner is none of them."""
    backend = three_owners.made()
    with open_checkpoint(three_owners.NEWEST, backend=backend) as found:
        expected = found.files
    for part in three_owners.parts_of(backend):
        write(backend, f"{part}/model.safetensors", b"a stray file")
    with open_checkpoint(three_owners.NEWEST, backend=backend) as found:
        assert found.files == expected


def test_the_names_of_the_state_arrays_of_usual_optimizers_take_no_room_of_their_own() -> None:
    """What is reserved for each parameter has room for them."""
    model = tuple(ModelTensor(f"w{n}", "F32", (8,)) for n in range(3000))

    def room(arrays: tuple[str, ...]) -> int:
        specs = tuple(ParameterSpec(tensor.name, "F32", (8,), 0, arrays) for tensor in model)
        return reserved_bytes(Layout(specs, model, 1 << 20), 1)

    assert room(("exp_avg", "exp_avg_sq", "max_exp_avg_sq")) == room(("a", "b", "c"))


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks and leaves be as small as a scene's."""
    for module in (manifest, model_file):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK)
    for module in (digests, model_writing):
        monkeypatch.setattr(module, "LEAF_BYTES", LEAF)
    monkeypatch.setattr(model_writing, "CLONE_REACH_BYTES", 4096)


def noting_threads(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each block that is copied, whether one thread copies it."""
    found: list[bool] = []
    copy: Callable[..., None] = getattr(scene.image, name)

    def noted(start: int, stop: int, data: torch.Tensor, *, on_one_thread: bool) -> None:
        found.append(on_one_thread)
        copy(start, stop, data, on_one_thread=on_one_thread)

    monkeypatch.setattr(scene.image, name, noted)
    return found


class Weakly(WrapperFile):
    """Knows which transfers that have begun here somebody still holds."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.held: weakref.WeakSet[IOFuture] = weakref.WeakSet()

    def write(self, source: Buffer, offset: int) -> IOFuture:
        future: IOFuture = Late(lambda: self.inner.write(source, offset))
        self.held.add(future)
        return future


class EveryOtherLate(WrapperFile):
    """Reads of every other block have ended at once, the others when they are waited for."""

    def __init__(self, inner: File, origin: int) -> None:
        super().__init__(inner)
        self._origin = origin

    def read(self, into: Buffer, offset: int) -> IOFuture:
        future: IOFuture = Late(lambda: self.inner.read(into, offset))
        if (offset - self._origin) // BLOCK % 2 == 0:
            future.result()
        return future


class NotingWaits(WrapperFile):
    """Notes, whenever a read is waited for, how many reads are under way, this one included."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.num_begun = 0
        self.num_under_way: list[int] = []

    def read(self, into: Buffer, offset: int) -> IOFuture:
        self.num_begun += 1

        def move() -> IOFuture:
            self.num_under_way.append(self.num_begun - len(self.num_under_way))
            return self.inner.read(into, offset)

        future: IOFuture = Late(move)
        return future


@pytest.mark.usefixtures("small_units")
class TestModelFiles:
    def test_leaves_that_are_known_to_differ_are_not_read_back(self) -> None:
        """Whatever else of the file might be read back."""
        scene = Scene(2 * BLOCK)
        old = with_flips(scene.data, [1, 6])
        scene.known.forget(readable=True)
        for block in range(2):
            scene.known.note(block, scene.leaves(block, old))
        file = scene.file(data=old)
        found = scene.write(file)
        assert file.of("write") == [(LEAF, LEAF), (6 * LEAF, LEAF)]
        assert not file.of("again")
        assert (found.written_bytes, found.read_bytes) == (2 * LEAF, 0)
        assert scene.buffers.nbytes == 2 * BLOCK, "no memory is taken to read into"

    def test_a_file_system_that_refuses_a_clone_is_not_asked_for_the_next(self) -> None:
        asked: list[int] = []
        scene = Scene(3 * BLOCK, clones=True)
        leaves = KnownLeaves(readable=True)
        for block in range(3):
            leaves.note(block, scene.leaves(block))
        source = CloneSource(scene.file("/source", scene.data), leaves, scene.trained)

        def refuse_every_clone(call: Call) -> bool:
            asked.append(call.start)
            return True

        file = scene.file(refuses=refuse_every_clone)
        scene.write(file, source=source)
        assert asked == [0]
        assert file.of("write") == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, BLOCK)]

    def test_a_seal_of_any_size_holds_no_more_transfers_than_it_has_buffers(self) -> None:
        scene = Scene(8 * BLOCK)
        file, held = Weakly(scene.file().inner), []
        scene.write(file, copied=lambda _: held.append(len(file.held)))
        assert max(held) == 2, "the third buffer is being copied to"

    def test_tensors_may_change_before_their_copy_is_digested(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step that waits for the copy need not wait for the digest too."""
        events: list[str] = []
        leaf_digests = digests.leaf_digests

        def noted(data: memoryview) -> bytes:
            events.append("digested")
            return leaf_digests(data)

        monkeypatch.setattr(model_writing, "leaf_digests", noted)
        scene = Scene(2 * BLOCK)
        scene.write(scene.file(), copied=lambda stop: events.append(f"copied up to {stop}"))
        assert events == [
            f"copied up to {BLOCK}",
            "digested",
            f"copied up to {2 * BLOCK}",
            "digested",
        ]

    def test_a_seal_that_writes_nothing_copies_on_all_threads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No write holds it up."""
        scene = Scene(4 * BLOCK)
        for block in range(4):
            scene.known.note(block, scene.leaves(block))
        copied = noting_threads(scene, "gather", monkeypatch)
        file = scene.file(data=scene.data)
        assert scene.write(file).written_bytes == 0
        assert copied == [True, False, False, False]

    def test_a_restore_waits_for_a_block_with_the_reads_of_the_next_three_under_way(self) -> None:
        scene = Scene(6 * BLOCK)
        expected = tuple(digest_model(scene.image, scene.buffers, CONTEXT))
        file = scene.file(data=scene.data)
        waiting = NotingWaits(file.inner)
        read_model(scene.image, waiting, scene.buffers, CONTEXT, expected)
        assert waiting.num_under_way == [4, 4, 4, 3, 2, 1]

    def test_a_restore_copies_on_one_thread_while_any_read_is_in_flight(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scene = Scene(5 * BLOCK)
        expected = tuple(digest_model(scene.image, scene.buffers, CONTEXT))
        written = scene.file(data=scene.data)
        before = scene.data
        scene.values.zero_()
        copied = noting_threads(scene, "scatter", monkeypatch)
        file = EveryOtherLate(written.inner, scene.header.data_start)
        read_model(scene.image, file, scene.buffers, CONTEXT, expected)
        assert scene.data == before
        # The last block but one waits for the last one alone, which has ended at once. While the
        # last one is copied, no read is in flight: there is nothing to catch up with.
        assert copied == [True, True, True, False, True]
