"""Memory for what is read from a tier, used again as soon as nobody refers to it.

New memory for every request costs more processor time than the transfer itself: the kernel hands it
out page by page, each filled with zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress


class ReusedMemory:
    """Memory of requests that have ended, for the next ones; any thread may use it.

    At most as many blocks exist as are in use at a time. They are freed with this object.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> memoryview:
        """Return memory of some content.

        It is used again when the result, and everything that was made from it, is gone.

        Args:
            nbytes: Size in bytes, at least 1.
        """
        block = self._free.pop() if self._free else None
        if block is None or len(block) < nbytes:
            block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
        # A memoryview keeps what it was made from, and so do its slices.
        lent = (ctypes.c_ubyte * nbytes).from_buffer(block)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return memoryview(lent).cast("B")
