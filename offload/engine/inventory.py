"""The checkpoints and pins of an open store, described for users."""

from __future__ import annotations

from offload.checkpoint.listing import CheckpointInfo, info_of
from offload.checkpoint.reading import directories_of_parts
from offload.engine.reference import Position, find_sealed
from offload.retention.pins import FoundPins
from offload.store.opening import StoredCheckpoint
from offload.store.state_store import StateStore


def describe_checkpoints(store: StateStore) -> list[CheckpointInfo]:
    """Return the usable checkpoints of a store; see `OffloadedOptimizer.checkpoints`."""
    pins = store.keeping.pins()
    return [_info(store, checkpoint, pins) for checkpoint in store.keeping.current]


def pinned_paths(store: StateStore) -> dict[str, str]:
    """Return the path of the checkpoint of each pin, by name; see `OffloadedOptimizer.pins`."""
    return {pin.name: f"{store.directory}/{pin.checkpoint}" for pin in store.keeping.pins().pins}


def find_checkpoint(store: StateStore, wanted: Position, present: Position) -> CheckpointInfo:
    """Return the checkpoint that a reference names; see `OffloadedOptimizer.find`.

    Args:
        store: Store of the optimizer.
        wanted: Position that the reference names.
        present: Position of the optimizer.

    Raises:
        MismatchError: The store does not have the checkpoint.
        gds.StorageError: The directory of pins, or the size of a file, could not be read.
    """
    return _info(store, find_sealed(store, wanted, present), store.keeping.pins())


def _info(store: StateStore, checkpoint: StoredCheckpoint, pins: FoundPins) -> CheckpointInfo:
    manifest, parts = checkpoint.manifest, store.directories[1:]
    if manifest.parts:  # of one process; ranks may have been given the directories in another order
        parts = tuple(directories_of_parts(store.backend, manifest, parts))
    return info_of(store.backend, checkpoint.path, manifest, parts, pins)
