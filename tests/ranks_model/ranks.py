"""Ranks as threads: each has a backend, descriptors and memory of its own."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from gds import Backend, File, MemoryBackend, PosixBackend
from offload.checkpoint.sealed_slot import ModelFile, SealedRange
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.header import Header, build_header
from offload.format.shares.model_blocks import SharePlan, capacity_for
from offload.format.shares.model_shares import ModelShare, ModelShares, TensorBox
from offload.model.model_file import BlockBuffers
from offload.model.model_reading import LiveBox, ModelReading, StoredModel
from offload.model.model_sharing import (
    ShareImage,
    WrittenShare,
    finish_share,
    write_share,
)
from offload.update.dtypes import DTYPE_CODES
from tests.eventually import TIMEOUT_S
from tests.ranks_model.cuts import CONTEXT

METADATA = {"format": "pt"}
KINDS = ["direct", "buffered", "memory"]
Tensors = Mapping[str, torch.Tensor]


def header_of(tensors: Tensors, header_bytes: int | None = None) -> Header:
    """Return a header in the order of safetensors: by descending dtype size, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    listed = [(n, DTYPE_CODES[tensors[n].dtype], tuple(tensors[n].shape)) for n in order]
    return build_header(listed, METADATA, header_bytes=header_bytes)


def save_oracle(tensors: Tensors, header: Header, path: Path) -> bytes:
    """Return what safetensors writes, with the header padded to the same size."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, METADATA)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    theirs, ours = data[8 : 8 + length], header.encoded[8:]
    assert json.loads(theirs) == json.loads(ours)
    padded = theirs.rstrip(b" ").ljust(header.data_start - 8)
    return struct.pack("<Q", header.data_start - 8) + padded + data[8 + length :]


def content_of(share: ModelShare, digests: Sequence[str]) -> ModelFile:
    """Return what a file has of a share whose pieces have digests."""
    pieces = zip(share.pieces, digests, strict=False)
    ranges = [
        SealedRange(share.entries[p.entry].digest_array, p.number, p.start, p.nbytes, digest)
        for p, digest in pieces
    ]
    return ModelFile(share.entries, ranges)


class Rank:
    """One rank: its open file, its memory, and what it knows of the file."""

    def __init__(self, rank: int, backend: Backend, file: File) -> None:
        self.rank, self.backend, self.file = rank, backend, file
        self.known = KnownLeaves(readable=False)
        self.changing: set[str] | None = None
        self.written: WrittenShare | None = None

    def image(self, share: ModelShare, live: Tensors) -> ShareImage:
        """View the rank's boxes of whole live tensors."""
        return ShareImage(SharePlan(share), [live[e.name][e.box.slices] for e in share.entries])

    def buffers(self, nbytes: int) -> BlockBuffers:
        """Return two blocks of memory."""
        return BlockBuffers(self.backend, nbytes, block_bytes=nbytes)

    def seal(
        self,
        share: ModelShare,
        live: Tensors,
        *,
        copied: Callable[[int], None] = lambda _: None,
        between: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Write and sync the rank's share; return its digests."""
        image = self.image(share, live)
        buffers = self.buffers(image.plan.buffer_bytes)
        self.written = write_share(
            image, self.file, buffers, CONTEXT, self.known, copied, changing=self.changing
        )
        between()
        finish_share(self.file, self.written)
        return self.written.digests

    def read(
        self,
        stored: Sequence[tuple[ModelShare, Sequence[str]]],
        wanted: Sequence[tuple[TensorBox, torch.Tensor]],
        *,
        context: DigestContext = CONTEXT,
        known: bool = False,
    ) -> ModelReading:
        """Read boxes of one file into live tensors."""
        reading = ModelReading(
            [
                StoredModel(self.file, content_of(s, d), self.known if known else None)
                for s, d in stored
            ],
            [LiveBox(one.name, one.box, tensor) for one, tensor in wanted],
            batch_bytes=capacity_for(stored[0][0].piece_bytes),
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
        before: Ranks that have written the file, and are closed now; None for a new file.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        shares: ModelShares,
        wrap: Callable[[int, File], File] = lambda _, file: file,
        *,
        before: Ranks | None = None,
    ) -> None:
        self.shares = shares
        self.path = f"/{path.name}" if kind == "memory" else str(path)
        self._memory = before._memory if before else MemoryBackend()
        backends: list[Backend] = [
            self._memory if kind == "memory" else PosixBackend(direct=kind == "direct")
            for _ in shares.boxes
        ]
        if before is None:
            self._create(backends[0])
        self.ranks = [
            Rank(rank, backend, wrap(rank, backend.open(self.path, writable=True)))
            for rank, backend in enumerate(backends)
        ]

    def _create(self, backend: Backend) -> None:
        """Create a file with what an earlier user of the slot has left."""
        size = self.shares.header.file_bytes
        with backend.create(self.path, size) as file:
            file.write_bytes(b"\xa5" * size, 0)
            file.write_bytes(self.shares.header.encoded, 0)
            file.sync()

    def seal(self, *live: Tensors, barrier: bool = True) -> list[list[str]]:
        """Write the file, all ranks at once; return each rank's digests.

        Args:
            live: Live tensors of each rank, or those that all of them have.
            barrier: Whether all ranks have written their blocks before one writes its edges.
        """
        size = len(self.ranks)
        every = live if len(live) == size else live * size
        both = threading.Barrier(size, timeout=TIMEOUT_S)

        def work(rank: int) -> list[str]:
            between = both.wait if barrier else lambda: None
            return self.ranks[rank].seal(self.shares.share(rank), every[rank], between=between)

        with ThreadPoolExecutor(size) as pool:
            return [*pool.map(work, range(size))]

    def content(self) -> bytes:
        """Return the bytes of the file, which are the same in the page cache and on the drive."""
        backend = self.ranks[0].backend
        with backend.open(self.path) as file:
            cached = file.read_bytes(0, file.size_bytes)
            buffer = backend.allocate(file.size_bytes)
            file.read_again(buffer, 0, direct=True).result()
            assert bytes(buffer.memoryview()) == cached
            return cached

    def close(self) -> None:
        """Close all files, and the backends that have nothing else."""
        for rank in self.ranks:
            rank.file.close()
            if rank.backend is not self._memory:
                rank.backend.close()
