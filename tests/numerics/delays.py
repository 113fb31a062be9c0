"""Backends whose transfers take their time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gds import Buffer, File, IOFuture, MemoryBackend, WrapperBackend
from gds._wrapper import WrapperFile


class Disordered(WrapperBackend):
    """Transfers take random times and overtake each other."""

    def __init__(self, seed: int) -> None:
        super().__init__(MemoryBackend())
        self.random = random.Random(seed)
        self.pool = ThreadPoolExecutor(4)

    def wrap_file(self, file: File) -> File:
        return DisorderedFile(file, self)


class DisorderedFile(WrapperFile):
    def __init__(self, inner: File, backend: Disordered) -> None:
        super().__init__(inner)
        self.backend = backend
        self.in_flight: list[Future[int]] = []
        self.writes: list[Future[int]] = []

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self.later(lambda: self.inner.read(into, offset).result())

    def write(self, source: Buffer, offset: int) -> IOFuture:
        future = self.later(lambda: self.inner.write(source, offset).result())
        self.writes = [f for f in self.writes if not f.done()] + [future]
        return future

    def sync(self) -> None:
        # Reads may be in flight: the next step's are, from the very slot that is being sealed.
        assert all(future.done() for future in self.writes), "synced amid a write"
        super().sync()

    def close(self) -> None:
        for future in self.in_flight:
            future.exception()
        super().close()

    def later(self, transfer: Callable[[], int]) -> Future[int]:
        delay = self.backend.random.choice([0, 0, 0.0005, 0.002, 0.008])

        def move() -> int:
            time.sleep(delay)
            return transfer()

        future = self.backend.pool.submit(move)
        self.in_flight = [f for f in self.in_flight if not f.done()] + [future]
        return future


TIMEOUT_S = 20
"""Only reached where something that should happen does not."""


class Held(WrapperBackend):
    """Holds back reads of state at chosen places until they are released; may fail them, too.

    Places are chunks, if an array's chunk takes 4096 bytes, as one of 1024 FP32 values does.
    """

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.pool = ThreadPoolExecutor(8)
        self.held: set[int] = set()
        self.released = threading.Event()
        self.error: Exception | None = None
        self.reads: list[int] = []
        """In the order in which they were asked for."""
        self.ended: set[int] = set()

    def hold(self, *chunks: int) -> None:
        self.held, self.ended = set(chunks), set()
        self.released.clear()

    def release(self, error: Exception | None = None) -> None:
        self.error = error
        self.released.set()

    def wrap_file(self, file: File) -> File:
        return HeldFile(file, self)


class HeldFile(WrapperFile):
    def __init__(self, inner: File, backend: Held) -> None:
        super().__init__(inner)
        self.backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        backend = self.backend
        chunk = (offset - 1) // 4096 if offset % 4096 else offset // 4096 - 1
        backend.reads.append(chunk)

        def move() -> int:
            if chunk in backend.held:
                assert backend.released.wait(TIMEOUT_S), "nobody released it"
                if backend.error is not None:
                    raise backend.error
            done = self.inner.read(into, offset).result()
            backend.ended.add(chunk)
            return done

        return backend.pool.submit(move)
