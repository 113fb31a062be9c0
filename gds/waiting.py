"""Waits for other threads that an interrupt (Ctrl-C) cannot break.

Python runs signal handlers on the main thread, between two steps of Python code: at the start of a
function, after the return of a function written in C, and at the jump back in a loop. A handler
may raise, as the handler of Ctrl-C does. `threading.Condition` is written in Python: if its
acquisition or its release is interrupted, its lock may stay held for ever, and every thread that
needs the lock stops. Everything built from conditions has the same weakness:
`concurrent.futures.Future`, `threading.Event`, `threading.Barrier`, and the start of a thread.

This module only uses locks written in C, and takes them only by ``with``: no handler runs between
the acquisition and the body, or between the body and the release. No thread waits while it holds a
lock, either. A waiting thread leaves a *ticket*, a lock that is already acquired, and acquires it
once more. The thread that changes the state releases the ticket.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

_log = logging.getLogger("gds")

T = TypeVar("T")

_LOST_S = 1.0
"""Seconds after which a waiting thread checks the state again. If the thread that changes the state
is interrupted before its notification, the others wait this long instead of for ever."""


class Monitor(_thread.RLock):  # type: ignore[misc]  # final in the stubs only
    """A reentrant lock, taken by ``with``, and a way to wait for a change of the guarded state."""

    def __init__(self) -> None:
        super().__init__()
        self._tickets: list[threading.Lock] = []

    def wait_until(self, reached: Callable[[], T | None]) -> T:
        """Call `reached` under the lock until it returns a true value, and return that value.

        `reached` is called at once, after each `notify_all`, and at least once a second. The lock
        is free between the calls, so the caller must not hold it.

        Raises:
            RuntimeError: The caller holds the lock.
        """
        if self._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("the caller must not hold the lock when it waits")
        ticket = None
        while True:
            with self:
                if found := reached():
                    return found
                if ticket is None:
                    ticket = _ticket()
                    self._tickets.append(ticket)
            if ticket.acquire(timeout=_LOST_S):
                ticket = None

    def notify_all(self) -> None:
        """Make all waiting threads check the state again. The caller holds the lock."""
        while self._tickets:
            self._tickets.pop().release()


class Pending(Generic[T]):
    """The outcome of another thread's work: a value or an error, set once.

    It has the methods of `concurrent.futures.Future` for waiting and for setting the outcome. It
    cannot be cancelled. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._done = False
        self._value: T
        self._error: BaseException | None = None
        self._tickets: list[threading.Lock] = []
        self._callbacks: list[Callable[[Pending[T]], object]] = []

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the outcome is known, at most `timeout` seconds; return whether it is."""
        if self._done:
            return True
        ticket = _ticket()
        with self._lock:
            if self._done:
                return True
            self._tickets.append(ticket)
        return ticket.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome, at most `timeout` seconds; return the value, or raise the error."""
        if not self.wait(timeout):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome and return the error; None if the outcome is a value."""
        if not self.wait(timeout):
            raise TimeoutError
        return self._error

    def add_done_callback(self, fn: Callable[[Pending[T]], object]) -> None:
        """Call ``fn(self)`` on the thread that sets the outcome; at once if the outcome is known.

        An `Exception` that `fn` raises is logged.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def set_result(self, value: T) -> None:
        """Set the outcome to a value, then call the callbacks."""
        with self._lock:
            self._require_unknown()
            self._value = value
            self._done = True
        self._announce()

    def set_exception(self, error: BaseException) -> None:
        """Set the outcome to an error, then call the callbacks."""
        with self._lock:
            self._require_unknown()
            self._error = error
            self._done = True
        self._announce()

    def _require_unknown(self) -> None:
        if self._done:
            raise RuntimeError("the outcome is already set")

    def _announce(self) -> None:
        while self._tickets:
            self._tickets.pop().release()
        while self._callbacks:
            self._call(self._callbacks.pop(0))

    def _call(self, fn: Callable[[Pending[T]], object]) -> None:
        try:
            fn(self)
        except Exception:  # noqa: BLE001  (futures of the standard library log it as well)
            _log.exception("a callback of %r failed", self)


def wait(pending: Iterable[Pending[T]]) -> None:
    """Wait until all outcomes are known."""
    for one in pending:
        one.wait()


def start(*threads: threading.Thread) -> None:
    """Start threads so that an interrupt cannot stop one of them before it begins its work.

    `threading.Thread.start` waits for the new thread through an event, whose lock both threads
    need. Only the main thread is interrupted. So if the main thread calls this, a helper thread
    starts the others. All of them start even if this call is interrupted.

    Raises:
        RuntimeError: A thread cannot be started; the threads before it have been started.
    """
    if threading.get_ident() != threading.main_thread().ident:
        _start(threads)
        return
    started: Pending[None] = Pending()

    def start_all() -> None:
        try:
            _start(threads)
        except BaseException as error:  # noqa: BLE001  (the waiting thread raises it)
            started.set_exception(error)
        else:
            started.set_result(None)

    try:
        _thread.start_new_thread(start_all, ())
        started.wait()
    except RuntimeError:
        raise
    except BaseException:
        started.wait()
        raise
    started.result()


def _start(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()


def _ticket() -> threading.Lock:
    """Return a new lock that is already acquired."""
    lock = threading.Lock()
    lock.acquire()
    return lock
