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
from offload.journal import log_event
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.units import duration, size

if TYPE_CHECKING:
    from offload.tiers.arriving import ArrivingState


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
    """A checkpoint whose state is still arriving.

    Args:
        arriving: State of the checkpoint. Its parameters have arrived.
        store: Store that gets the checkpoint.
        slot: Slot of the checkpoint.
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
