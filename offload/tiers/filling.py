"""Filling of a slot with a checkpoint from a tier: the parameters first, then the state.

Every piece is compared with its digest before it is written. A slot that an earlier download has
filled in part is compared first, and only the rest is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.names import MODEL_NAME, TRAIN_STATE_NAME
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Composition
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.tiers.checking import nothing
from offload.tiers.contents import Chunk, ModelRun, file_offset, model_object, state_objects
from offload.tiers.marker import Marker
from offload.tiers.range_filling import GoingOn, Range, RangeFilling, go_on


class Download:
    """Download of one checkpoint into a slot.

    `run` does all of it. A caller that needs the parameters before the rest makes the same calls:
    `reserve`, `fetch_parameters`, `fetch_state`, `publish`, and `end` if one of them failed.

    Args:
        filling: Fetches ranges of the copy.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint on the drives of the store.
    """

    def __init__(self, filling: RangeFilling, marker: Marker, manifest: Manifest) -> None:
        self.manifest = manifest
        """Manifest of the checkpoint on the drives of the store."""
        self.filling = filling
        """What fetches ranges of the copy, and counts them."""
        self._marker = marker
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._may_hold_parts = False
        self._train_state = b""
        filling.expect(
            marker.sizes[TRAIN_STATE_NAME]
            + sum(chunk.nbytes for chunk in (*self._model_pieces(), *self.state_pieces()))
        )

    def run(self, store: Store) -> str:
        """Fill a slot of the store and publish it; the errors are those of `pull`.

        Returns:
            Path of the checkpoint.
        """
        slot = self.reserve(store)
        try:
            self.fetch_parameters(slot)
            self.fetch_state(slot)
            return self.publish(store, slot).path
        except BaseException:
            self.end()
            store.release(slot)
            raise

    def reserve(self, store: Store) -> Slot:
        """Return a slot with room for the checkpoint. It may hold parts from an earlier download.

        Raises:
            StoreFullError: There is no room. Nothing was fetched.
        """
        manifest = self.manifest
        leftover = {*store.leftovers()[0]}
        slot = store.acquire(manifest.layout, len(manifest.groups))
        self._may_hold_parts = slot.path in leftover
        slot.begin_generation(self._context)
        for array, digests in manifest.digests.items():
            slot.digests[array][:] = digests
        return slot

    def fetch_parameters(self, slot: Slot, require_going_on: GoingOn = go_on) -> None:
        """Fetch the train state and ``model.safetensors``.

        Args:
            slot: Slot that `reserve` has returned.
            require_going_on: Function that raises an error to end early.

        Raises:
            TrainStateTooLargeError: The train state does not fit into the slot.
            DamagedError: An object is missing, or has other bytes than were sent.
            TierError: An object cannot be read.
            gds.StorageError: The slot cannot be written.
        """
        self._train_state = self.filling.train_state(self._marker, slot.train_state.size_bytes)
        slot.train_state.write_bytes(self._train_state, 0)
        ranges = [
            Range(slot.model, offset, MODEL_NAME, ModelRun(offset, (chunk,)), self._may_hold_parts)
            for offset, chunk in model_object(self.manifest).pieces
        ]
        self.filling.fill(ranges, require_going_on=require_going_on)

    def fetch_state(
        self,
        slot: Slot,
        order: Sequence[int] | None = None,
        arrived: Callable[[int], object] = nothing,
        require_going_on: GoingOn = go_on,
    ) -> None:
        """Fetch the optimizer state, chunk by chunk; the errors are those of `fetch_parameters`.

        Args:
            slot: Slot that `reserve` has returned.
            order: Chunks in the order in which they are needed; None for that of the files.
            arrived: Called with the index of a chunk for each piece of it, one in each state array,
                that has been compared with its digest and written.
            require_going_on: Function that raises an error to end early.
        """
        found: list[Range] = []
        for one in state_objects(self.manifest, self._marker.object_bytes):
            for start, chunk in one.starts():
                file = slot.array(chunk.array, chunk.index)
                offset = file_offset(self.manifest.layout, chunk)
                run = ModelRun(start, (chunk,))
                found.append(Range(file, offset, one.name, run, self._may_hold_parts))
        if order is not None:
            places = {chunk: place for place, chunk in enumerate(order)}
            found.sort(key=lambda one: places[one.run.chunks[0].index])
        self.filling.fill(found, arrived, require_going_on)

    def publish(self, store: Store, slot: Slot) -> StoredCheckpoint:
        """Make the filled slot a checkpoint of the store; durable on return.

        The errors are those of `offload.store.sealing.Sealing.seal`.
        """
        store.sealing.begin(self.manifest)
        try:
            composition = Composition(self.manifest, self._train_state)
            return store.sealing.seal(slot, composition, self.manifest.model_digests)
        finally:
            store.sealing.end()

    def end(self) -> None:
        """Write nothing more. On return no thread of this download uses the slot. Idempotent.

        A request that is not answered may keep its thread for long. What it brings is dropped.
        """
        self.filling.end()

    def state_pieces(self) -> list[Chunk]:
        """Return the pieces of state: each chunk once for each state array that has it."""
        objects = state_objects(self.manifest, self._marker.object_bytes)
        return [chunk for one in objects for chunk in one.chunks]

    def _model_pieces(self) -> list[Chunk]:
        return [chunk for _, chunk in model_object(self.manifest).pieces]
