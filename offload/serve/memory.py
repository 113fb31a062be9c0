"""Memory that a client takes: what is allowed, and tensors that are given back after each use.

The tensors of the model are in an unnamed file on the drive, which is mapped into memory: bytes
that are given back stay in the file. Gradients are in memory without a file: bytes that are given
back are gone, after the step has used them.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from gds import StorageError
from gds.errors import RefusedError
from offload.format.header import DTYPE_BYTES
from offload.options import Options
from offload.stream.drives import DEFAULT_RING_CHUNKS
from offload.update.dtypes import DTYPES

DEFAULT_MEMORY_BYTES: Final = 2 << 30
"""Bytes that state of one run may take, if the server was told nothing else."""

_ARRAYS: Final = 4
"""Most arrays that a class of torch has in a chunk: those of AdamW with ``amsgrad=True``."""

_MAX_THREADS: Final = 64

_ALIGNMENT = 64
"""Bytes that the first element of each tensor is aligned to, as torch's own allocations are."""


def require_allowed(options: Options, memory_bytes: int) -> None:
    """Refuse options of a client with which its state would take more memory than it may.

    Raises:
        gds.errors.RefusedError: They do, or ask for too many threads.
    """
    frames = DEFAULT_RING_CHUNKS if options.ring_chunks is None else options.ring_chunks
    asked = frames * options.chunk_bytes * _ARRAYS + options.host_memory_bytes
    if asked > memory_bytes:
        raise RefusedError(
            f"chunk_bytes=, ring_chunks= and host_memory= ask for {asked} bytes, and a run may "
            f"have {memory_bytes}: use smaller ones, or offload serve --host-memory"
        )
    if (options.drives.threads or 0) > _MAX_THREADS:
        raise RefusedError(f"threads={options.drives.threads} is more than {_MAX_THREADS}")


class TensorMemory:
    """Tensors that lie one after the other in mapped memory.

    Args:
        tensors: Code of the dtype in safetensors files, and shape, of each tensor.
        directory: Directory for the unnamed file; None for memory without a file.

    Raises:
        gds.StorageError: There is no room for the file, or it cannot be made.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, tuple[int, ...]]], directory: str | None
    ) -> None:
        self._starts: list[int] = []
        at = 0
        for dtype, shape in tensors:
            self._starts.append(at)
            nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._nbytes = max(-(-at // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if directory is None:
            self._map = mmap.mmap(-1, self._nbytes)
        else:
            self._map = _map_file(directory, self._nbytes)
        everything = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes: list[memoryview] = []
        """Bytes of each tensor."""
        self.tensors: list[torch.Tensor] = []
        for (dtype, shape), start in zip(tensors, self._starts, strict=True):
            nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
            found = everything[start : start + nbytes]
            self.bytes.append(found.data)
            self.tensors.append(torch.from_numpy(found).view(DTYPES[dtype]).view(shape))

    def give_back(self, parts: Iterable[tuple[int, int, int]]) -> None:
        """Give back the pages with some bytes: of a tensor, from one byte to another.

        Neighbouring bytes on the same pages are given back as well.
        """
        runs: list[list[int]] = []
        for tensor, start, stop in parts:
            first = (self._starts[tensor] + start) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(
                -(-(self._starts[tensor] + stop) // mmap.PAGESIZE) * mmap.PAGESIZE, self._nbytes
            )
            if runs and first <= runs[-1][1]:
                runs[-1][1] = max(last, runs[-1][1])
            elif first < last:
                runs.append([first, last])
        for first, last in runs:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def give_back_all(self) -> None:
        """Give back all pages."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _map_file(directory: str, nbytes: int) -> mmap.mmap:
    """Return an unnamed file of a directory's drive as memory; its space is reserved."""
    what = f"reserving {nbytes} bytes for the parameters of the model"
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, what, directory) from error
    try:
        found = os.fstatvfs(descriptor)
        if nbytes > found.f_bavail * found.f_frsize:  # what others write meanwhile must not fail
            raise OSError(errno.ENOSPC, what)
        # A page without space on the drive would end the process when it is written.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, what, directory) from error
    finally:
        os.close(descriptor)
