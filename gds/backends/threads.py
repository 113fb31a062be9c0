"""Thread pools that run transfers, and meters that count the transfers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from gds.contract import Counters
from gds.waiting import Pending, start

Part: TypeAlias = Callable[[], int]
"""Function that moves a part of a transfer, or all of it, and returns the number of bytes moved."""

_Job: TypeAlias = tuple["Transfer", Part]


class TransferPool:
    """A few threads that begin transfers in the order of submission.

    The threads start with the first transfer. They are daemons: transfers in progress do not keep
    a program from ending. A transfer blocks in one system call without the GIL, so the cost of the
    threads is negligible. All methods may be called from any thread.
    """

    def __init__(
        self, name: str, num_threads: int, begin: Callable[[], object] | None = None
    ) -> None:
        """Make a pool, whose name is that of its threads. Each calls `begin` first."""
        self._name = name
        self._begin = begin
        self.num_threads = check_threads(name, num_threads)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, *parts: Part, succeeded: Callable[[int], object] | None = None) -> Transfer:
        """Run the parts of a transfer, at least one, on the threads.

        The parts begin in order, and may run at the same time. The future resolves when all have
        ended, with the sum of their results. The first error of a part becomes the future's error,
        and parts that have not begun before it are not run. The queue keeps a part, and the objects
        it refers to, alive until the part has ended. After an error of this call, such as an
        interrupt, no part is running or will run.

        Args:
            parts: Parts of the transfer.
            succeeded: Called with the result just before the future resolves, unless the transfer
                failed.
        """
        transfer = Transfer(len(parts), succeeded)
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{self._name} is closed")
                if not self._threads:
                    self._start(self.num_threads)
                for part in parts:
                    self._queue.put((transfer, part))
        except BaseException:
            transfer.abandon()
            raise
        return transfer

    def resize(self, num_threads: int) -> None:
        """Change the number of threads, without waiting.

        Additional threads start at once. Excess threads end after all queued parts have begun.
        """
        check_threads(self._name, num_threads)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            change, self.num_threads = num_threads - self.num_threads, num_threads
            if not self._threads:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._start(change)
            for _ in range(-change):
                self._queue.put(None)

    def stop(self) -> None:
        """Make the threads end after all queued transfers, without waiting for them. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._threads:
                    for _ in range(self.num_threads):
                        self._queue.put(None)

    def close(self) -> None:
        """Stop, and wait until all queued transfers have resolved. Idempotent."""
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a transfer's callback closes the pool
                thread.join()

    def _start(self, num_threads: int) -> None:
        names = [f"{self._name}-{len(self._threads) + number}" for number in range(num_threads)]
        work = partial(_work, self._queue, self._begin)
        threads = [threading.Thread(target=work, name=name, daemon=True) for name in names]
        self._threads += threads
        try:
            start(*threads)
        except BaseException:  # after an error no further thread starts
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            raise


def check_threads(name: str, num_threads: int) -> int:
    """Return `num_threads`; raises `ValueError` if it is less than 1. `name` is for the message."""
    if num_threads < 1:
        raise ValueError(f"{name} needs at least one thread, not {num_threads}")
    return num_threads


class Transfer(Pending[int]):
    """A transfer in progress, with the state of its parts. Its future cannot be cancelled."""

    def __init__(self, num_parts: int, succeeded: Callable[[int], object] | None) -> None:
        super().__init__()
        self._succeeded = succeeded
        self._num_left = num_parts
        """Number of parts that have not ended and are not left out by `abandon`."""
        self._num_running = 0
        self._num_bytes = 0
        self._failure: BaseException | None = None
        self._is_abandoned = False

    def begins(self) -> bool:
        """Record that a part is about to run; returns False if the part must not run."""
        with self._lock:
            if self._is_abandoned:
                return False
            self._num_running += 1
            return True

    @property
    def has_failed(self) -> bool:
        """Whether a part has failed, so that the remaining parts need not run."""
        return self._failure is not None

    def abandon(self) -> None:
        """Leave out all parts that have not begun, and wait for the parts that are running."""
        with self._lock:
            self._is_abandoned = True
            if self._failure is None:
                self._failure = RuntimeError("the transfer was abandoned")
            # If parts are running, the last of them to end resolves the future.
            is_last = not self._num_running and self._num_left
            self._num_left = self._num_running
        if is_last:
            self.set_exception(self._failure)
        self.wait()

    def ended(self, nbytes: int, error: BaseException | None) -> None:
        """Record the end of a part, with the bytes that it moved or its error.

        The last part resolves the future, because until then the other parts use the memory.
        """
        with self._lock:
            self._num_bytes += nbytes
            if self._failure is None:
                self._failure = error
            self._num_running -= 1
            self._num_left -= 1
            if self._num_left:
                return
        if self._failure is not None:
            self.set_exception(self._failure)
            return
        if self._succeeded is not None:
            self._succeeded(self._num_bytes)
        self.set_result(self._num_bytes)


def _work(queue: SimpleQueue[_Job | None], begin: Callable[[], object] | None) -> None:
    """Run parts from the queue until it yields None; keeps no backend from being collected."""
    if begin is not None:
        begin()
    while (job := queue.get()) is not None:
        _run(*job)
        del job  # otherwise the buffer would stay alive until the next transfer


def _run(transfer: Transfer, part: Part) -> None:
    nbytes, caught = 0, None
    try:
        if not transfer.begins():
            return
        if not transfer.has_failed:
            try:
                nbytes = part()
            except BaseException as error:  # noqa: BLE001 - `result` raises it
                caught = error
        transfer.ended(nbytes, caught)
    finally:
        # An error's traceback refers to this frame; a failed future must not refer to itself.
        del transfer, part, caught


class Meter:
    """Counts transfers in one direction, and measures how long at least one is running.

    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._nbytes = 0
        self._count = 0

    @contextlib.contextmanager
    def transfer(self, nbytes: int) -> Iterator[None]:
        """Run the body as one transfer of `nbytes` bytes; it counts only if the body succeeds."""
        with self.running():
            yield
            self.count(nbytes)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time of the body, a transfer or a part of one; `count` counts transfers."""
        with self._lock:
            if self._active == 0:
                self._since_s = time.perf_counter()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._busy_s += time.perf_counter() - self._since_s

    def count(self, nbytes: int) -> None:
        """Count one finished transfer of `nbytes` bytes."""
        with self._lock:
            self._nbytes += nbytes
            self._count += 1

    def totals(self) -> tuple[int, int, float]:
        """Return bytes, number of transfers, and seconds during which at least one was running."""
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._active else 0.0
            return self._nbytes, self._count, self._busy_s + running_s


class Meters(dict[str, Meter]):
    """The meters of a backend: of the directions ``read`` and ``write``, and of ``sync``."""

    def __init__(self) -> None:
        super().__init__(read=Meter(), write=Meter(), sync=Meter())

    def counters(self) -> Counters:
        """Return the totals so far."""
        bytes_read, num_reads, read_s = self["read"].totals()
        bytes_written, num_writes, write_s = self["write"].totals()
        _, num_syncs, _ = self["sync"].totals()
        return Counters(
            bytes_read, bytes_written, num_reads, num_writes, num_syncs, read_s, write_s
        )
