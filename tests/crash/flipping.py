"""A backend whose reads flip a bit on the way, as bad memory or a bad cable does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

from gds import Backend, Buffer, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File

Way = Literal["read", "read_again", "read_bytes"]


class FlippingBackend(WrapperBackend):
    """Flips one bit of what is read from some files; what is stored stays as it is."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.flips = ""
        """The end of their paths; empty for none."""
        self.ways: tuple[Way, ...] = ("read", "read_bytes")
        """Which reads are wrong."""
        self.left = -1
        """How many more of them; negative for all."""
        self.spared = 0
        """Which of the wrong ones is right all the same, counted from 1; 0 for none."""
        self.right_first = 0
        """How many of the wrong ones are right before that."""
        self.num_flipped: Counter[Way] = Counter()
        self.ways_again: set[Literal["same", "other"]] = set()
        """Whether second reads were to go the way of the first ones, past the page cache or not."""
        self._lock = threading.Lock()

    def due(self, way: Way, path: str) -> bool:
        """Return whether a read is to be wrong, and count it."""
        with self._lock:
            if not self.flips or not path.endswith(self.flips) or way not in self.ways:
                return False
            if self.right_first or self.left == 0:
                self.right_first = max(0, self.right_first - 1)
                return False
            self.left -= 1
            self.spared -= 1
            if self.spared == 0:
                return False
            self.num_flipped[way] += 1
            return True

    def wrap_file(self, file: File) -> File:
        """Return a file whose reads may be wrong."""
        return _FlippingFile(file, self)


class _FlippingFile(WrapperFile):
    def __init__(self, inner: File, backend: FlippingBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self._flipped("read", super().read(into, offset), into)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        self._backend.ways_again.add("same" if direct == self.direct else "other")
        return self._flipped("read_again", super().read_again(into, offset, direct=direct), into)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        data = super().read_bytes(offset, nbytes)
        if nbytes and self._backend.due("read_bytes", self.path):
            # Not in the padding at the end, where a text may be the same without it.
            return data[:20] + bytes([data[20] ^ 0x08]) + data[21:]
        return data

    def _flipped(self, way: Way, future: IOFuture, into: Buffer) -> IOFuture:
        future.result()
        if into.nbytes and self._backend.due(way, self.path):
            memory = getattr(into, "hidden", into).memoryview()  # also where a device is played
            memory[min(20, len(memory) - 1)] ^= 0x40
        return future
