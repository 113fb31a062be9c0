"""Memory and errors of the transfers of ``model.safetensors``, block by block.

The wing's functions are called: an optimizer's memory cannot be made scarce for these blocks only.
"""

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


def test_seals_and_restores_need_no_more_memory_than_two_blocks() -> None:
    """And what a restore adds, if there is more, is not kept."""
    values = values_of(5 * BLOCK_BYTES + 7)
    for num_buffers in (2, 100):
        backend = MemoryBackend()
        header, image = image_of(values)
        file = backend.create("/model", header.file_bytes)
        scarce = ScarceBackend(backend, num_buffers)
        buffers = BlockBuffers(scarce, header.file_bytes)
        known = KnownLeaves(readable=False)
        digests = tuple(write_model(image, file, buffers, CONTEXT, known, lambda _: None).digests)
        live = torch.zeros_like(values)
        _, image = image_of(live)
        before = buffers.nbytes
        read_model(image, file, buffers, CONTEXT, digests)
        assert buffers.nbytes == before
        assert (scarce.num_left < 0) == (num_buffers == 2), "a third buffer is asked for"
        assert torch.equal(live, values)


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


class _LateWrite(Future[int]):
    """Has ended when it is waited for, and not before."""

    def __init__(self, file: File, source: Buffer, offset: int) -> None:
        super().__init__()
        self._transfer = file, source, offset

    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            file, source, offset = self._transfer
            self.set_result(file.write(source, offset).result())
        return super().result(timeout)


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
