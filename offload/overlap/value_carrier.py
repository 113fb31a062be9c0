"""New values of a pass beside the model, which another thread sends and receives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from gds.waiting import Monitor, start
from offload.ambient import flushes_denormals, on_thread
from offload.model.new_values import Values

CARRIER_THREAD = "offload-values"
"""Name of the threads that send and receive new values."""


class ValueCarrier:
    """Sends and receives the new values of one pass while the pass goes on.

    The pass reports its chunks to `updated`, and ends with `finish` or `fail`. Without this, values
    would arrive only when the pass has a chunk of its own to send: not while it waits for a drive.
    All ranks send in one order, so a rank waits for the others here, but the pass does not.

    Args:
        values: The values; from now on only the thread of this object uses them.
        arrived: Function that is called after values have arrived.
    """

    def __init__(self, values: Values, arrived: Callable[[], object]) -> None:
        self._values = values
        self._arrived = arrived
        self._flushes = flushes_denormals()
        self._changed = Monitor()
        self._updated: deque[int] = deque()
        self._is_over = False
        """Whether the pass has ended."""
        self._failure: BaseException | None = None
        """Error of the pass."""
        self._error: BaseException | None = None
        """Error to raise."""
        self._thread = threading.Thread(target=self._go, name=CARRIER_THREAD)

    @classmethod
    def begin(cls, values: Values, arrived: Callable[[], object]) -> ValueCarrier:
        """Return a carrier whose thread has been started.

        Raises:
            BaseException: No thread can be started. All ranks know of it.
        """
        carrier = cls(values, arrived)
        try:
            start(carrier._thread)
        except RuntimeError as error:
            with torch._C.DisableTorchFunctionSubclass():
                raise values.fail(error) from error
        return carrier

    def updated(self, chunk: int) -> None:
        """Send the new values of a chunk. Never waits."""
        with self._changed:
            self._updated.append(chunk)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all new values are here.

        Raises:
            RanksError: A rank failed or was lost.
        """
        self._end(None)
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> BaseException:
        """Take part to the end in spite of an error of this rank; return the error to raise."""
        self._end(error)
        return error if self._error is None else self._error

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure, self._is_over = failure, True
            self._changed.notify_all()
        self._thread.join()

    def _go(self) -> None:
        # The parameters are watched, and whoever uses a watched one waits for this thread.
        with on_thread(flushes=self._flushes), torch._C.DisableTorchFunctionSubclass():
            failure: BaseException | None = None
            try:
                self._carry()
            except BaseException as error:  # noqa: BLE001  (`finish` and `fail` raise it)
                failure = error
            self._changed.wait_until(lambda: self._is_over)
            failure = failure or self._failure
            try:
                if failure is not None:
                    self._error = self._values.fail(failure)
                else:
                    self._values.finish()
            except BaseException as error:  # noqa: BLE001  (`finish` and `fail` raise it)
                self._error = error

    def _carry(self) -> None:
        """Send and receive until the pass has ended and all of its chunks have been sent."""
        is_idle = False
        while True:
            if is_idle:
                self._changed.wait_until(lambda: self._updated or self._is_over)
            with self._changed:
                chunk = self._updated.popleft() if self._updated else None
                is_over = self._is_over
            if chunk is not None:
                self._values.updated(chunk)
            elif is_over:
                return
            is_idle = chunk is None and not self._values.advance()
            if chunk is None and not is_idle:
                self._arrived()
