"""Working memory of one layout, which state and parameters pass through."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

import torch

from gds import ALIGNMENT, Backend, StorageError
from gds.errors import DeviceMemoryError, RefusedError
from gds.memory_directories import MemoryPlace, map_memory, require_memory
from offload.device.compute import Compute
from offload.device.staging import Traffic
from offload.format.digests import DigestContext, Run
from offload.format.layout import Layout
from offload.format.model_places import ModelPlaces
from offload.model.model_file import BlockBuffers
from offload.options import Options
from offload.stream.drives import Drives
from offload.stream.frame import FrameMemory, HostFrames, Part, frame_bytes, tensor_of
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer


class MappedFrames(HostFrames):
    """Frames in the memory of a directory; an implementation of `FrameMemory`."""

    def __init__(self, backend: Backend, place: MemoryPlace) -> None:
        super().__init__(backend)
        self._place = place

    def allocate(self, sizes: Sequence[int]) -> list[Part]:
        """Return memory of the directory, all of it in one mapping, which is reserved."""
        if not sizes:
            return []
        nbytes = sum(map(_aligned, sizes))
        try:
            slab = map_memory(self._place, nbytes)
        except StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise StorageError(
                error.errno,
                f"host_memory= takes {nbytes} bytes of {self._place.filesystem} that are not free: "
                "make room there, or give a smaller size, Options(host_memory="
                f"offload.MemoryDirectory({self._place.path!r}, size)). No state has changed",
                self._place.path,
            ) from error
        parts: list[Part] = []
        start = 0
        for nbytes in sizes:
            part = slab.slice(start, nbytes)
            parts.append((part, tensor_of(part)))
            start += _aligned(nbytes)
        return parts

    def footprint_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of the directory's pages that the mapping takes."""
        unit = self._place.page_bytes
        return -(-sum(map(_aligned, sizes)) // unit) * unit


def resident_frames(options: Options, backend: Backend) -> HostFrames:
    """Return the allocator of host memory in which state stays between steps."""
    if options.memory_directory is None:
        return HostFrames(backend)
    return MappedFrames(backend, require_memory(os.fsdecode(options.memory_directory.path)))


def host_memory_bytes(options: Options) -> int:
    """Return how much host memory state may take between steps, in bytes.

    If ``host_memory=`` is a directory without a size, it is the space that is free in it now, but
    for a small part that file systems need for themselves.
    """
    named = options.memory_directory
    if named is None:
        return options.host_memory_bytes
    if named.size_bytes is not None:
        return named.size_bytes
    free = require_memory(os.fsdecode(named.path)).free_bytes or 0
    return free - free // 64


def require_host_memory(options: Options, num_ranks: int) -> None:
    """Check that ``host_memory=`` can be, if it is a directory.

    Args:
        options: Settings of the optimizer.
        num_ranks: Number of ranks that train together.

    Raises:
        gds.errors.RefusedError: The files of the directory are not memory; or a size has to be
            given, or is larger than the file system.
        FileNotFoundError: The directory does not exist.
        gds.StorageError: No file can be made in the directory.
    """
    named = options.memory_directory
    if named is None:
        return
    found = require_memory(os.fsdecode(named.path))
    size_bytes, whole_bytes = named.size_bytes, found.size_bytes
    if size_bytes is None:
        why = ""
        if num_ranks > 1:
            why = f"{num_ranks} ranks take memory, and each must know how much it may take"
        elif found.filesystem == "tmpfs":
            why = "the free space of tmpfs is a limit, and no memory that is known to be there"
        elif whole_bytes is None:
            why = f"this {found.filesystem} was mounted without a size"
        if why:
            raise RefusedError(
                f"host_memory={found.path!r} needs a size, because {why}: write "
                f'Options(host_memory=offload.MemoryDirectory({found.path!r}, "64GiB"))'
            )
    elif whole_bytes is not None and size_bytes > whole_bytes:
        raise RefusedError(
            f"host_memory= asks for {size_bytes} bytes of {found.path}, which has {whole_bytes} "
            "bytes altogether: give a smaller size"
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class WorkingMemory:
    """The ring, resident chunks and block buffers. Each is created when it is first needed."""

    def __init__(self, drives: Drives, options: Options, meter: Meter) -> None:
        self._drives = drives
        self._options = options
        self.reads_model = False
        """Whether steps read parameters together with the state; see `Streamer`."""
        self._meter = meter
        self.streamer: Streamer | None = None
        """Streamer that `ring` has created; None before."""
        self._blocks: BlockBuffers | None = None

    def ring(self, layout: Layout, compute: Compute | None) -> Streamer:
        """Return the streamer for a layout, with its ring and resident chunks."""
        if self.streamer is None:
            options, backend = self._options, self._drives.backends[0]
            memory: FrameMemory
            kept_in: FrameMemory
            if compute is not None:
                memory = kept_in = DeviceFrames(backend, compute, self._meter.traffic)
                resident_bytes = options.device_memory_bytes
            else:
                memory = HostFrames(backend)
                kept_in = resident_frames(options, backend)
                resident_bytes = host_memory_bytes(options)
            ring_chunks = self._drives.tune(layout.state_bytes, frame_bytes(layout))
            self.streamer = Streamer(
                memory,
                layout,
                ring_chunks,
                self._meter,
                resident_bytes=resident_bytes,
                resident_memory=kept_in,
                verify_reads=options.verify == "always",
                places=ModelPlaces(layout) if options.parameters == "drive" else None,
                reads_model=self.reads_model,
            )
        return self.streamer

    def blocks(self, layout: Layout) -> BlockBuffers:
        """Return the buffers that ``model.safetensors`` is copied through."""
        if self._blocks is None:
            header = layout.model_header
            data_bytes = header.file_bytes - header.data_start
            self._blocks = BlockBuffers(self._drives.backends[0], data_bytes, self._meter.traffic)
        return self._blocks

    def synchronize(self) -> None:
        """Wait until every transfer of state that has been started has ended."""
        if self.streamer is not None:
            self.streamer.synchronize()

    def reset(self) -> None:
        """Wait for all transfers, then discard chunks in memory and forget errors."""
        if self.streamer is not None:
            self.streamer.reset()

    def release(self) -> None:
        """Release all memory for good, after `reset`. The sizes of the ring are still known."""
        if self.streamer is not None:
            self.streamer.release()
        self._blocks = None

    def drop(self) -> None:
        """Release all memory, before another layout is used."""
        self.synchronize()
        self.reset()
        self.streamer = self._blocks = None


_PAGE_BYTES = 2 << 20
"""Unit in which CUDA takes memory of a device for all but small allocations, in bytes."""


class DeviceFrames:
    """Frames on a device; an implementation of `offload.stream.frame.FrameMemory`."""

    def __init__(self, backend: Backend, compute: Compute, traffic: Traffic) -> None:
        self.device = compute.device
        self._backend = backend
        self._compute = compute
        self._traffic = traffic

    def allocate(self, sizes: Sequence[int]) -> list[Part]:
        """Return device memory, all of it in one allocation.

        CUDA takes memory in pages of 2 MiB, and cuFile registers whole allocations: separate ones
        would take up to a page more each.
        """
        total = _slab_bytes(sizes)
        if not total:
            return []  # sizes are never zero
        try:
            slab = self._backend.allocate(total, "device")
        except MemoryError:
            # torch caches freed memory, and the backend does not allocate from torch's cache.
            self._compute.trim()
            try:
                slab = self._backend.allocate(total, "device")
            except MemoryError as error:
                raise DeviceMemoryError(
                    f"{total} bytes ({total / (1 << 30):.3g} GiB) for chunks of state do not fit "
                    f"on {self.device} ({error}): use a smaller device_memory, fewer ring_chunks "
                    'or smaller chunks (chunk_bytes), or placement="host". No state has changed'
                ) from error
        tensor = self._compute.view(slab)
        parts, start = [], 0
        for nbytes in sizes:
            parts.append((slab.slice(start, nbytes), tensor[start : start + nbytes]))
            start += _rounded(nbytes, ALIGNMENT)
        return parts

    def footprint_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of the pages that the allocation takes; small ones share a page."""
        total = _slab_bytes(sizes)
        return total if total < _PAGE_BYTES else _rounded(total, _PAGE_BYTES)

    def digests(self, arrays: Mapping[str, torch.Tensor]) -> DeviceDigests:
        """Return digests that the device computes."""
        return DeviceDigests(self._compute, arrays)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in host memory; they are complete on return."""
        compute = self._compute
        with compute.queue([]):
            fetched = {name: compute.fetch(tensor) for name, tensor in tensors.items()}
            done = compute.mark()
        compute.wait(done)
        self._traffic.fetched(sum(tensor.nbytes for tensor in fetched.values()))
        return fetched

    def send(
        self, fetched: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy host tensors back to the device; complete on return."""
        compute = self._compute
        with compute.queue([]):
            for name, tensor in tensors.items():
                compute.send(fetched[name], tensor)
            done = compute.mark()
        compute.wait(done)
        self._traffic.sent(sum(tensor.nbytes for tensor in tensors.values()))


def _slab_bytes(sizes: Sequence[int]) -> int:
    return sum(_rounded(nbytes, ALIGNMENT) for nbytes in sizes)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class DeviceDigests:
    """Digests of a chunk, computed on the device. Only the digests cross to the host."""

    def __init__(self, compute: Compute, arrays: Mapping[str, torch.Tensor]) -> None:
        self._compute = compute
        self._arrays = arrays
        self._leaves: dict[str, torch.Tensor] = {}

    def written(self, array: str, start: int, stop: int) -> None:
        """Queue the digests of an array if the range is the whole array; otherwise do nothing.

        Must be called within `Compute.queue`.
        """
        if (start, stop) == (0, self._arrays[array].nbytes):
            self._leaves[array] = self._compute.leaf_digests(self._arrays[array])

    def digested(self, array: str, number: int, digest: bytes) -> None:
        """Ignore the digest: all leaves of an array are digested together."""

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:  # noqa: ARG002
        """Wait for all queued work, and return the digest of each array."""
        compute = self._compute
        with compute.queue([]):
            for name, data in self._arrays.items():
                if name not in self._leaves:
                    self.written(name, 0, data.nbytes)
            done = compute.mark()
        compute.wait(done)
        return {
            name: context.digest_leaves(name, chunk, leaves.numpy().tobytes())
            for name, leaves in self._leaves.items()
        }
