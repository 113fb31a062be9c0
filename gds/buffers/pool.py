"""Pool of buffers of one size, which are allocated once and lent out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gds.contract import Buffer
from gds.waiting import Monitor

B = TypeVar("B", bound=Buffer)


class BufferPool(Generic[B]):
    """Lends buffers of one size; a borrower waits while all of them are lent out.

    The buffers may be of any kind: host memory, page-locked or not, or device memory. Page-locking
    and registration take milliseconds, so each buffer is kept for the next borrower. The pool holds
    at most `num_buffers` times `nbytes` bytes. All methods may be called from any thread.
    """

    def __init__(self, allocate: Callable[[int], B], nbytes: int, num_buffers: int) -> None:
        """Make an empty pool, whose buffers `allocate` makes when they are first needed."""
        if nbytes < 1 or num_buffers < 1:
            raise ValueError(
                f"a pool needs at least one buffer of one byte, not {num_buffers} of {nbytes}"
            )
        self._allocate = allocate
        self.nbytes = nbytes
        self._free: list[B] = []
        self._num_made = 0
        self._num_buffers = num_buffers
        self._changed = Monitor()

    @property
    def num_buffers(self) -> int:
        """Largest number of buffers that exist at once."""
        return self._num_buffers

    def resize(self, num_buffers: int) -> None:
        """Change the largest number of buffers, without waiting.

        Excess buffers are dropped: free ones at once, lent ones when they come back.
        """
        if num_buffers < 1:
            raise ValueError(f"a pool needs at least one buffer, not {num_buffers}")
        with self._changed:
            self._num_buffers = num_buffers
            while self._free and self._num_made > num_buffers:
                self._free.pop()
                self._num_made -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[B]:
        """Lend a buffer for the body; it holds the bytes that the last borrower left in it.

        Raises:
            MemoryError: No buffer is free, and there is no memory for another.
        """
        buffer = self._take()
        try:
            yield buffer
        finally:
            self._give_back(buffer)

    def clear(self) -> None:
        """Drop the buffers that are not lent out. The pool can still be used."""
        with self._changed:
            self._num_made -= len(self._free)
            self._free.clear()

    def _take(self) -> B:
        """Wait for a free buffer or for room for another one, and return the buffer."""
        (free,) = self._changed.wait_until(self._claim)
        if free is not None:
            return free
        try:
            return self._allocate(self.nbytes)
        except BaseException:
            with self._changed:
                self._num_made -= 1
                self._changed.notify_all()
            raise

    def _claim(self) -> tuple[B | None] | None:
        """Return ``(buffer,)`` if one is free, ``(None,)`` if one may be allocated, else None.

        The caller holds the lock. A buffer that may be allocated is already counted.
        """
        if self._free:
            return (self._free.pop(),)
        if self._num_made < self._num_buffers:
            self._num_made += 1
            return (None,)
        return None

    def _give_back(self, buffer: B) -> None:
        """Return a borrowed buffer to the pool, or drop it if there are too many."""
        with self._changed:
            if self._num_made > self._num_buffers:
                self._num_made -= 1
            else:
                self._free.append(buffer)
            self._changed.notify_all()
