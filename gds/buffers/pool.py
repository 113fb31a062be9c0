"""A fixed number of equal buffers, of any kind, made once and lent out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gds.contract import Buffer
from gds.waiting import Monitor

B = TypeVar("B", bound=Buffer)


class BufferPool(Generic[B]):
    """Lends buffers of one size; who finds none left waits until one comes back.

    They are made when they are first needed, by whatever makes them: host memory, page-locked or
    not, or a device's. Page-locking and registering cost milliseconds, so it is done once for each.
    The most memory that it takes is known before: `num_buffers` times `nbytes`.
    """

    def __init__(self, allocate: Callable[[int], B], nbytes: int, num_buffers: int) -> None:
        """Make an empty pool; nothing is allocated yet.

        Args:
            allocate: Makes a buffer of so many bytes.
            nbytes: Of each buffer.
            num_buffers: Most that there will be.

        Raises:
            ValueError: There would be no buffer, or none of any use.
        """
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
        """Most buffers that there are at once."""
        return self._num_buffers

    def resize(self, num_buffers: int) -> None:
        """Change how many there may be. Those that are too many go as they come back."""
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
        """Lend a buffer for the body; its contents are what the last borrower left.

        Raises:
            MemoryError: There is none left, and no memory for another.
        """
        buffer = self._take()
        try:
            yield buffer
        finally:
            self._give_back(buffer)

    def clear(self) -> None:
        """Drop the buffers that are not lent out."""
        with self._changed:
            self._num_made -= len(self._free)
            self._free.clear()

    def _take(self) -> B:
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
        """Return a free buffer, or None if one may be made, in a tuple; just None if neither."""
        if self._free:
            return (self._free.pop(),)
        if self._num_made < self._num_buffers:
            self._num_made += 1
            return (None,)
        return None

    def _give_back(self, buffer: B) -> None:
        with self._changed:
            if self._num_made > self._num_buffers:
                self._num_made -= 1
            else:
                self._free.append(buffer)
            self._changed.notify_all()
