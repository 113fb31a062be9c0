"""Repeated checkpoints of one step: only the train state and the metrics can differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offload.engine.seal import SealHandle
from offload.format.manifest import encode_group
from offload.format.train_state import EncodedState
from offload.model.model_file import BlockBuffers, ModelImage, digest_model
from offload.model.stored import Stored
from offload.store.opening import StoredCheckpoint
from offload.store.state_store import StateStore


def have_same_groups(sealed: StoredCheckpoint, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the hyper-parameters equal those of a checkpoint."""
    saved = [encode_group(i, group) for i, group in enumerate(sealed.manifest.groups)]
    return saved == [encode_group(i, group) for i, group in enumerate(groups)]


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


def replace_train_state(
    store: StateStore,
    sealed: StoredCheckpoint,
    encoded: EncodedState,
    metrics: Mapping[str, float] | None,
    *,
    several: bool,
) -> SealHandle:
    """Replace a checkpoint's train state and metrics if they differ; durable on return.

    Each of the two is replaced atomically, the train state first.

    Args:
        store: Store that holds the checkpoint.
        sealed: Checkpoint to change.
        encoded: New train state, encoded.
        metrics: New metrics; None leaves them as they are.
        several: Whether other ranks have train states of their own, which only the store knows.

    Raises:
        gds.StorageError: There is no space. Whichever of the two was not replaced is unchanged.
    """
    if several or store.reader_of(sealed).read_train_state() != encoded:
        store.replace_train_state(sealed, encoded)
    if metrics is not None and metrics != sealed.manifest.metrics:
        store.replace_manifest(sealed, replace(sealed.manifest, metrics=metrics))
    return SealHandle.finished(store.reader_of(sealed))
