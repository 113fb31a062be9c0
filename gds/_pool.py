"""Threads that run transfers, and the meters that count them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeAlias

_Job: TypeAlias = tuple["Future[int]", Callable[[], int]]


class TransferPool:
    """A few threads that run transfers in the order of submission.

    The threads start with the first transfer and are daemons: a program that ends with transfers
    under way ends, as it would with any write that it did not wait for. A transfer blocks in one
    system call without the GIL, so threads cost nothing next to it.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"{name} needs at least one thread, not {num_threads}")
        self._name = name
        self._num_threads = num_threads
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, transfer: Callable[[], int]) -> Future[int]:
        """Run `transfer` on a thread; its result or exception becomes the future's.

        The queue holds `transfer`, and whatever it refers to, until the future has resolved.

        Raises:
            RuntimeError: The pool is closed.
        """
        future: Future[int] = Future()
        # From the start "running", so that cancel() can never leave a transfer half wanted.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if not self._threads:
                self._start()
            self._queue.put((future, transfer))
        return future

    def stop(self) -> None:
        """Let the threads end after what is queued, without waiting for them. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)

    def close(self) -> None:
        """Stop, and wait until all queued transfers have resolved. Idempotent."""
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():  # closed from a transfer's callback
                thread.join()

    def _start(self) -> None:
        for number in range(self._num_threads):
            thread = threading.Thread(
                target=_work, args=(self._queue,), name=f"{self._name}-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)


def _work(queue: SimpleQueue[_Job | None]) -> None:
    # Refers to the queue alone, so that a backend that was dropped unclosed can be collected.
    while (job := queue.get()) is not None:
        _run(*job)
        del job  # or the buffer would live until the next transfer


def _run(future: Future[int], transfer: Callable[[], int]) -> None:
    try:
        try:
            nbytes = transfer()
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            future.set_exception(error)
        else:
            future.set_result(nbytes)
    finally:
        # The traceback holds this frame: without this a failed future would refer to itself.
        del future, transfer


class Meter:
    """Counts transfers in one direction, and the time during which at least one ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._nbytes = 0
        self._count = 0

    @contextlib.contextmanager
    def transfer(self, nbytes: int) -> Iterator[None]:
        """Run the body as one transfer of `nbytes` bytes; counted only if it does not raise."""
        with self._lock:
            if self._active == 0:
                self._since_s = time.perf_counter()
            self._active += 1
        moved, finished = 0, 0
        try:
            yield
            moved, finished = nbytes, 1
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._busy_s += time.perf_counter() - self._since_s
                self._nbytes += moved
                self._count += finished

    def totals(self) -> tuple[int, int, float]:
        """Return bytes, number of transfers, and busy seconds up to now."""
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._active else 0.0
            return self._nbytes, self._count, self._busy_s + running_s
