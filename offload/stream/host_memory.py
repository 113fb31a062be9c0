"""Memory on the host in which state stays between steps: of this process, or of a directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from gds import ALIGNMENT, Backend, StorageError
from gds.errors import RefusedError
from gds.memory_directories import MemoryPlace, map_memory, require_memory
from offload.options import Options
from offload.stream.frame import HostFrames, Part, tensor_of


class MappedFrames(HostFrames):
    """Frames in the memory of a directory; an implementation of `FrameMemory`.

    Args:
        backend: Moves state between storage and the frames.
        place: Directory whose files are memory.
    """

    def __init__(self, backend: Backend, place: MemoryPlace) -> None:
        super().__init__(backend)
        self._place = place

    def allocate(self, sizes: Sequence[int]) -> list[Part]:
        """Return memory of the directory, all of it in one mapping, which is reserved.

        Raises:
            gds.StorageError: The directory has not so much memory left. Nothing was taken.
        """
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
    """Return the allocator of host memory in which state stays between steps.

    Raises what `require_host_memory` does.
    """
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
