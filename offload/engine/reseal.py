"""A checkpoint of a step that has been sealed already: nothing but the train state can differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint, train_state_header
from offload.engine.seal import SealHandle
from offload.format.manifest import encode_group
from offload.format.train_state import EncodedState, pack_encoded
from offload.model.model_file import BlockBuffers, ModelImage, digest_model
from offload.model.parameters import Stored
from offload.model.table import ParameterTable
from offload.store.opening import StoredCheckpoint
from offload.store.store import Store


def is_unchanged(
    sealed: StoredCheckpoint,
    groups: Sequence[Mapping[str, Any]],
    table: ParameterTable,
    stored: Sequence[Stored],
    buffers: BlockBuffers,
) -> bool:
    """Return whether hyper-parameters, parameters and buffers are, to the bit, what was sealed.

    Reads memory, not storage. The optimizer state cannot differ: no step has been taken.

    Args:
        sealed: The checkpoint that the optimizer is at.
        groups: ``param_groups`` now.
        table: The layout now.
        stored: The tensors of the model file now.
        buffers: Memory for copying them.
    """
    manifest, slot = sealed.manifest, sealed.slot
    if slot is None or manifest.layout != table.layout:
        return False
    saved = [encode_group(i, group) for i, group in enumerate(manifest.groups)]
    if saved != [encode_group(i, group) for i, group in enumerate(groups)]:
        return False
    tensors = {item.spec.name: item.tensor for item in stored}
    image = ModelImage(manifest.layout.model_header, tensors, traffic=buffers.traffic)
    return tuple(digest_model(image, buffers, slot.context)) == manifest.model_digests


def replace_train_state(
    store: Store,
    sealed: StoredCheckpoint,
    encoded: EncodedState,
    metrics: Mapping[str, float] | None,
) -> SealHandle:
    """Replace a checkpoint's train state and metrics if they differ; durable on return.

    Each of the two is replaced atomically, the train state first.

    Args:
        store: Holds the checkpoint.
        sealed: The checkpoint.
        encoded: What its train state is to be.
        metrics: What its metrics are to be; None leaves them as they are.

    Raises:
        gds.StorageError: No space; what had not been replaced is what it was.
    """
    checkpoint = Checkpoint(store.backend, sealed.path, sealed.manifest, store.directories[1:])
    present, capacity_bytes = checkpoint.read_train_state()
    if present != encoded:
        packed = pack_encoded(
            encoded, capacity_bytes=capacity_bytes, header=train_state_header(sealed.manifest)
        )
        store.replace_train_state(sealed, packed)
    if metrics is not None and metrics != sealed.manifest.metrics:
        store.replace_manifest(sealed, replace(sealed.manifest, metrics=metrics))
        checkpoint = Checkpoint(store.backend, sealed.path, sealed.manifest, store.directories[1:])
    return SealHandle.finished(checkpoint)
