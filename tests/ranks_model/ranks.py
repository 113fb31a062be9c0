"""Ranks as threads: each has a backend, descriptors and memory of its own."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from gds import Backend, File, MemoryBackend, PosixBackend
from offload.format.digests import DigestContext
from offload.format.header import Header, build_header
from offload.format.known_leaves import KnownLeaves
from offload.format.shares.model_blocks import SharePlan
from offload.format.shares.model_shares import ModelShare, ModelShares, TensorBox
from offload.model.live_boxes import LiveBox, views_of
from offload.model.model_file import BlockBuffers
from offload.model.model_sharing import (
    ShareImage,
    WrittenShare,
    finish_share,
    write_header,
    write_share,
)
from offload.model.share_reading import ShareReading, StoredShare
from offload.update.dtypes import DTYPE_CODES

METADATA = {"format": "pt"}


def header_of(tensors: Mapping[str, torch.Tensor], header_bytes: int | None = None) -> Header:
    """Return a header in the order of safetensors: by descending dtype size, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    listed = [(n, DTYPE_CODES[tensors[n].dtype], tuple(tensors[n].shape)) for n in order]
    return build_header(listed, METADATA, header_bytes=header_bytes)


def save_oracle(tensors: Mapping[str, torch.Tensor], header: Header, path: Path) -> bytes:
    """Return what safetensors writes, with the header padded to the same size."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, METADATA)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    theirs, ours = data[8 : 8 + length], header.encoded[8:]
    assert json.loads(theirs) == json.loads(ours)
    padded = theirs.rstrip(b" ").ljust(header.data_start - 8)
    return struct.pack("<Q", header.data_start - 8) + padded + data[8 + length :]


def whole(tensors: Mapping[str, torch.Tensor]) -> list[LiveBox]:
    """Return the boxes of whole tensors."""
    return [LiveBox.whole(name, tensor) for name, tensor in tensors.items()]


def together(num_ranks: int, work: Callable[[int, threading.Barrier], object]) -> list[object]:
    """Run the work of all ranks at the same time; raise the first error."""
    barrier = threading.Barrier(num_ranks)
    results: list[object] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, barrier)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


class Rank:
    """One rank: its open file, its memory, and what it knows of the file."""

    def __init__(self, rank: int, backend: Backend, file: File) -> None:
        self.rank = rank
        self.backend = backend
        self.file = file
        self.known = KnownLeaves(readable=False)
        self.changing: set[str] | None = None
        self.written: WrittenShare | None = None
        self.copied: list[int] = []

    def image(self, share: ModelShare, live: Mapping[str, torch.Tensor]) -> ShareImage:
        """View the rank's boxes of whole live tensors."""
        return ShareImage(SharePlan(share), views_of(share, whole(live)))

    def buffers(self, nbytes: int) -> BlockBuffers:
        """Return two blocks of memory."""
        return BlockBuffers(self.backend, nbytes, block_bytes=nbytes)

    def seal(
        self,
        share: ModelShare,
        live: Mapping[str, torch.Tensor],
        context: DigestContext,
        barrier: threading.Barrier | None,
    ) -> list[str]:
        """Write and sync the rank's share; return its digests."""
        image = self.image(share, live)
        self.copied = []
        self.written = write_share(
            image,
            self.file,
            self.buffers(image.plan.buffer_bytes),
            context,
            self.known,
            self.copied.append,
            changing=self.changing,
        )
        if barrier is not None:
            barrier.wait()
        finish_share(self.file, self.written)
        return self.written.digests

    def read(
        self,
        stored: Sequence[tuple[ModelShare, Sequence[str]]],
        wanted: Sequence[tuple[TensorBox, torch.Tensor]],
        context: DigestContext,
        *,
        known: bool = False,
    ) -> ShareReading:
        """Read boxes of one file into live tensors."""
        reading = ShareReading(
            [StoredShare(s, self.file, d, self.known if known else None) for s, d in stored],
            [LiveBox(one.name, one.box, tensor) for one, tensor in wanted],
        )
        reading.read(self.buffers(reading.buffer_bytes), context)
        return reading


class Ranks:
    """Ranks with descriptors of their own on one file.

    Args:
        kind: ``direct``, ``buffered`` or ``memory``.
        path: Path of the file.
        shares: Who writes what.
        wrap: What wraps a rank's file.
        is_new: Whether the file is made, with other content, or is there already.
        memory: Backend of the kind ``memory``; None for a new one.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        shares: ModelShares,
        wrap: Callable[[int, File], File] = lambda _, file: file,
        *,
        is_new: bool = True,
        memory: MemoryBackend | None = None,
    ) -> None:
        self.shares = shares
        self.path = f"/{path.name}" if kind == "memory" else str(path)
        num_ranks = len(shares.boxes)
        shared = (memory or MemoryBackend()) if kind == "memory" else None
        self._backends: list[Backend] = [
            shared or PosixBackend(direct=kind == "direct") for _ in range(num_ranks)
        ]
        if is_new:
            self._create(self._backends[shares.writer])
        files = [backend.open(self.path, writable=True) for backend in self._backends]
        self.ranks = [
            Rank(rank, backend, wrap(rank, file))
            for rank, (backend, file) in enumerate(zip(self._backends, files, strict=True))
        ]

    def _create(self, backend: Backend) -> None:
        size = self.shares.header.file_bytes
        with backend.create(self.path, size) as file:
            for start in range(0, size, 1 << 20):  # what an earlier user of the slot has left
                file.write_bytes(b"\xa5" * min(1 << 20, size - start), start)
            write_header(file, self.shares.header)
            file.sync()

    def seal(
        self,
        live: Sequence[Mapping[str, torch.Tensor]],
        context: DigestContext,
        *,
        barrier: bool = True,
    ) -> list[list[str]]:
        """Write the file, all ranks at once; return each rank's digests."""

        def work(rank: int, all_ranks: threading.Barrier) -> list[str]:
            share = self.shares.share(rank)
            wait = all_ranks if barrier else None
            return self.ranks[rank].seal(share, live[rank], context, wait)

        return together(len(self.ranks), work)  # type: ignore[return-value]

    def content(self) -> bytes:
        """Return the bytes of the file, which are the same in the page cache and on the drive."""
        backend = self._backends[0]
        with backend.open(self.path) as file:
            cached = file.read_bytes(0, file.size_bytes)
            buffer = backend.allocate(file.size_bytes)
            file.read_again(buffer, 0, direct=True).result()
            assert bytes(buffer.memoryview()) == cached
            return cached

    def close_files(self) -> None:
        """Close all files, and those backends that have no other files."""
        for rank in self.ranks:
            rank.file.close()
            if not isinstance(rank.backend, MemoryBackend):
                rank.backend.close()

    def close(self) -> None:
        """Close all files and backends."""
        for rank in self.ranks:
            rank.file.close()
        for backend in self._backends:
            backend.close()
