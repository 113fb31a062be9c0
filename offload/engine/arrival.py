"""A checkpoint whose parameters are here, and whose state is arriving from the tier.

To the rest of the engine an arrival is a seal in flight: its slot is about to become a checkpoint,
and no step writes it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gds.waiting import Pending
from offload.engine.seal_handle import SealInFlight
from offload.errors import OffloadError
from offload.journal import log_event
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.units import duration, size

if TYPE_CHECKING:
    from offload.tiers.arriving import Incoming


class ArrivalHandle:
    """Outcome of an arrival, with the methods of `SealHandle` that the engine uses."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._future: Pending[StoredCheckpoint] = Pending()

    def done(self) -> bool:
        """Return whether the arrival has ended."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the arrival has ended, with success or with an error."""
        self._future.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the arrival has ended with an error."""
        return self.done() and self._future.exception() is not None

    def outcome(self, timeout: float | None = None) -> StoredCheckpoint:
        """Wait until the checkpoint is durable and return it; or raise the error."""
        return self._future.result(timeout)

    def set(self, found: StoredCheckpoint | OffloadError) -> None:
        """End the arrival."""
        if isinstance(found, OffloadError):
            self._future.set_exception(found)
        else:
            self._future.set_result(found)


class Arrival(SealInFlight):
    """A checkpoint whose state is still arriving.

    Args:
        incoming: Checkpoint of the tier. Its parameters have arrived.
        store: Store that gets the checkpoint.
        slot: Slot of the checkpoint.
    """

    def __init__(self, incoming: Incoming, store: Store, slot: Slot) -> None:
        self.slot: Slot = slot
        self.url = incoming.url
        self.handle = ArrivalHandle(incoming.manifest.step)
        self._was_stopped = False
        self._incoming = incoming
        self._store = store

    def start(self, order: Sequence[int]) -> None:
        """Begin to fetch the state, in the order of the chunks that is given."""
        began_s = time.perf_counter()

        def ended(found: StoredCheckpoint | OffloadError) -> None:
            """Log the end, and tell those who wait for it."""
            if isinstance(found, StoredCheckpoint):
                log_event(
                    f"{found.path}: complete, {duration(time.perf_counter() - began_s)} after its "
                    f"parameters; {size(self._incoming.bytes_fetched)} fetched from {self.url}, "
                    f"{size(self._incoming.bytes_kept)} were here"
                )
            self.handle.set(found)
            self._store.journal.tell()

        self._incoming.begin_state(self._store, self.slot, order, ended)

    def stop(self) -> None:
        """End the arrival; what has been written stays, and the next `restore` goes on from it."""
        self._was_stopped = not self.handle.done()
        self._incoming.stop()

    @property
    def is_cut_short(self) -> bool:
        """Whether `stop` has ended the arrival before the checkpoint was complete."""
        return self._was_stopped and self.handle.has_failed
