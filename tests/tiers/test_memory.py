"""Memory that transfers take: it is used again, and there is a bounded number of parts."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

import offload
from gds import ALIGNMENT, Backend, Buffer, PosixBackend, WrapperBackend
from gds.contract import BufferKind
from offload.tiers import pull, push
from offload.tiers.model_objects import model_object
from offload.tiers.services.folder_objects import FolderObjects
from offload.tiers.services.reused import ReusedMemory
from tests.stores.files import tree
from tests.tiers.proxy import Proxy


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    memory = ReusedMemory()
    first = memory.take(5000)
    assert len(first) == 5000
    first[:] = b"x" * 5000
    part = first[4000:4100]
    del first
    gc.collect()
    other = memory.take(5000)
    other[:] = b"y" * 5000
    assert bytes(part) == b"x" * 100, "a slice keeps its memory"
    del part, other
    gc.collect()
    again = [memory.take(4000), memory.take(5000)]
    assert {bytes(one[:1]) for one in again} == {b"x", b"y"}, "both blocks are used again"
    assert bytes(memory.take(6000)[:1]) == b"\0"


def test_pieces_of_a_folder_give_their_memory_back_when_nobody_asks_for_more(
    tmp_path: Path,
) -> None:
    with PosixBackend() as inner:
        backend = _AllSizes(inner)
        objects = FolderObjects(f"{tmp_path}/tier", backend)
        objects.put("x", b"x" * 100_000)
        for _ in range(5):
            pieces = objects.pieces("x", 0, 100_000)
            assert bytes(next(pieces)) == b"x" * 100_000
            del pieces  # without asking for its end, as `Fetcher.check` does
    assert len(backend.sizes) == 1


class _AllSizes(WrapperBackend):
    """Backend that notes all memory that it gives."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        self.sizes.append(nbytes)
        return self.inner.allocate(nbytes, kind)


class _Counting(WrapperBackend):
    """Backend that notes the memory that it gives to the threads of transfers."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        if threading.current_thread().name.startswith("offload tier"):
            self.sizes.append(nbytes)
        return self.inner.allocate(nbytes, kind)


def test_a_download_takes_one_part_for_each_transfer(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, s3)
    taken: list[int] = []
    take = ReusedMemory.take

    def note(memory: ReusedMemory, nbytes: int) -> memoryview:
        taken.append(nbytes)
        return take(memory, nbytes)

    monkeypatch.setattr(ReusedMemory, "take", note)
    proxy.requests.clear()
    with PosixBackend() as inner:
        backend = _Counting(inner)
        pull(s3, tmp_path / "back", backend=backend, num_transfers=4)
    sent, back = (tree(path / "step-00000003") for path in (store, tmp_path / "back"))
    assert [*sent.values()] == [*back.values()]
    with offload.open_checkpoint(store) as checkpoint:
        manifest = checkpoint.manifest
    layout = manifest.layout
    piece = max(layout.max_chunk_bytes(name) for name in layout.array_names)
    block = max(chunk.nbytes for _, chunk in model_object(manifest).pieces)
    # Four for the parameters, which are freed before the four for the state.
    assert len(backend.sizes) <= 8
    assert max(backend.sizes) <= max(piece, block) + ALIGNMENT
    documents = [
        r for r in proxy.requests
        if r.method == "GET" and "/state/" not in r.path and "model" not in r.path
    ]  # fmt: skip
    assert sum(taken) <= sum(r.bytes_down for r in documents), "pieces need no further memory"
