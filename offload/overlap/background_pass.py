"""A pass over the state that runs on a thread of its own, beside the model."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

import torch

from gds.waiting import Monitor, start
from offload.ambient import flushes_denormals, on_thread
from offload.engine.stepping import STEP_THREAD
from offload.errors import OffloadError
from offload.model.new_values import Values
from offload.stream.meter import Meter
from offload.stream.passes import StatePass
from offload.update.kept_state import Scalars


class RunningPass:
    """One pass in progress, and an action that follows it.

    Its stages:

        running -> ended (parameters have their new values, or the pass failed) -> done

    Between ended and done, its thread runs the action that was set with `then`, such as beginning a
    seal. Until done, everything that the pass works with belongs to its thread. Other threads may
    call only the methods of this class.

    Args:
        state_pass: Pass to run.
        ended: Function that is called on the pass's thread after success, with the pass and the
            scalar state of each parameter.
        failed: Function that is called on the pass's thread after a failure, with the pass and the
            error. It returns the error to report.
        meter: Meter that counts the seconds that other threads wait.
        values: What brings new values to other ranks, and theirs to this one; None if there is
            nothing to bring.
        updated: Function that is called on the pass's thread with each updated chunk, before other
            threads may use its parameters.
    """

    def __init__(
        self,
        state_pass: StatePass,
        ended: Callable[[StatePass, list[Scalars | None]], None],
        failed: Callable[[StatePass, BaseException], BaseException],
        meter: Meter,
        values: Values | None = None,
        *,
        updated: Callable[[int], object] | None = None,
    ) -> None:
        self._call_updated = updated
        self.state_pass = state_pass
        self._values = values
        self._carrier: ValueCarrier | None = None
        self._call_ended = ended
        self._call_failed = failed
        self._meter = meter
        self._pid = os.getpid()
        self._flushes = flushes_denormals()
        self._positions = {chunk: n for n, chunk in enumerate(state_pass.chunks, start=1)}
        self._changed = Monitor()
        self._claimed = False
        self._is_launched = False
        self._num_updated = 0
        self._has_ended = False
        self._is_done = False
        self._error: BaseException | None = None
        self._next: Callable[[BaseException | None], None] | None = None
        self._thread: threading.Thread | None = None

    def start(self, *, daemon: bool = False) -> None:
        """Start the thread of the pass; if this raises, `cancel` tells whether the pass has begun.

        If no thread can be started, as at exit, the calling thread runs the pass. With `daemon`,
        this raises RuntimeError instead, and the interpreter may exit amid the pass.
        """
        self._thread = threading.Thread(target=self._go, name=STEP_THREAD, daemon=daemon)
        try:
            start(self._thread)
            self._is_launched = True
        except RuntimeError:
            self._thread = None
            if daemon:
                raise
            self._go()

    def cancel(self) -> bool:
        """Prevent the pass from beginning, and return True; return False if it has begun."""
        with self._changed:
            begun, self._claimed = self._claimed, True
            return not begun

    @property
    def begun(self) -> bool:
        """Whether the pass may have changed something, or will do so while the caller waits.

        This is true as soon as the thread has been started, although the pass may begin much later.
        From then on a reader of a parameter must wait for the pass.
        """
        return self._is_launched or self._claimed

    @property
    def ended(self) -> bool:
        """Whether all parameters have their new values, or the pass has failed."""
        return self._has_ended

    @property
    def has_next(self) -> bool:
        """Whether an action has been set with `then` that has not begun."""
        return self._next is not None

    def wait_for(self, chunks: Iterable[int], names: Iterable[str] = ()) -> None:
        """Wait until parameters have their new values.

        The calling thread's current streams on a device wait for the updates as well. Chunks
        outside of the pass count as updated. Other ranks may send values of the named parameters.
        Only the first caller gets the error of a pass that failed.
        """
        if not self._has_ended:
            needed = max((self._positions.get(chunk, 0) for chunk in chunks), default=0)
            values = self._values
            stops = {} if values is None else values.stops
            stop = max((stops.get(name, 0) for name in names), default=0) if stops else 0
            self._wait(
                lambda: (
                    self._has_ended
                    or (
                        self._num_updated >= needed
                        and (values is None or values.num_arrived >= stop)
                    )
                )
            )
        self.state_pass.updater.fence()
        self.raise_error()

    def wait_ended(self) -> None:
        """Wait until all parameters have their new values, or the pass has failed."""
        self._wait(lambda: self._has_ended)
        self.state_pass.updater.fence()

    def join(self) -> None:
        """Wait until the pass and the action after it are done, and the thread has ended."""
        self._wait(lambda: self._is_done)
        if self._thread is not None:
            self._thread.join()
        self.state_pass.updater.fence()

    def raise_error(self) -> None:
        """Raise the error if the pass failed. Only the first caller gets it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def then(self, action: Callable[[BaseException | None], None]) -> bool:
        """Set an action that the pass's thread runs when the pass has ended."""
        with self._changed:
            if self._has_ended or self._next is not None:
                return False
            self._next = action
            return True

    def _wait(self, reached: Callable[[], bool]) -> None:
        if reached():
            return
        if os.getpid() != self._pid:
            raise OffloadError(
                "a step was running beside the model when this process was forked, and its result "
                "is in the parent only: call synchronize() before forking"
            )
        with self._meter.timed("wait_update_s"):
            self._changed.wait_until(reached)

    def _go(self) -> None:
        with on_thread(flushes=self._flushes):
            self._run()

    def _run(self) -> None:
        with self._changed:
            if self._claimed:
                return
            self._claimed = True
        failure: BaseException | None = None
        try:
            with self._meter.timed("beside_s"):
                scalars = self._carried(self.state_pass)
            self._call_ended(self.state_pass, scalars)
        except BaseException as error:  # noqa: BLE001  (the threads that wait for the pass raise it)
            failure = self._call_failed(self.state_pass, error)
            if failure is not error:
                failure.__cause__ = error
        with self._changed:
            self._error = failure
            self._has_ended = True
            action, self._next = self._next, None
            self._changed.notify_all()
        if action is not None:
            action(failure)
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _carried(self, state_pass: StatePass) -> list[Scalars | None]:
        """Run the pass, while its new values go to other ranks and theirs come here."""
        if self._values is not None:
            self._carrier = ValueCarrier.begin(self._values, self._arrived)
        try:
            scalars = state_pass.run(self._updated)
        except BaseException as error:
            failure = error if self._carrier is None else self._carrier.fail(error)
            if failure is error:
                raise
            raise failure from error
        if self._carrier is not None:
            self._carrier.finish()
        return scalars

    def _updated(self, chunk: int) -> None:
        if self._carrier is not None:
            self._carrier.updated(chunk)
        if self._call_updated is not None:
            self._call_updated(chunk)
        with self._changed:
            self._num_updated += 1
            self._changed.notify_all()

    def _arrived(self) -> None:
        with self._changed:
            self._changed.notify_all()


CARRIER_THREAD = "offload-values"
"""Name of the threads that send and receive new values."""


class ValueCarrier:
    """Sends and receives the new values of one pass while the pass goes on.

    The pass reports its chunks to `updated`, and ends with `finish` or `fail`. Without this, values
    would arrive only when the pass has a chunk of its own to send: not while it waits for a drive.
    All ranks send in one order, so a rank waits for the others here, but the pass does not.
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
        """Return a carrier whose thread has been started."""
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
        """Wait until all new values are here."""
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
