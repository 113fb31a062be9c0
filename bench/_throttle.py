"""Simulation of a drive of a given speed: a backend that slows another backend down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gds import Backend, Buffer, File, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile

_THREADS = 16


class ThrottledBackend(WrapperBackend):
    """Backend that passes a limited number of bytes per second, reads and writes together.

    Args:
        inner: Backend that makes the transfers, faster than `gbps`.
        gbps: Limit in GB/s (1e9 bytes per second).
    """

    def __init__(self, inner: Backend, gbps: float) -> None:
        super().__init__(inner)
        self._rate = gbps * 1e9
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._threads = ThreadPoolExecutor(_THREADS, "throttle")

    def wrap_file(self, file: File) -> File:
        """Return a file whose transfers are slowed down."""
        return _ThrottledFile(file, self)

    def pass_through(self, nbytes: int) -> None:
        """Wait until the simulated drive would have moved `nbytes` more bytes."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + nbytes / self._rate
            until_s = self._free_at_s
        time.sleep(max(until_s - time.perf_counter(), 0.0))

    def run(self, transfer: Callable[[], IOFuture], nbytes: int) -> IOFuture:
        """Start a transfer of `nbytes` that takes as long as on the simulated drive."""

        def move() -> int:
            """Make the transfer, and wait for the simulated drive."""
            future = transfer()
            self.pass_through(nbytes)
            return future.result()

        return self._threads.submit(move)

    def close(self) -> None:
        """Wait for transfers in flight, and close the inner backend."""
        self._threads.shutdown()
        super().close()


class _ThrottledFile(WrapperFile):
    def __init__(self, inner: File, backend: ThrottledBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Read as the inner file does, at the speed of the simulated drive."""
        return self._backend.run(lambda: self.inner.read(into, offset), into.nbytes)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        """Read again as the inner file does, at the speed of the simulated drive."""
        return self._backend.run(
            lambda: self.inner.read_again(into, offset, direct=direct), into.nbytes
        )

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Write as the inner file does, at the speed of the simulated drive."""
        return self._backend.run(lambda: self.inner.write(source, offset), source.nbytes)
