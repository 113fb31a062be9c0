"""The handle that `checkpoint()` returns, and seals in flight as steps see them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from gds.waiting import Pending, start
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import SealError
from offload.journal import log_event
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSlot
from offload.store.store import Store
from offload.stream.passes import SealInFlight
from offload.units import duration, size

if TYPE_CHECKING:
    from offload.tiers.arriving import ArrivingState


SEAL_THREAD = "offload-seal"
"""Name of the threads that seal."""


class SealHandle:
    """Handle of a checkpoint that is being sealed, or has been sealed.

    The checkpoint becomes durable by itself; nothing needs to be called. If sealing fails,
    `result`, the next `step` and the next `checkpoint` raise the error. With several ranks `step`
    warns of it, and `checkpoint` raises it only if `result` has not raised it on all ranks.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        """Number of optimizer steps after which the checkpoint was asked for."""
        self.was_raised = False
        """Whether the user has seen the error with which sealing has failed."""
        self.bytes_written = 0
        """Bytes that the seal wrote, known when it has ended; 0 if nothing had to be sealed."""
        self.seal_s = 0.0
        """Seconds that the seal took behind training, known when it has ended."""
        self._future: Pending[Checkpoint] = Pending()
        self._caller = threading.get_ident()
        self._is_awaited = False
        """Whether the thread that asked for the checkpoint waits for it."""

    def done(self) -> bool:
        """Return whether sealing has ended, with success or with an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is durable and return it.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            SealError: The checkpoint could not be sealed. Older checkpoints are untouched.
            TimeoutError: The checkpoint is still being sealed after `timeout` seconds.
        """
        try:
            return self.outcome(timeout)
        except SealError:
            self.was_raised = True
            raise

    def outcome(self, timeout: float | None = None) -> Checkpoint:
        """Return what `result` returns; the user does not see an error that this raises."""
        with self._awaited():
            return self._future.result(timeout)

    def when_sealed(self, use: Callable[[Checkpoint], object]) -> None:
        """Call a function with the checkpoint once it is durable; not if sealing fails.

        The call is made on the thread that seals, or at once if the checkpoint is durable. The
        function must be short and must not wait. An `Exception` that it raises is logged.
        """

        def ended(future: Pending[Checkpoint]) -> None:
            """Use the checkpoint, if the seal made one."""
            if future.exception() is None:
                use(future.result())

        self._future.add_done_callback(ended)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "SealHandle cannot be copied or pickled: the checkpoint is being made by this process. "
            "Call result(), and send result().path"
        )

    def __repr__(self) -> str:
        return f"SealHandle(step={self.step}, done={self.done()})"

    def wait(self) -> None:
        """Wait until sealing has ended, with success or with an error."""
        with self._awaited():
            self._future.wait()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        is_caller = threading.get_ident() == self._caller
        self._is_awaited |= is_caller
        try:
            yield
        finally:
            self._is_awaited &= not is_caller

    def place_of_caller(self) -> tuple[int, int] | None:
        """Return where the thread is that asked for the checkpoint; None if it edits nothing.

        If the place is the same at two times, the thread may be in one call, such as an edit.
        """
        frame = None if self._is_awaited else sys._current_frames().get(self._caller)
        return None if frame is None else (id(frame), frame.f_lasti)

    def succeed(self, checkpoint: Checkpoint) -> None:
        """Make `result` return the checkpoint, which is durable."""
        self._future.set_result(checkpoint)

    def fail(self, error: SealError) -> None:
        """Make `result` raise an error, because the checkpoint will never be sealed."""
        self._future.set_exception(error)

    @classmethod
    def finished(cls, checkpoint: Checkpoint) -> SealHandle:
        """Return a handle for a checkpoint that is durable already."""
        handle = cls(checkpoint.step)
        handle._future.set_result(checkpoint)
        return handle


class FailedSeal(SealInFlight):
    """A seal that all ranks begin, and that has failed on this rank before it could begin.

    The other ranks make their parts of the checkpoint meanwhile, so a thread waits for them.
    """

    def __init__(
        self, slot: StateSlot | None, step: int, tell: Callable[[], None], failure: SealError
    ) -> None:
        self.slot = slot
        self.handle = SealHandle(step)
        self.handle.was_raised = True  # by `checkpoint`
        self._tell = tell
        self._failure = failure

    def start(self) -> None:
        """Tell the other ranks on a new thread, which the interpreter waits for."""
        try:
            start(threading.Thread(target=self._run, name=SEAL_THREAD))
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._run()

    def _run(self) -> None:
        self._tell()
        self.handle.fail(self._failure)


class _Handle:
    """Outcome of an arrival, with the methods of `SealHandle` that the engine uses."""

    def __init__(self, ended: Pending[None]) -> None:
        self._ended = ended

    def done(self) -> bool:
        """Return whether the arrival has ended."""
        return self._ended.done()

    def wait(self) -> None:
        """Wait until the arrival has ended, with success or with an error."""
        self._ended.wait()

    def outcome(self) -> None:
        """Wait until the checkpoint is durable, or raise the error."""
        self._ended.result()


class Arrival(SealInFlight):
    """A checkpoint whose parameters are here, and whose state is arriving from the tier.

    To steps it is a seal in flight: its slot is about to become a checkpoint, and no step writes
    it.
    """

    def __init__(self, arriving: ArrivingState, store: Store, slot: Slot) -> None:
        self.slot: Slot = slot
        self.url = arriving.share.url
        self.handle = _Handle(arriving.ended)
        self._was_stopped = False
        self._arriving = arriving
        self._store = store

    def start(self, order: Sequence[int]) -> None:
        """Begin to fetch the state, in the order of the chunks that is given."""
        began_s, share = time.perf_counter(), self._arriving.share

        def published(found: StoredCheckpoint) -> None:
            """Log that the checkpoint is complete, before those who wait for it go on."""
            log_event(
                f"{found.path}: complete, {duration(time.perf_counter() - began_s)} after its "
                f"parameters; {size(share.bytes_fetched)} fetched from {self.url}, "
                f"{size(share.bytes_kept)} were here"
            )

        self._arriving.ended.add_done_callback(lambda _: self._store.journal.tell())
        self._arriving.start_alone(self._store, order, published)

    def stop(self) -> None:
        """End the arrival; what has been written stays, and the next `restore` goes on from it."""
        self._was_stopped = not self.handle.done()
        self._arriving.stop()

    @property
    def is_cut_short(self) -> bool:
        """Whether `stop` has ended the arrival before the checkpoint was complete."""
        ended = self._arriving.ended
        return self._was_stopped and ended.done() and ended.exception() is not None
