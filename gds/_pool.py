"""Threads that run transfers, and the meters that count them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeAlias

Part: TypeAlias = Callable[[], int]
"""Moves a part of a transfer, or all of it, and returns how many bytes that was."""

_Job: TypeAlias = tuple["_Transfer", Part]


class TransferPool:
    """A few threads that run transfers in the order of submission.

    The threads start with the first transfer and are daemons: a program that ends with transfers
    under way ends, as it would with any write that it did not wait for. A transfer blocks in one
    system call without the GIL, so threads cost nothing next to it.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = check_threads(name, num_threads)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def num_threads(self) -> int:
        """How many transfers, or parts of transfers, run at once."""
        return self._num_threads

    def submit(self, *parts: Part, succeeded: Callable[[int], object] | None = None) -> Future[int]:
        """Run the parts of a transfer on the threads; resolves when all of them have ended.

        The result is the sum of theirs. Of several errors the first becomes the future's, and
        parts that had not begun by then are not run. The queue holds the parts, and whatever they
        refer to, until each has ended.

        Args:
            parts: At least one. They are begun in this order, and may run at the same time.
            succeeded: Called with the result just before the future resolves, if that is not to
                an error.

        Raises:
            RuntimeError: The pool is closed; no part has been queued.
        """
        transfer = _Transfer(len(parts), succeeded)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if not self._threads:
                self._start(self._num_threads)
            for part in parts:
                self._queue.put((transfer, part))
        return transfer.future

    def resize(self, num_threads: int) -> None:
        """Change the number of threads, without waiting.

        Growing takes effect at once. Shrinking does when what is queued now has been begun: the
        threads that are too many end then, each after the transfer that it is running.

        Raises:
            RuntimeError: The pool is closed.
        """
        check_threads(self._name, num_threads)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            change, self._num_threads = num_threads - self._num_threads, num_threads
            if not self._threads:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._start(change)
            for _ in range(-change):
                self._queue.put(None)

    def stop(self) -> None:
        """Let the threads end after what is queued, without waiting for them. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._threads:
                    for _ in range(self._num_threads):
                        self._queue.put(None)

    def close(self) -> None:
        """Stop, and wait until all queued transfers have resolved. Idempotent."""
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():  # closed from a transfer's callback
                thread.join()

    def _start(self, num_threads: int) -> None:
        for _ in range(num_threads):
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)


def check_threads(name: str, num_threads: int) -> int:
    """Return `num_threads`; raises `ValueError` if a pool of that name cannot work with it."""
    if num_threads < 1:
        raise ValueError(f"{name} needs at least one thread, not {num_threads}")
    return num_threads


class _Transfer:
    """A future, and what has become of the parts that it waits for."""

    __slots__ = ("_lock", "_nbytes", "_num_left", "_succeeded", "error", "future")

    def __init__(self, num_parts: int, succeeded: Callable[[int], object] | None) -> None:
        self.future: Future[int] = Future()
        # From the start "running", so that cancel() can never leave a transfer half wanted.
        self.future.set_running_or_notify_cancel()
        self.error: BaseException | None = None
        self._succeeded = succeeded
        self._lock = threading.Lock()
        self._num_left = num_parts
        self._nbytes = 0

    def ended(self, nbytes: int, error: BaseException | None) -> None:
        """Take note of a part's end. The last one resolves the future: memory is in use till then.

        Args:
            nbytes: How many bytes the part moved.
            error: Why it did not move all of them, or None.
        """
        with self._lock:
            self._nbytes += nbytes
            if self.error is None:
                self.error = error
            self._num_left -= 1
            if self._num_left:
                return
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        if self._succeeded is not None:
            self._succeeded(self._nbytes)
        self.future.set_result(self._nbytes)


def _work(queue: SimpleQueue[_Job | None]) -> None:
    # Refers to the queue alone, so that a backend that was dropped unclosed can be collected.
    while (job := queue.get()) is not None:
        _run(*job)
        del job  # or the buffer would live until the next transfer


def _run(transfer: _Transfer, part: Part) -> None:
    nbytes, caught = 0, None
    try:
        if transfer.error is None:
            try:
                nbytes = part()
            except BaseException as error:  # noqa: BLE001 - it is for whoever waits
                caught = error
        transfer.ended(nbytes, caught)
    finally:
        # The traceback holds this frame: without this a failed future would refer to itself.
        del transfer, part, caught


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
        with self.running():
            yield
            self.count(nbytes)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the body as a transfer, or a part of one, that will be counted elsewhere."""
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
        """Return bytes, number of transfers, and busy seconds up to now."""
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._active else 0.0
            return self._nbytes, self._count, self._busy_s + running_s
