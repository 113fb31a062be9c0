"""A drive of a given speed: transfers of another backend, slowed down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gds import Backend, Buffer, File, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile

_THREADS = 16


class ThrottledBackend(WrapperBackend):
    """Lets through so many bytes a second, reads and writes together.

    Args:
        inner: Makes the transfers; faster than `gbps`.
        gbps: GB/s (1e9 bytes).
    """

    def __init__(self, inner: Backend, gbps: float) -> None:
        super().__init__(inner)
        self._rate = gbps * 1e9
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._threads = ThreadPoolExecutor(_THREADS, "throttle")

    def wrap_file(self, file: File) -> File:
        """Slow the transfers of a file down."""
        return _ThrottledFile(file, self)

    def pass_through(self, nbytes: int) -> None:
        """Wait until the drive would have moved so many more bytes."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + nbytes / self._rate
            until_s = self._free_at_s
        time.sleep(max(until_s - time.perf_counter(), 0.0))

    def run(self, transfer: Callable[[], IOFuture], nbytes: int) -> IOFuture:
        """Start a transfer that takes its share of the drive's time."""

        def move() -> int:
            future = transfer()
            self.pass_through(nbytes)
            return future.result()

        return self._threads.submit(move)

    def close(self) -> None:
        """Wait for transfers in flight, and close what is inside."""
        self._threads.shutdown()
        super().close()


class _ThrottledFile(WrapperFile):
    def __init__(self, inner: File, backend: ThrottledBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self._backend.run(lambda: self.inner.read(into, offset), into.nbytes)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        return self._backend.run(
            lambda: self.inner.read_again(into, offset, direct=direct), into.nbytes
        )

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return self._backend.run(lambda: self.inner.write(source, offset), source.nbytes)
