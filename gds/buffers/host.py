"""Host memory for transfers: page-aligned, zeroed, on huge pages if the kernel has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final, Self

from gds.contract import ALIGNMENT, BufferKind
from gds.errors import RefusedError

HUGE_PAGE_BYTES: Final = 2 << 20
"""Size of a huge page, in bytes. A direct transfer of 4 KiB pages reaches the device in many small
pieces; in measurements, huge pages nearly double the rate."""

_MADV_WIPEONFORK: Final = 18


class HostBuffer:
    """A buffer of zeroed, private, pageable memory; a slice shares it and keeps it alive.

    A buffer of at least 2 MiB is aligned to 2 MiB, a smaller one to 4096 bytes. The memory returns
    to the system when the last buffer, slice or view of it is collected.

    A forked child sees zeros instead of the contents. Otherwise each data-loader worker would
    double the memory of a ring that is being written, and the kernel forbids a fork during a
    direct transfer into memory that the child inherits (open(2), NOTES).
    """

    __slots__ = ("__weakref__", "_address", "_view")

    def __init__(self, nbytes: int) -> None:
        """Map `nbytes` bytes.

        Raises:
            ValueError: `nbytes` is negative.
            MemoryError: The system has no free range of that length.
        """
        if nbytes < 0:
            raise ValueError(f"a buffer cannot have {nbytes} bytes")
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else ALIGNMENT
        # The kernel aligns a mapping only to 4096 bytes. The spare part is never touched, so it
        # takes address space but no memory.
        length = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT + alignment - ALIGNMENT
        try:
            # The default of mmap(-1, n) is MAP_SHARED, which gets no huge pages.
            mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot map {length} bytes for an I/O buffer: {error}") from error
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        start = -base % alignment
        with contextlib.suppress(OSError):
            mapping.madvise(_MADV_WIPEONFORK)
        # Whole huge pages only, so that the memory in use never exceeds the requested size.
        huge_bytes = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if huge_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # EINVAL: a kernel built without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
        self._address = base + start
        self._view = memoryview(mapping)[start : start + nbytes]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self._view)

    @property
    def address(self) -> int:
        """Virtual address of the first byte."""
        return self._address

    @property
    def kind(self) -> BufferKind:
        """Kind of the memory, which is always ``"host"``."""
        return "host"

    def slice(self, start: int, nbytes: int) -> Self:
        """Return a buffer of `nbytes` bytes from `start`, which shares this memory.

        Raises:
            ValueError: The range is not within this buffer.
        """
        check_slice(start, nbytes, self.nbytes)
        part = type(self).__new__(type(self))
        part._address = self._address + start
        part._view = self._view[start : start + nbytes]
        return part

    def memoryview(self) -> memoryview:
        """Return a writable view of the bytes, which also keeps the memory alive."""
        return self._view[:]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nbytes} bytes at {self._address:#x})"


def host_buffer(backend: str, nbytes: int, kind: BufferKind | None) -> HostBuffer:
    """Return memory for a backend that has pageable host memory only, and refuses other kinds."""
    if kind not in (None, "host"):
        raise RefusedError(
            f"the {backend} backend allocates host memory only, not {kind!r} memory: use "
            "gds.kvikio.KvikioBackend on a machine with a GPU"
        )
    return HostBuffer(nbytes)


def check_slice(start: int, nbytes: int, whole_bytes: int) -> None:
    """Raise `ValueError` if `nbytes` bytes from `start` leave a buffer of `whole_bytes` bytes."""
    if start < 0 or nbytes < 0 or start + nbytes > whole_bytes:
        raise ValueError(
            f"bytes {start} to {start + nbytes} are not within a buffer of {whole_bytes} bytes"
        )
