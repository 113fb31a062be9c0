"""A seal that all ranks begin, and that has failed on this rank before it could begin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gds.waiting import start
from offload.engine.seal import SEAL_THREAD, SealHandle
from offload.errors import SealError
from offload.format.layout import Layout
from offload.store.state_store import StateSlot


class FailedSeal:
    """Stands for a seal in flight whose only content is an error; see `offload.engine.seal.Seal`.

    The other ranks make their parts of the checkpoint meanwhile, so a thread waits for them.
    Nothing is copied from the model, so no step waits.

    Args:
        slot: Slot that holds the state; None if the state is torn.
        step: Number of optimizer steps after which the checkpoint was asked for.
        tell: Function that tells all ranks of the error, and waits until they have ended the seal.
        failure: Error of the seal on this rank.
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

    def wait_all_copied(self) -> None:
        """Return at once."""

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return zeros: no chunk has to wait."""
        return (0,) * layout.num_chunks

    def wait_copied_of(self, name: str) -> None:
        """Return at once."""

    def wait_copied(self, nbytes: int) -> None:
        """Return at once."""
