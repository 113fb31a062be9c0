"""A few threads that carry out transfers, each with one buffer of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from gds import Buffer
from gds.waiting import start

Task: TypeAlias = Callable[[Buffer], None]
"""One transfer. It is given a buffer, which belongs to it until it returns."""

_POLL_S = 0.1
"""Seconds after which the waiting thread looks whether it was interrupted."""

_LAST_WAIT_S = 1.0
"""Seconds that an error or an interrupt waits for transfers in progress. Threads whose servers do
not answer are left behind: they end with their request, and do nothing more."""


def run_all(
    tasks: Iterable[Task],
    num_workers: int,
    make_buffer: Callable[[], Buffer],
    require_going_on: Callable[[], None] = lambda: None,
) -> None:
    """Carry out tasks in their order, several at a time, and wait for all of them.

    If a task fails, no further task is begun, and the first error is raised.
    """
    work = _Work(iter(tasks), make_buffer)
    threads = [
        threading.Thread(target=work.run, name=f"offload tier {number}", daemon=True)
        for number in range(num_workers)
    ]
    try:
        start(*threads)
        for _ in threads:
            while True:
                try:
                    error = work.ended.get(timeout=_POLL_S)
                    break
                except queue.Empty:
                    require_going_on()
            if error is not None:
                raise error
    finally:
        work.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_LAST_WAIT_S)


class _Work:
    """Tasks that the threads share."""

    def __init__(self, tasks: Iterable[Task], make_buffer: Callable[[], Buffer]) -> None:
        self._tasks = iter(tasks)
        self._make_buffer = make_buffer
        self._lock = threading.Lock()
        self._stopped = False
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """For each thread that has ended, its error or None."""

    def run(self) -> None:
        """Carry out tasks until there are none, or until one has failed."""
        try:
            buffer: Buffer | None = None
            while (task := self._next()) is not None:
                if buffer is None:
                    buffer = self._make_buffer()
                task(buffer)
        except BaseException as error:  # noqa: BLE001  (raised by the waiting thread)
            self.stop()
            self.ended.put(error)
        else:
            self.ended.put(None)

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)

    def stop(self) -> None:
        """Begin no further task."""
        with self._lock:
            self._stopped = True
