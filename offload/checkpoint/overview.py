"""What people are told about a store and a checkpoint, as plain values. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gds import Backend, PosixBackend
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.listing import CheckpointInfo, list_checkpoints, list_unnamed_parts
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError
from offload.format.names import part_number
from offload.retention.pins import Pin, read_pins


@dataclass(frozen=True, slots=True)
class Overview:
    """What a store has, and what is wrong in it."""

    checkpoints: Sequence[CheckpointInfo]
    """Everything that is named like a checkpoint, as `list_checkpoints` returns it."""

    unnamed_parts: Sequence[str]
    """Paths of sealed parts that no checkpoint needs."""

    is_further: bool
    """Whether the directory has no checkpoint because it is a further directory of a store."""

    lost_pins: Sequence[str]
    """Sentences about pins that belong to no checkpoint or cannot be read."""


def overview(store: str, parts: PartDirectories = None) -> Overview:
    """Return what a store has. It may be in use.

    Args:
        store: Directory of the store; the first one, if there are several.
        parts: Directories of the parts on other drives, as in `open_checkpoint`.

    Raises:
        CheckpointNotFoundError: Nothing exists at `store`.
        CheckpointError: `store` is not a store.
        UnreadableError: Something could not be read.
    """
    found = list_checkpoints(store, parts=parts)
    return Overview(
        found,
        list_unnamed_parts(store, parts=parts),
        not found and any(part_number(name) is not None for name in os.listdir(store)),
        _lost_pins(os.path.abspath(store), found),
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all that people are told of a checkpoint, as JSON values except ``hyperparameters``.

    Those are a list with the hyper-parameters of each group, in which there may be tensors.
    """
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "created": checkpoint.created,
        "optimizer": checkpoint.optimizer,
        "update_code": checkpoint.update_code,
        "parameters_only": checkpoint.parameters_only,
        "metrics": checkpoint.metrics,
        "parts": checkpoint.parts,
        "owners": [
            {"owner": one.reference.owner, "path": one.path, "seen": one.table is not None}
            for one in (checkpoint.owners if checkpoint.manifest.owners else [])
        ],
        "num_parameters": checkpoint.num_parameters,
        "hyperparameters": checkpoint.hyperparameters,
        "state_arrays": checkpoint.state_arrays,
        "files": checkpoint.files,
        "tensors": [
            {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)}
            for entry in checkpoint.tensors
        ],
    }


def _lost_pins(directory: str, found: Sequence[CheckpointInfo]) -> list[str]:
    shown = {name for info in found for name in info.pins}
    with PosixBackend() as backend:
        pins = read_pins(backend, directory)
        return [
            *pins.unreadable,
            *(
                f"pin {pin.name}: its checkpoint {pin.checkpoint} of generation {pin.generation} "
                f"no longer exists; remove the pin with offload unpin {directory} {pin.name}"
                for pin in pins.pins
                # A pin may belong to a checkpoint that was sealed after the store was listed.
                if pin.name not in shown and not _is_there(backend, directory, pin)
            ),
        ]


def _is_there(backend: Backend, store: str, pin: Pin) -> bool:
    path = f"{store}/{pin.checkpoint}"
    try:
        return pin.refers_to(path, decode_manifest(backend, path))
    except (CheckpointError, OSError):
        return False
