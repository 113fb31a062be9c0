"""Threads that run transfers, and the meters that count them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from gds.waiting import Pending, start

Part: TypeAlias = Callable[[], int]
"""Moves a part of a transfer, or all of it, and returns how many bytes that was."""

_Job: TypeAlias = tuple["Transfer", Part]


class TransferPool:
    """A few threads that run transfers in the order of submission.

    The threads start with the first transfer and are daemons: a program that ends with transfers
    under way ends, as it would with any write that it did not wait for. A transfer blocks in one
    system call without the GIL, so threads cost nothing next to it.
    """

    def __init__(
        self, name: str, num_threads: int, begin: Callable[[], object] | None = None
    ) -> None:
        """Make a pool; `begin` is called on each of its threads before the first transfer."""
        self._name = name
        self._begin = begin
        self._num_threads = check_threads(name, num_threads)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def num_threads(self) -> int:
        """How many transfers, or parts of transfers, run at once."""
        return self._num_threads

    def submit(self, *parts: Part, succeeded: Callable[[int], object] | None = None) -> Transfer:
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
            BaseException: An interrupt; no part runs any more, or will.
        """
        transfer = Transfer(len(parts), succeeded)
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{self._name} is closed")
                if not self._threads:
                    self._start(self._num_threads)
                for part in parts:
                    self._queue.put((transfer, part))
        except BaseException:
            transfer.abandon()
            raise
        return transfer

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
        names = [f"{self._name}-{len(self._threads) + number}" for number in range(num_threads)]
        work = partial(_work, self._queue, self._begin)
        threads = [threading.Thread(target=work, name=name, daemon=True) for name in names]
        self._threads += threads
        try:
            start(*threads)
        except BaseException:  # behind which none of them starts any more
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            raise


def check_threads(name: str, num_threads: int) -> int:
    """Return `num_threads`; raises `ValueError` if a pool of that name cannot work with it."""
    if num_threads < 1:
        raise ValueError(f"{name} needs at least one thread, not {num_threads}")
    return num_threads


class Transfer(Pending[int]):
    """A transfer in progress, and what has become of its parts. It cannot be cancelled."""

    def __init__(self, num_parts: int, succeeded: Callable[[int], object] | None) -> None:
        super().__init__()
        self._succeeded = succeeded
        self._num_left = num_parts
        """Parts that have not ended and are not left out."""
        self._num_running = 0
        self._num_bytes = 0
        self._failure: BaseException | None = None
        self._is_abandoned = False

    def begins(self) -> bool:
        """Take note that a part is about to run; False if it must not any more."""
        with self._lock:
            if self._is_abandoned:
                return False
            self._num_running += 1
            return True

    @property
    def has_failed(self) -> bool:
        """Whether a part has failed, so that others need not run."""
        return self._failure is not None

    def abandon(self) -> None:
        """Leave out all parts that have not begun, and wait for those that have."""
        with self._lock:
            self._is_abandoned = True
            if self._failure is None:
                self._failure = RuntimeError("the transfer was abandoned")
            is_last = not self._num_running and self._num_left  # else the last part resolves it
            self._num_left = self._num_running
        if is_last:
            self.set_exception(self._failure)
        self.wait()

    def ended(self, nbytes: int, error: BaseException | None) -> None:
        """Take note of a part's end. The last one resolves the future: memory is in use till then.

        Args:
            nbytes: How many bytes the part moved.
            error: Why it did not move all of them, or None.
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
    # Refers to the queue alone, so that a backend that was dropped unclosed can be collected.
    if begin is not None:
        begin()
    while (job := queue.get()) is not None:
        _run(*job)
        del job  # or the buffer would live until the next transfer


def _run(transfer: Transfer, part: Part) -> None:
    nbytes, caught = 0, None
    try:
        if not transfer.begins():
            return
        if not transfer.has_failed:
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
