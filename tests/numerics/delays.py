"""Backends whose transfers take their time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from gds import Buffer, File, IOFuture, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from tests.eventually import TIMEOUT_S


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


class Late(WrapperBackend):
    """Reads take their time: a step that nobody waits for goes on for a while."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__(MemoryBackend())
        self.seconds = seconds
        self.pool = ThreadPoolExecutor(4)

    def wrap_file(self, file: File) -> File:
        return LateFile(file, self)


class LateFile(WrapperFile):
    def __init__(self, inner: File, backend: Late) -> None:
        super().__init__(inner)
        self.backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        def move() -> int:
            time.sleep(self.backend.seconds)
            return self.inner.read(into, offset).result()

        return self.backend.pool.submit(move)


class Hold:
    """A time during which reads of some chunks are held back."""

    def __init__(self, chunks: Iterable[int] = ()) -> None:
        self.chunks = frozenset(chunks)
        self.released = threading.Event()
        self.error: Exception | None = None


class Held(WrapperBackend):
    """Holds back reads of state at chosen places until they are released; may fail them, too.

    Places are chunks, if an array's chunk takes 4096 bytes, as one of 1024 FP32 values does. A read
    is held back if its chunk was when it was asked for, whenever a thread comes to it.
    """

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.pool = ThreadPoolExecutor(8)
        self.holds = [Hold()]
        self.reads: list[int] = []
        """In the order in which they were asked for."""
        self.ended: set[int] = set()

    def hold(self, *chunks: int) -> None:
        self.holds.append(Hold(chunks))
        self.ended = set()

    def release(self, error: Exception | None = None) -> None:
        for hold in self.holds:
            if not hold.released.is_set():
                hold.error = error
                hold.released.set()

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
        hold = backend.holds[-1]

        def move() -> int:
            if chunk in hold.chunks:
                assert hold.released.wait(TIMEOUT_S), "nobody released it"
                if hold.error is not None:
                    raise hold.error
            done = self.inner.read(into, offset).result()
            backend.ended.add(chunk)
            return done

        return backend.pool.submit(move)


class Gate(WrapperBackend):
    """While it is closed, a seal waits before each write of parameters."""

    def __init__(self, inner: MemoryBackend | None = None) -> None:
        super().__init__(inner or MemoryBackend())
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()

    def close_gate(self) -> None:
        self.opened.clear()
        self.reached.clear()

    def wrap_file(self, file: File) -> File:
        return GatedFile(file, self)


class GatedFile(WrapperFile):
    def __init__(self, inner: File, gate: Gate) -> None:
        super().__init__(inner)
        self.gate = gate

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self.path.endswith("model.safetensors"):
            self.gate.reached.set()
            assert self.gate.opened.wait(TIMEOUT_S)
        return super().write(source, offset)
