"""Order and memory of the transfers of ``model.safetensors``, block by block."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

import offload.format.digests
import offload.format.manifest
import offload.model.model_file
import offload.model.model_writing
from gds import Buffer, File, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import BufferKind
from offload.errors import DamagedError
from offload.format.digests import DigestContext, leaf_digests
from offload.format.header import Header, build_header
from offload.format.known_leaves import KnownLeaves
from offload.model.model_file import BlockBuffers, ModelImage, read_model
from offload.model.model_writing import write_model

BLOCK_BYTES = 4096
CONTEXT = DigestContext("store", 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (offload.format.manifest, offload.model.model_file):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK_BYTES)


def values_of(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


def image_of(values: torch.Tensor) -> tuple[Header, ModelImage]:
    """View a tensor as a model file of two tensors, the first of which ends within a block."""
    cut = min(BLOCK_BYTES + 1000, values.numel() - 1)
    parts = {"a": values[:cut], "b": values[cut:]}
    header = build_header([(name, "U8", tuple(part.shape)) for name, part in parts.items()])
    return header, ModelImage(header, parts)


def sealed(backend: MemoryBackend, values: torch.Tensor) -> tuple[File, tuple[str, ...]]:
    """Write a model file; return it with the digests of its blocks."""
    header, image = image_of(values)
    file = backend.create("/model", header.file_bytes)
    buffers = BlockBuffers(backend, header.file_bytes)
    known = KnownLeaves(readable=False)
    written = write_model(image, file, buffers, CONTEXT, known, lambda _: None)
    return file, tuple(written.digests)


class Journal(WrapperFile):
    """Notes the reads that begin. They move their bytes when they are waited for."""

    def __init__(self, inner: File, data_start: int) -> None:
        super().__init__(inner)
        self._data_start = data_start
        self.events: list[tuple[str, int]] = []

    def read(self, into: Buffer, offset: int) -> IOFuture:
        self.events.append(("read", (offset - self._data_start) // BLOCK_BYTES))
        return _Late(self.inner, into, offset)  # type: ignore[return-value]


class _Late(Future[int]):
    def __init__(self, file: File, into: Buffer, offset: int) -> None:
        super().__init__()
        self._transfer = file, into, offset

    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            file, into, offset = self._transfer
            self.set_result(file.read(into, offset).result())
        return super().result(timeout)


class NotedImage(ModelImage):
    """Notes the blocks that are copied into the live tensors."""

    events: list[tuple[str, int]]
    on_one_thread: list[bool]

    def scatter(
        self, start: int, stop: int, data: torch.Tensor, *, on_one_thread: bool = False
    ) -> None:
        self.events.append(("copy", start // BLOCK_BYTES))
        self.on_one_thread.append(on_one_thread)
        super().scatter(start, stop, data, on_one_thread=on_one_thread)


@pytest.mark.parametrize("num_bytes", [1, BLOCK_BYTES, 3 * BLOCK_BYTES, 7 * BLOCK_BYTES + 5])
def test_a_restore_reads_three_blocks_ahead_of_the_one_that_it_copies(num_bytes: int) -> None:
    backend, values = MemoryBackend(), values_of(num_bytes + 1)
    inner, digests = sealed(backend, values)
    live = torch.zeros_like(values)
    header, plain = image_of(live)
    cut = header.entries["a"].nbytes
    image = NotedImage(header, {"a": live[:cut], "b": live[cut:]})
    file = Journal(inner, header.data_start)
    image.events, image.on_one_thread = file.events, []
    read_model(image, file, BlockBuffers(backend, header.file_bytes), CONTEXT, digests)
    assert torch.equal(live, values)
    num_blocks = len(list(plain.blocks()))
    for block in range(num_blocks):
        before = file.events[: file.events.index(("copy", block))]
        wanted = min(block + 4, num_blocks)
        assert [number for what, number in before if what == "read"] == [*range(wanted)]


class ScarceBackend(WrapperBackend):
    """Has memory for some buffers only."""

    def __init__(self, inner: MemoryBackend, num_buffers: int) -> None:
        super().__init__(inner)
        self.num_left = num_buffers

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        self.num_left -= 1
        if self.num_left < 0:
            raise MemoryError("no memory left")
        return super().allocate(nbytes, kind)


def test_a_restore_needs_no_more_memory_than_two_blocks() -> None:
    backend, values = MemoryBackend(), values_of(5 * BLOCK_BYTES + 7)
    file, digests = sealed(backend, values)
    live = torch.zeros_like(values)
    header, image = image_of(live)
    scarce = ScarceBackend(backend, num_buffers=2)
    read_model(image, file, BlockBuffers(scarce, header.file_bytes), CONTEXT, digests)
    assert scarce.num_left < 0, "a third buffer was asked for"
    assert torch.equal(live, values)


def test_buffers_that_a_restore_adds_are_not_kept() -> None:
    backend, values = MemoryBackend(), values_of(5 * BLOCK_BYTES)
    file, digests = sealed(backend, values)
    header, image = image_of(torch.zeros_like(values))
    buffers = BlockBuffers(backend, header.file_bytes)
    before = buffers.nbytes
    read_model(image, file, buffers, CONTEXT, digests)
    assert buffers.nbytes == before == 2 * BLOCK_BYTES


@pytest.mark.parametrize("damaged", range(5))
def test_blocks_from_a_damaged_one_on_are_not_copied(damaged: int) -> None:
    backend, values = MemoryBackend(), values_of(5 * BLOCK_BYTES)
    file, digests = sealed(backend, values)
    live = torch.full_like(values, 77)
    header, image = image_of(live)
    at = header.data_start + damaged * BLOCK_BYTES
    byte = file.read_bytes(at, 1)[0]
    file.write_bytes(bytes([byte ^ 1]), at)
    buffers = BlockBuffers(backend, header.file_bytes)
    with pytest.raises(DamagedError):
        read_model(image, file, buffers, CONTEXT, digests)
    good = damaged * BLOCK_BYTES
    assert torch.equal(live[:good], values[:good])
    assert bool((live[good:] == 77).all())


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 9000), (5, 6), (4095, 5097), (5096, 9000), (5000, 5200)]
)
def test_a_copy_on_one_thread_has_the_bytes_of_a_copy_on_all(start: int, stop: int) -> None:
    """The second tensor is a transposed view, which has to be made contiguous first."""
    values = values_of(9000)
    cut = BLOCK_BYTES + 1000
    turned = values[cut:].view(488, 8).t().contiguous().t()
    header = build_header([("a", "U8", (cut,)), ("b", "U8", (488, 8))])
    image = ModelImage(header, {"a": values[:cut], "b": turned})
    out = torch.full((stop - start + 2,), 99, dtype=torch.uint8)
    image.gather(start, stop, out[1:-1], on_one_thread=True)
    assert torch.equal(out[1:-1], values[start:stop])
    assert (int(out[0]), int(out[-1])) == (99, 99), "bytes beside the range"


@pytest.mark.parametrize("on_one_thread", [False, True])
def test_a_restore_is_counted_as_a_change_of_each_tensor(on_one_thread: bool) -> None:
    """Autograd relies on this to refuse a backward through a forward before the restore."""
    first, second = torch.zeros(3000), torch.zeros(8, 500).t()
    header = build_header([("a", "F32", (3000,)), ("b", "F32", (500, 8))])
    image = ModelImage(header, {"a": first, "b": second})
    expected = torch.arange(7000, dtype=torch.float32)
    versions = first._version, second._version
    image.scatter(0, 28000, expected.view(torch.uint8), on_one_thread=on_one_thread)
    assert first._version > versions[0]
    assert second._version > versions[1]
    assert torch.equal(first, expected[:3000])
    assert torch.equal(second, expected[3000:].view(500, 8))


@pytest.mark.parametrize("late", [True, False], ids=["the drive is behind", "it has caught up"])
def test_a_restore_copies_on_all_threads_only_if_the_drive_waits_for_it(late: bool) -> None:
    backend, values = MemoryBackend(), values_of(5 * BLOCK_BYTES)
    inner, digests = sealed(backend, values)
    live = torch.zeros_like(values)
    header, _ = image_of(live)
    cut = header.entries["a"].nbytes
    image = NotedImage(header, {"a": live[:cut], "b": live[cut:]})
    image.events, image.on_one_thread = [], []
    file = Journal(inner, header.data_start) if late else inner
    read_model(image, file, BlockBuffers(backend, header.file_bytes), CONTEXT, digests)
    # While the last block is copied, no read is in flight.
    assert image.on_one_thread == ([True] * 5 if late else [False] * 4 + [True])
    assert torch.equal(live, values)


class SlowFile(WrapperFile):
    """Its writes have ended when they are waited for, and not before."""

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return _LateWrite(self.inner, source, offset)  # type: ignore[return-value]


class _LateWrite(_Late):
    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            file, source, offset = self._transfer
            self.set_result(file.write(source, offset).result())
        return super().result(timeout)


class CountedFile(SlowFile):
    """Notes the writes that have begun."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.writes: list[IOFuture] = []

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self.writes.append(super().write(source, offset))
        return self.writes[-1]


@pytest.mark.parametrize("num_buffers", [2, 3])
def test_a_seal_copies_a_block_while_all_other_buffers_are_being_written(
    num_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for two blocks only, it has two."""
    backend, values = MemoryBackend(), values_of(6 * BLOCK_BYTES)
    header, image = image_of(values)
    file = CountedFile(backend.create("/model", header.file_bytes))
    in_flight: list[int] = []
    gather = image.gather

    def noted(start: int, stop: int, out: torch.Tensor, *, on_one_thread: bool) -> None:
        in_flight.append(sum(not write.done() for write in file.writes))
        gather(start, stop, out, on_one_thread=on_one_thread)

    monkeypatch.setattr(image, "gather", noted)
    buffers = BlockBuffers(ScarceBackend(backend, num_buffers), header.file_bytes)
    write_model(image, file, buffers, CONTEXT, KnownLeaves(readable=False), lambda _: None)
    assert in_flight == [min(block, num_buffers - 1) for block in range(6)]
    assert file.read_bytes(header.data_start, values.numel()) == bytes(values.numpy())
    assert buffers.nbytes == num_buffers * BLOCK_BYTES


class FailingFile(WrapperFile):
    """Its second write fails. Writes have ended when they are waited for, and not before."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.started: list[_LateWrite] = []

    def write(self, source: Buffer, offset: int) -> IOFuture:
        wrong = 1 << 60 if len(self.started) == 1 else 0  # far beyond the end of the file
        self.started.append(_LateWrite(self.inner, source, offset + wrong))
        return self.started[-1]  # type: ignore[return-value]


def test_when_a_write_of_a_block_fails_the_others_of_the_block_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of all of them is about to be freed or used again."""
    for module in (offload.format.digests, offload.model.model_writing):
        monkeypatch.setattr(module, "LEAF_BYTES", 512)
    backend, values = MemoryBackend(), values_of(5 * BLOCK_BYTES)
    header, image = image_of(values)
    file = FailingFile(backend.create("/model", header.file_bytes))
    known = KnownLeaves(readable=False)
    for block in range(5):  # every second leaf has changed, so that a block takes four writes
        content = values[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].clone()
        content.view(8, 512)[::2] ^= 1
        known.note(block, leaf_digests(memoryview(content.numpy())))
    buffers = BlockBuffers(backend, header.file_bytes)
    with pytest.raises(StorageError):
        write_model(image, file, buffers, CONTEXT, known, lambda _: None)
    assert len(file.started) == 12, "three blocks"
    assert all(write.done() for write in file.started if write is not file.started[1])


@pytest.mark.parametrize(
    ("slow", "expected"),
    [(True, [True] * 5), (False, [True, False, False, False, False])],
    ids=["the drive is behind", "the drive has caught up"],
)
def test_a_seal_copies_on_all_threads_only_if_the_drive_waits_for_it(
    slow: bool, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, values = MemoryBackend(), values_of(5 * BLOCK_BYTES)
    header, image = image_of(values)
    file = backend.create("/model", header.file_bytes)
    found = []
    gather = image.gather

    def noted(start: int, stop: int, out: torch.Tensor, *, on_one_thread: bool) -> None:
        found.append(on_one_thread)
        gather(start, stop, out, on_one_thread=on_one_thread)

    monkeypatch.setattr(image, "gather", noted)
    write_model(
        image,
        SlowFile(file) if slow else file,
        BlockBuffers(backend, header.file_bytes),
        CONTEXT,
        KnownLeaves(readable=False),
        lambda _: None,
    )
    assert found == expected
    assert file.read_bytes(header.data_start, values.numel()) == bytes(values.numpy())
