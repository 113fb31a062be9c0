"""The model file of a checkpoint that one process writes and reads as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gds import StorageError
from offload.checkpoint.sealed_slot import model_file
from offload.device.staging import Traffic
from offload.engine.seal import Captured
from offload.model.model_file import BlockBuffers, ModelImage, digest_model
from offload.model.model_reading import LiveBox, ModelReading, StoredModel, read_model
from offload.model.model_writing import CloneSource, TensorRanges, WholeCopy
from offload.model.stored import Stored
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.state_store import StateStore


def whole_copy(
    store: StateStore, slot: Slot, captured: Captured, buffers: BlockBuffers
) -> WholeCopy:
    """Return the copy of all tensors that a seal makes into its slot."""
    return WholeCopy(
        slot.layout,
        captured.stored,
        slot.model,
        buffers,
        slot.context,
        slot.model_leaves,
        captured.marks,
        partial(_clone_source, store, slot),
    )


def _clone_source(store: StateStore, slot: Slot, trained: TensorRanges) -> CloneSource | None:
    """Return the newest checkpoint's model file, if it can be cloned from."""
    newest = store.newest  # it stays the newest until this seal has ended
    source = newest.slot if newest is not None else None
    if newest is None or source is None or not len(source.model_leaves):
        return None
    if source.layout.model_header.encoded != slot.layout.model_header.encoded:
        return None
    try:
        if not store.is_usable(newest):
            return None  # it was quarantined or replaced while training runs
    except StorageError:
        return None
    return CloneSource(source.model, source.model_leaves, trained)


def load_whole(
    checkpoint: StoredCheckpoint, slot: Slot, stored: Sequence[Stored], buffers: BlockBuffers
) -> int:
    """Load all tensors of a checkpoint's model file in place; return the number of bytes read."""
    content = model_file(checkpoint.manifest)
    wanted = [LiveBox.whole(item.spec.name, item.tensor) for item in stored]
    file = StoredModel(slot.model, content, slot.model_leaves)
    reading = ModelReading([file], wanted, batch_bytes=buffers.block_bytes)
    reading.read(buffers, slot.context)
    return reading.num_bytes


def load_recut(
    store: StateStore, checkpoint: StoredCheckpoint, stored: Sequence[Stored], traffic: Traffic
) -> int:
    """Load the model of a checkpoint that several ranks have made; return the bytes read."""
    wanted = [LiveBox.whole(item.spec.name, item.tensor) for item in stored]
    return read_model(
        store.backend,
        checkpoint.path,
        checkpoint.manifest,
        wanted,
        traffic,
        parts=store.directories[1:],
    )


def has_same_model(
    sealed: StoredCheckpoint, stored: Sequence[Stored], buffers: BlockBuffers
) -> bool:
    """Return whether parameters and buffers equal those of a checkpoint, bit for bit.

    Reads memory, not storage. The optimizer state cannot differ, because no step has been taken.
    """
    manifest, slot = sealed.manifest, sealed.slot
    if slot is None:
        return False
    tensors = {item.spec.name: item.tensor for item in stored}
    image = ModelImage(manifest.layout.model_header, tensors, traffic=buffers.traffic)
    return tuple(digest_model(image, buffers, slot.context)) == manifest.model_digests
