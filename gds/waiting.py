"""Waiting for other threads so that an interrupt (Ctrl-C) can neither break the wait nor others'.

Python runs the handlers of signals on the main thread, between two steps of Python code: where a
function begins, where one that is written in C has returned, and where a loop turns round. A
handler may raise, as that of Ctrl-C does. `threading.Condition` is written in Python: if its
acquisition or its release is interrupted, its lock may be held for ever, and every thread that
needs it stops. Whatever is made of conditions has the same weakness: `concurrent.futures.Future`,
`threading.Event`, `threading.Barrier`, and the start of a thread.

Here every lock is written in C and taken by ``with`` only: between its acquisition and the body,
and between the body and its release, no handler runs. Nobody waits while a lock is held, either. A
waiter leaves a *ticket*, a lock that is acquired, and acquires it again; whoever has changed
something releases the ticket.
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
"""After so many seconds a waiter looks again. If the thread that changes something is interrupted
before it has told, the others wait so long, and not for ever."""


class Monitor(_thread.RLock):  # type: ignore[misc]  # final in the stubs only
    """A reentrant lock, taken by ``with``, and a way to wait for what changes under it."""

    def __init__(self) -> None:
        super().__init__()
        self._tickets: list[threading.Lock] = []

    def wait_until(self, reached: Callable[[], T | None]) -> T:
        """Call `reached` under the lock until it returns something true, and return that.

        It is called at once, then after each `notify_all`, and now and then. Between the calls the
        lock is free; so the caller must not hold it.

        Raises:
            RuntimeError: The caller holds the lock.
        """
        if self._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("the lock must be free while something is waited for")
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
        """Let all who wait look again. The caller holds the lock."""
        while self._tickets:
            self._tickets.pop().release()


class Pending(Generic[T]):
    """The outcome of something that another thread does: a value or an error, known once.

    It is what a `concurrent.futures.Future` is, for those who wait and those who resolve it.
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
        """Wait for the outcome and return the value.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            BaseException: The error, if that is the outcome.
            TimeoutError: It is not known after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback has this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, and return the error; None if there is a value."""
        if not self.wait(timeout):
            raise TimeoutError
        return self._error

    def add_done_callback(self, fn: Callable[[Pending[T]], object]) -> None:
        """Call ``fn(self)`` on the thread that resolves this; at once if it has been resolved.

        An `Exception` that it raises is logged.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def set_result(self, value: T) -> None:
        """Resolve this to a value, then call the callbacks."""
        with self._lock:
            self._require_unknown()
            self._value = value
            self._done = True
        self._tell()

    def set_exception(self, error: BaseException) -> None:
        """Resolve this to an error, then call the callbacks."""
        with self._lock:
            self._require_unknown()
            self._error = error
            self._done = True
        self._tell()

    def _require_unknown(self) -> None:
        if self._done:
            raise RuntimeError("this has been resolved before")

    def _tell(self) -> None:
        while self._tickets:
            self._tickets.pop().release()
        while self._callbacks:
            self._call(self._callbacks.pop(0))

    def _call(self, fn: Callable[[Pending[T]], object]) -> None:
        try:
            fn(self)
        except Exception:  # noqa: BLE001  (as a future of the standard library does)
            _log.exception("a callback of %r failed", self)


def wait(pending: Iterable[Pending[T]]) -> None:
    """Wait until all outcomes are known."""
    for one in pending:
        one.wait()


def start(*threads: threading.Thread) -> None:
    """Start threads so that an interrupt cannot keep one of them from coming to its work.

    `threading.Thread.start` waits for the thread by an event, whose lock both need. So on the main
    thread, the only one that is interrupted, another thread does it. If this is interrupted, all of
    them start none the less.

    Raises:
        RuntimeError: A thread cannot be started; those before it have been.
    """
    if threading.get_ident() != threading.main_thread().ident:
        _start(threads)
        return
    started: Pending[None] = Pending()

    def start_all() -> None:
        try:
            _start(threads)
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
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
    lock = threading.Lock()
    lock.acquire()
    return lock
