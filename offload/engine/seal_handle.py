"""The handle that `checkpoint()` returns, and seals in flight as steps see them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from gds.waiting import Pending, start
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import SealError
from offload.format.layout import Layout
from offload.store.state_store import StateSlot

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

    def fail(self, error: SealError) -> None:
        """Make `result` raise an error, because the checkpoint will never be sealed."""
        self._future.set_exception(error)

    @classmethod
    def finished(cls, checkpoint: Checkpoint) -> SealHandle:
        """Return a handle for a checkpoint that is durable already."""
        handle = cls(checkpoint.step)
        handle._future.set_result(checkpoint)
        return handle


class SealInFlight:
    """A seal that has begun; this one copies nothing from the model, so no step waits for it."""

    slot: StateSlot | None
    """Slot that is about to become a checkpoint; None if the state is torn."""

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk of a layout, the bytes that `wait_copied` has to wait for.

        The caller is a pass that is about to change tensors. Until then nobody may edit them.
        """
        return (0,) * layout.num_chunks

    def wait_copied(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes of the model file's data have been copied from the model."""

    def wait_copied_of(self, name: str) -> None:
        """Wait until a tensor has been copied from the model."""

    def wait_all_copied(self) -> None:
        """Wait until everything has been copied from the model."""


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
