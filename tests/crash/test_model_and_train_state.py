"""The files of a checkpoint beside its state arrays: how they are written, read and read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from gds import Buffer, File, IOFuture, MemoryBackend, PosixBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.checkpoint import train_state_reading
from offload.checkpoint.second_read import read_document, reread_and_check
from offload.checkpoint.train_state_reading import read_train_state_file, train_state_header
from offload.device.staging import Traffic
from offload.errors import DamagedError, MismatchError, UnreadableError
from offload.format import digests, manifest
from offload.format.digests import DigestContext, leaf_digests
from offload.format.header import Header, build_header
from offload.format.known_leaves import KnownLeaves
from offload.format.train_state import encode, pack
from offload.model import model_file, model_writing
from offload.model.model_file import BlockBuffers, ModelImage, digest_model, read_model
from offload.model.model_writing import CloneSource, TensorRanges, Written, write_model
from tests.attacks import good
from tests.crash.fault_backend import FaultBackend
from tests.crash.flipping import FlippingBackend
from tests.crash.late import Late
from tests.ranks_store.job import SHAPES
from tests.ranks_store.test_owner_readers import made
from tests.stores import small

LEAF = 8192
BLOCK = 4 * LEAF
CONTEXT = DigestContext(good.STORE_ID, 9)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, model_file):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK)
    for module in (digests, model_writing):
        monkeypatch.setattr(module, "LEAF_BYTES", LEAF)
    monkeypatch.setattr(model_writing, "CLONE_REACH_BYTES", 4096)


@dataclass(frozen=True)
class Call:
    """A transfer, or a read through the page cache."""

    kind: str
    start: int
    """In bytes from the start of the data."""

    nbytes: int
    direct: bool | None = None


def nothing(_: Call) -> bool:
    return False


def ended(transfer: Late) -> None:
    """Wait for a transfer, whatever comes of it."""
    with suppress(StorageError):
        transfer.result()


class Noted(WrapperFile):
    """Notes what is moved. Chosen transfers fail, and chosen clones are refused."""

    def __init__(
        self,
        inner: File,
        origin: int = 0,
        *,
        late: bool = False,
        fails: Callable[[Call], bool] = nothing,
        refuses: Callable[[Call], bool] = nothing,
    ) -> None:
        """Wrap a file.

        Args:
            inner: Has the bytes.
            origin: Start of the data in the file.
            late: Whether transfers begin when they are waited for, and not at once.
            fails: Says of each transfer whether it fails.
            refuses: Says of each clone whether it is refused.
        """
        super().__init__(inner)
        self._origin, self._late, self._fails, self._refuses = origin, late, fails, refuses
        self.calls: list[Call] = []
        self.started: list[Late] = []

    def of(self, kind: str) -> list[tuple[int, int]]:
        """Return start and length of the calls of a kind."""
        return [(call.start, call.nbytes) for call in self.calls if call.kind == kind]

    def _start(self, call: Call, transfer: Callable[[], IOFuture]) -> IOFuture:
        self.calls.append(call)
        fails = self._fails(call)

        def begin() -> IOFuture:
            if fails:
                raise StorageError(5, f"injected failure of {call.kind}", self.path)
            return transfer()

        future = Late(begin)
        self.started.append(future)
        if not self._late:
            ended(future)
        return future

    def read(self, into: Buffer, offset: int) -> IOFuture:
        call = Call("read", offset - self._origin, into.nbytes)
        return self._start(call, lambda: self.inner.read(into, offset))

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        call = Call("again", offset - self._origin, into.nbytes, direct)
        return self._start(call, lambda: self.inner.read_again(into, offset, direct=direct))

    def write(self, source: Buffer, offset: int) -> IOFuture:
        call = Call("write", offset - self._origin, source.nbytes)
        return self._start(call, lambda: self.inner.write(source, offset))

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        self.calls.append(Call("read_bytes", offset - self._origin, nbytes))
        return super().read_bytes(offset, nbytes)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        call = Call("clone", offset - self._origin, nbytes)
        if self._refuses(call):
            return False
        self.calls.append(call)
        return super().clone(source, offset, nbytes)


class Scene:
    """A model file of three tensors: the second one is trained, and the others are frozen."""

    def __init__(self, nbytes: int, trained: tuple[int, int] = (0, 0), *, clones: bool = False):
        """Make live tensors of random bytes, and an empty file for them.

        Args:
            nbytes: Size of the data.
            trained: First byte of the trained tensor, and one past its last one.
            clones: Whether files may share space.
        """
        generator = torch.Generator().manual_seed(nbytes)
        self.values = torch.randint(256, (nbytes,), generator=generator).to(torch.uint8)
        first, last = trained
        parts = {
            "before": self.values[:first],
            "trained": self.values[first:last],
            "after": self.values[last:],
        }
        self.header: Header = build_header([(n, "U8", tuple(t.shape)) for n, t in parts.items()])
        self.image = ModelImage(self.header, parts)
        self.backend = MemoryBackend(clones=clones)
        self.buffers = BlockBuffers(self.backend, nbytes)
        self.known = KnownLeaves(readable=False)
        self.trained = TensorRanges(self.header, {"trained"})
        self.changing: TensorRanges | None = self.trained

    @property
    def data(self) -> bytes:
        return bytes(self.values.numpy())

    def leaves(self, block: int, data: bytes | None = None) -> bytes:
        """Return the digests of the leaves of a block of the live tensors, or of other data."""
        whole = self.data if data is None else data
        return leaf_digests(memoryview(whole[block * BLOCK : (block + 1) * BLOCK]))

    def file(self, path: str = "/model", data: bytes | None = None, **how: Any) -> Noted:
        """Create a file, with this data if there is any."""
        file = self.backend.create(path, self.header.file_bytes)
        if data is not None:
            file.write_bytes(data, self.header.data_start)
        return Noted(file, self.header.data_start, **how)

    def write(
        self,
        file: File,
        copied: Callable[[int], None] = lambda _: None,
        source: CloneSource | None = None,
    ) -> Written:
        """Write the model, and check that the file has it."""
        found = write_model(
            self.image, file, self.buffers, CONTEXT, self.known, copied,
            changing=self.changing, source=source,
        )  # fmt: skip
        inner = file.inner if isinstance(file, WrapperFile) else file
        assert inner.read_bytes(self.header.data_start, len(self.data)) == self.data
        return found


def with_flips(data: bytes, leaves: Sequence[int]) -> bytes:
    """Return data that differs in some leaves."""
    changed = bytearray(data)
    for leaf in leaves:
        changed[leaf * LEAF + 5] ^= 1
    return bytes(changed)


class TestRanges:
    def test_they_are_touched_where_a_tensor_has_bytes(self) -> None:
        sizes = {"a": 30, "empty": 0, "b": 20, "c": 5, "d": 17, "e": 9}
        header = build_header([(name, "U8", (size,)) for name, size in sizes.items()])
        names = {"empty", "c", "e"}
        ranges = TensorRanges(header, names)
        total = sum(sizes.values())
        within = [
            name in names for name, entry in header.entries.items() for _ in range(entry.nbytes)
        ]
        for start in range(total):
            for stop in range(start + 1, total + 1):
                assert ranges.touch(start, stop) is any(within[start:stop]), (start, stop)
        assert not TensorRanges(header, ()).touch(0, total)


class TestWriting:
    def test_a_new_file_is_written_as_a_whole(self) -> None:
        scene = Scene(2 * BLOCK + 5000)
        file = scene.file()
        found = scene.write(file)
        assert file.of("write") == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, 5000)]
        assert (found.written_bytes, found.read_bytes, found.cloned_bytes) == (
            len(scene.data),
            0,
            0,
        )
        assert found.digests == digest_model(scene.image, scene.buffers, CONTEXT)
        assert [scene.known.of(block) for block in range(3)] == [scene.leaves(n) for n in range(3)]

    def known_but_for(self, leaves: Sequence[int], **how: Any) -> tuple[Scene, Noted]:
        """Return a file of two blocks that differs from the live tensors in some leaves."""
        scene = Scene(2 * BLOCK)
        old = with_flips(scene.data, leaves)
        for block in range(2):
            scene.known.note(block, scene.leaves(block, old))
        return scene, scene.file(data=old, **how)

    def test_of_a_file_that_is_known_only_the_leaves_that_differ_are_written(self) -> None:
        scene, file = self.known_but_for([1, 3, 6, 7])
        found = scene.write(file)
        assert file.of("write") == [(LEAF, LEAF), (3 * LEAF, LEAF), (6 * LEAF, 2 * LEAF)]
        assert (found.written_bytes, found.read_bytes, found.cloned_bytes) == (4 * LEAF, 0, 0)
        assert not file.of("again")

    @pytest.mark.parametrize("failing", range(4))
    @pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
    def test_the_error_of_any_write_is_raised(self, failing: int, late: bool) -> None:
        where = [1, 3, 4, 6][failing] * LEAF
        scene, file = self.known_but_for(
            [1, 3, 4, 6], late=late, fails=lambda call: call.start == where
        )
        with pytest.raises(StorageError, match="injected failure of write"):
            scene.write(file)
        assert file.started
        assert all(transfer.done() for transfer in file.started)

    def test_what_an_earlier_process_left_is_compared_unless_it_changes(self) -> None:
        """The last leaf of the second block is trained. The second leaf of the first differs."""
        scene = Scene(2 * BLOCK + 100, (7 * LEAF + 10, 8 * LEAF))
        scene.known.forget(readable=True)
        file = scene.file(data=with_flips(scene.data, [1]))
        found = scene.write(file)
        assert file.of("again") == [(0, BLOCK), (BLOCK, 3 * LEAF), (2 * BLOCK, 100)]
        assert all(call.direct for call in file.calls if call.kind == "again")
        assert file.of("write") == [(LEAF, LEAF), (7 * LEAF, LEAF)]
        assert found.read_bytes == 7 * LEAF + 100
        assert found.written_bytes == 2 * LEAF

    def test_what_may_not_be_believed_is_not_read(self) -> None:
        """A write or a sync of it has failed, or it has no content yet."""
        scene = Scene(BLOCK)
        file = scene.file(data=scene.data)
        scene.write(file)
        assert not file.of("again")
        assert file.of("write") == [(0, BLOCK)]

    def test_nothing_is_read_if_it_is_not_said_what_changes(self) -> None:
        scene = Scene(BLOCK)
        scene.known.forget(readable=True)
        scene.changing = None
        file = scene.file(data=scene.data)
        scene.write(file)
        assert not file.of("again")
        assert file.of("write") == [(0, BLOCK)]

    def test_nothing_is_read_and_no_memory_is_taken_where_all_changes(self) -> None:
        scene = Scene(2 * BLOCK, (0, 2 * BLOCK))
        scene.known.forget(readable=True)
        file = scene.file(data=scene.data)
        scene.write(file)
        assert not file.of("again")
        assert scene.buffers.nbytes == 2 * BLOCK
        scene.changing = TensorRanges(scene.header, ())
        scene.known.forget(readable=True)
        scene.write(file)
        assert file.of("again") == [(0, BLOCK), (BLOCK, BLOCK)]
        assert scene.buffers.nbytes == 3 * BLOCK, "the spare block is counted"

    def test_after_an_error_nothing_is_read_into_the_memory_any_more(self) -> None:
        scene = Scene(BLOCK)
        scene.known.forget(readable=True)
        file = scene.file(data=scene.data, late=True)

        def interrupted(_: int) -> None:
            assert not any(transfer.done() for transfer in file.started)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            scene.write(file, interrupted)
        assert file.of("again") == [(0, BLOCK)]
        assert all(transfer.done() for transfer in file.started)


class TestClones:
    """The source has the bytes of the live tensors, and the file is empty."""

    def source_of(
        self, scene: Scene, blocks: Sequence[int], differing: Sequence[int] = ()
    ) -> CloneSource:
        """Return a source of which some blocks are known, and some leaves differ."""
        data = with_flips(scene.data, differing)
        leaves = KnownLeaves(readable=True)
        for block in blocks:
            leaves.note(block, scene.leaves(block, data))
        return CloneSource(scene.file("/source", data), leaves, scene.trained)

    @pytest.mark.parametrize("rest", [4096, 5000], ids=["whole-blocks", "part-of-a-block"])
    def test_the_last_leaf_is_cloned_if_it_ends_with_a_block_of_the_file_system(
        self, rest: int
    ) -> None:
        scene = Scene(BLOCK + LEAF + rest, clones=True)
        file = scene.file()
        found = scene.write(file, source=self.source_of(scene, [0, 1]))
        last = LEAF + rest if rest == 4096 else LEAF
        assert file.of("clone") == [(0, BLOCK), (BLOCK, last)]
        assert found.cloned_bytes == BLOCK + last
        assert found.written_bytes == len(scene.data) - found.cloned_bytes

    def test_a_block_that_is_not_known_of_the_source_is_written(self) -> None:
        scene = Scene(2 * BLOCK, clones=True)
        file = scene.file()
        found = scene.write(file, source=self.source_of(scene, [0]))
        assert file.of("clone") == [(0, BLOCK)]
        assert file.of("write") == [(BLOCK, BLOCK)]
        assert (found.cloned_bytes, found.written_bytes) == (BLOCK, BLOCK)

    def test_leaves_that_differ_are_written_between_those_that_are_cloned(self) -> None:
        scene = Scene(BLOCK, clones=True)
        file = scene.file()
        found = scene.write(file, source=self.source_of(scene, [0], differing=[1]))
        assert file.of("clone") == [(0, LEAF), (2 * LEAF, 2 * LEAF)]
        assert file.of("write") == [(LEAF, LEAF)]
        assert (found.cloned_bytes, found.written_bytes) == (3 * LEAF, LEAF)

    @pytest.mark.parametrize("refused", [0, 2 * LEAF])
    def test_what_is_not_cloned_is_written_whichever_clone_is_refused(self, refused: int) -> None:
        scene = Scene(BLOCK, clones=True)
        file = scene.file(refuses=lambda call: call.start == refused)
        scene.write(file, source=self.source_of(scene, [0], differing=[1]))
        assert file.of("write") == [(0, BLOCK)]


class TestReading:
    def sealed(self, scene: Scene, **how: Any) -> tuple[Noted, tuple[str, ...]]:
        file = scene.file(data=scene.data, **how)
        return file, tuple(digest_model(scene.image, scene.buffers, CONTEXT))

    def test_what_is_known_of_a_file_is_what_was_read_right(self) -> None:
        scene = Scene(2 * BLOCK)
        _, expected = self.sealed(scene)
        flipping = FlippingBackend(scene.backend)
        flipping.flips, flipping.left, flipping.ways = "/model", 1, ("read",)
        known = KnownLeaves(readable=True)
        with flipping.open("/model") as file:
            read_model(scene.image, file, scene.buffers, CONTEXT, expected, known)
        assert flipping.num_flipped["read"] == 1
        assert [known.of(block) for block in range(2)] == [scene.leaves(0), scene.leaves(1)]

    @pytest.mark.parametrize("fails", [False, True], ids=["alone", "and-other-reads-fail"])
    def test_after_damage_nothing_is_read_into_the_memory_any_more(self, fails: bool) -> None:
        scene = Scene(5 * BLOCK)
        _, expected = self.sealed(scene)
        late = scene.file(
            "/damaged",
            with_flips(scene.data, [1]),
            late=True,
            fails=lambda call: fails and call.start > 0,
        )
        with pytest.raises(DamagedError, match="/damaged: bytes 4096 to"):
            read_model(scene.image, late, scene.buffers, CONTEXT, expected)
        assert len(late.of("read")) == 4
        assert all(transfer.done() for transfer in late.started)


class FakeDevice:
    """The boundary of a device, which notes the memory that is locked for it."""

    def __init__(self, locked: list[tuple[str, int]], device: torch.device) -> None:
        self._locked, self._device = locked, device

    def lock_pages(self, memory: torch.Tensor) -> object:
        self._locked.append((str(self._device), memory.data_ptr()))
        return object()


class TestBuffers:
    def test_each_block_is_page_locked_once_for_each_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        locked: list[tuple[str, int]] = []
        monkeypatch.setattr(model_file, "boundary_of", lambda device: FakeDevice(locked, device))
        devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
        buffers = BlockBuffers(MemoryBackend(), 9 * BLOCK)
        assert buffers.page_lock_for(devices) is buffers
        buffers.page_lock_for(devices)
        memory = buffers.for_writing(3)
        assert sorted(locked) == sorted(
            (str(device), block.tensor.data_ptr()) for device in devices for block in memory
        )
        assert [len(block.locks) for block in memory] == [2, 2, 2]

    def test_blocks_have_the_size_that_is_asked_for(self) -> None:
        assert BlockBuffers(MemoryBackend(), 9 * BLOCK, block_bytes=LEAF).nbytes == 2 * LEAF
        assert BlockBuffers(MemoryBackend(), 9 * BLOCK).nbytes == 2 * BLOCK
        assert BlockBuffers(MemoryBackend(), 100).nbytes == 2 * 4096

    def test_they_count_what_crosses_in_the_counter_that_is_given_or_in_their_own(self) -> None:
        traffic = Traffic()
        assert BlockBuffers(MemoryBackend(), 1, traffic).traffic is traffic
        own = BlockBuffers(MemoryBackend(), 1).traffic
        own.fetched(3)
        assert own.to_host_bytes == 3


class TestSecondReads:
    def content(self, *, direct: bool = False) -> Noted:
        class File(Noted):
            @property
            def direct(self) -> bool:
                return direct

        file = MemoryBackend().create("/file", 4096)
        file.write_bytes(b"x" * 4096, 0)
        return File(file)

    @pytest.mark.parametrize("first_direct", [False, True])
    @pytest.mark.parametrize("asked", [None, False, True])
    def test_they_take_the_way_that_is_asked_for_or_the_other_one(
        self, first_direct: bool, asked: bool | None
    ) -> None:
        file = self.content(direct=first_direct)
        again = reread_and_check(
            file, 0, 4096, lambda data: str(bytes(data[:1])), found="?", expected="b'x'",
            direct=asked,
        )  # fmt: skip
        assert bytes(again.memoryview()) == b"x" * 4096
        expected = not first_direct if asked is None else asked
        assert [call.direct for call in file.calls] == [expected]

    def test_that_of_a_document_bypasses_the_page_cache(self) -> None:
        file = self.content()
        asked = []

        def parse(data: bytes) -> bytes:
            asked.append(data)
            raise ValueError("no document")

        with pytest.raises(ValueError, match="no document"):
            read_document(file, 100, parse, ValueError)
        assert [(call.kind, call.direct) for call in file.calls] == [
            ("read_bytes", None),
            ("again", True),
        ]


class NotingBackend(WrapperBackend):
    """Notes what is read of the files that it opens."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.opened: list[Noted] = []

    def wrap_file(self, file: File) -> File:
        self.opened.append(Noted(file))
        return self.opened[-1]


MANIFEST = manifest.decode(good.manifest(), "manifest.json")
TRAIN_STATE = {"epoch": 3}
PATH = "/train_state"


class TestTrainState:
    def packed(self, capacity_bytes: int) -> bytes:
        header = train_state_header(MANIFEST)
        return pack(TRAIN_STATE, capacity_bytes=capacity_bytes, header=header)

    def backend_with(self, data: bytes) -> NotingBackend:
        backend = NotingBackend()
        with backend.inner.create(PATH, len(data)) as file:
            file.write_bytes(data, 0)
        return backend

    @pytest.mark.parametrize("capacity_bytes", [2048, 1 << 16])
    def test_its_first_bytes_are_looked_at_before_it_is_read(self, capacity_bytes: int) -> None:
        backend = self.backend_with(self.packed(capacity_bytes))
        assert read_train_state_file(backend, PATH, MANIFEST) == encode(TRAIN_STATE)
        (file,) = backend.opened
        assert file.of("read_bytes") == [(0, min(capacity_bytes, 4096)), (0, capacity_bytes)]

    @pytest.mark.parametrize("at", [8, 100, 4095])
    def test_one_with_a_hole_in_its_header_is_refused_before_it_is_read(self, at: int) -> None:
        """A sparse file may claim any size, and takes no space on the drive."""
        data = bytearray(self.packed(1 << 16))
        data[at] = 0
        backend = self.backend_with(bytes(data))
        with pytest.raises(DamagedError, match=r"train_state: damaged: zero bytes in its header"):
            read_train_state_file(backend, PATH, MANIFEST)
        (file,) = backend.opened
        assert {call.nbytes for call in file.calls} == {4096}

    def test_one_that_is_larger_than_any_is_refused_unread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = self.backend_with(self.packed(2048))
        monkeypatch.setattr(train_state_reading, "MAX_CAPACITY_BYTES", 2048)
        assert read_train_state_file(backend, PATH, MANIFEST) == encode(TRAIN_STATE)
        monkeypatch.setattr(train_state_reading, "MAX_CAPACITY_BYTES", 2047)
        with pytest.raises(DamagedError, match="2048 bytes, expected at most 2047"):
            read_train_state_file(backend, PATH, MANIFEST)
        assert not backend.opened[-1].calls

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            (b'train_state_format":"1"', b'train_state_format":"2"', "train_state_format is '2'"),
            (b'\\"epoch\\":3', b'\\"epoch\\":4', "the content has the digest"),
            (b'"__metadata__"', b'"__metadatA__"', ""),
        ],
        ids=["another-version", "another-value", "no-header"],
    )
    def test_content_that_was_not_written_is_damage(
        self, old: bytes, new: bytes, reason: str
    ) -> None:
        data = self.packed(2048)
        assert old in data
        backend = self.backend_with(data.replace(old, new))
        with pytest.raises(DamagedError, match=rf"^{PATH}: damaged: .*{reason}"):
            read_train_state_file(backend, PATH, MANIFEST)


def sealed_model(model: torch.nn.Module, backend: MemoryBackend) -> None:
    """Make a checkpoint of a model after one step."""
    with offload.SGD(
        model.parameters(), lr=0.1, directory="/run", model=model, options=small.options(backend)
    ) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.checkpoint().result()


def layers(*names: str, tied: bool = False, wrapped: bool = False) -> torch.nn.ModuleDict:
    """Return square layers without a bias; all of them have the weight of the first if `tied`."""
    found = {name: torch.nn.Linear(4, 4, bias=False) for name in names}
    for layer in found.values():
        if tied:
            layer.weight = found[names[0]].weight
    return torch.nn.ModuleDict(
        {name: checkpoint_wrapper(layer) if wrapped else layer for name, layer in found.items()}
    )


class TestLoading:
    def test_a_tied_tensor_is_found_under_another_of_its_names(self) -> None:
        model, backend = layers("b"), MemoryBackend()
        sealed_model(model, backend)
        loaded = layers("a", "b", tied=True)
        assert offload.load_parameters(loaded, "/run", backend=backend) == 1
        assert torch.equal(next(loaded.parameters()), next(model.parameters()))

    def test_two_tensors_are_not_both_loaded_from_one_by_its_other_names(self) -> None:
        """The checkpoint has names of parameters that no state dict has, and these as aliases."""
        model, backend = layers("a", "b", tied=True, wrapped=True), MemoryBackend()
        sealed_model(model, backend)
        tied = layers("a", "b", tied=True)
        assert offload.load_parameters(tied, "/run", backend=backend) == 1
        assert torch.equal(next(tied.parameters()), next(model.parameters()))
        with pytest.raises(MismatchError, match=r"'b\.weight' is only in the model"):
            offload.load_parameters(layers("a", "b"), "/run", backend=backend)

    def test_a_model_that_cannot_be_read_is_no_damage(self) -> None:
        inner = MemoryBackend()
        sealed_model(layers("a"), inner)
        backend = FaultBackend(inner)
        backend.fail_if(lambda kind, path: kind == "read" and path.endswith("/model.safetensors"))
        with pytest.raises(UnreadableError, match=r"If it stays unreadable, move /run/step-0000"):
            offload.load_parameters(layers("a"), "/run", backend=backend)
        assert backend.num_failed == 1


class TestLoadingFromSeveralOwners:
    def model(self) -> torch.nn.Module:
        found = torch.nn.Module()
        for name, shape in SHAPES.items():
            empty = torch.zeros(shape, dtype=torch.bfloat16)
            found.register_parameter(name, torch.nn.Parameter(empty))
        return found

    def test_a_model_that_cannot_be_read_is_no_damage(self, tmp_path: Path) -> None:
        store = made(tmp_path / "run", tmp_path / "run")
        backend = FaultBackend(PosixBackend())
        backend.fail_if(lambda kind, path: kind == "read" and path.endswith("/model.safetensors"))
        with pytest.raises(UnreadableError, match=r"If it stays unreadable, move .*/step-0000"):
            offload.load_parameters(self.model(), store, backend=backend)
        assert backend.num_failed == 1
        backend.close()

    def test_shards_are_found_in_the_directories_that_are_given(self, tmp_path: Path) -> None:
        store = made(tmp_path / "run", tmp_path / "elsewhere", sharded=True)
        (tmp_path / "elsewhere").rename(tmp_path / "moved")
        model = self.model()
        assert offload.load_parameters(model, store, parts=[tmp_path / "moved"]) == 2
        assert all(parameter.any() for parameter in model.parameters())
