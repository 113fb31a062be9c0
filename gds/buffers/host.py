"""Host memory for transfers: page-aligned, zeroed, on huge pages where the kernel has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final, Self

from gds.contract import ALIGNMENT, BufferKind
from gds.errors import RefusedError

HUGE_PAGE_BYTES: Final = 2 << 20
"""A direct transfer of 4 KiB pages reaches the device in many small pieces; measured, huge pages
nearly double the rate."""

_MADV_WIPEONFORK: Final = 18


class HostBuffer:
    """Zeroed, private, pageable memory; a slice shares it and keeps it alive.

    Aligned to 2 MiB from that size on, to 4096 bytes below, and returned to the system when the
    last buffer, slice or view of it is gone.

    A forked child sees zeros instead of the contents: otherwise each data-loader worker would
    double the memory of a ring that is being written, and the kernel forbids a fork during a
    direct transfer into memory that the child inherits (open(2), NOTES).
    """

    __slots__ = ("__weakref__", "_address", "_view")

    def __init__(self, nbytes: int) -> None:
        """Map `nbytes` bytes.

        Raises:
            ValueError: `nbytes` is negative.
            MemoryError: The system has no such range to give.
        """
        if nbytes < 0:
            raise ValueError(f"a buffer cannot have {nbytes} bytes")
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else ALIGNMENT
        # The kernel aligns a mapping to 4096 only; the spare part is address space, never touched.
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
        # Whole huge pages only, so that memory in use never exceeds what was asked for.
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
        """Always ``"host"``."""
        return "host"

    def slice(self, start: int, nbytes: int) -> Self:
        """Return the `nbytes` bytes from `start`, sharing this memory.

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
    """Return memory for a backend that has no other than this.

    Raises:
        RefusedError: Another kind is asked for; names the backend.
    """
    if kind not in (None, "host"):
        raise RefusedError(
            f"the {backend} backend has host memory only, and {kind!r} memory was asked for: "
            "gds.kvikio.KvikioBackend has it, on a machine with a GPU"
        )
    return HostBuffer(nbytes)


def check_slice(start: int, nbytes: int, whole_bytes: int) -> None:
    """Raise `ValueError` if `nbytes` bytes from `start` are not within a buffer of that size."""
    if start < 0 or nbytes < 0 or start + nbytes > whole_bytes:
        raise ValueError(
            f"bytes {start} to {start + nbytes} are not within a buffer of {whole_bytes} bytes"
        )
