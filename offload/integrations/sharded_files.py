"""References in the files and directories that libraries write with torch."""

from __future__ import annotations

import os
import warnings

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from offload import Position, reference_of

_CARRIED = "offload_reference"
"""Key of the reference in the groups that are saved there."""


def is_sharded(directory: str) -> bool:
    """Return whether a directory was written by `torch.distributed.checkpoint`, to its end."""
    return os.path.isfile(os.path.join(directory, ".metadata"))


def reference_in(directory: str, optimizer: str) -> Position | None:
    """Return the position that the state dict of an optimizer in a directory refers to.

    This process reads alone, a few hundred bytes. The result is None if there is no reference.

    Args:
        directory: Directory that `torch.distributed.checkpoint.save` has written.
        optimizer: Key of the optimizer's state dict.
    """
    group = {_CARRIED: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this process reads alone
        try:
            load({optimizer: {"param_groups": [group]}}, checkpoint_id=directory, no_dist=True)
        except CheckpointException:
            return None
    return reference_of({"param_groups": [group]})


def positions_in_file(path: str) -> list[Position] | None:
    """Return the position that a saved state dict refers to; empty if it has the state itself.

    None means that there is no such file, or that it is torn. No tensor is read.

    Raises:
        OSError: The file cannot be read, which says nothing about what it has.
    """
    try:
        saved = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        position = reference_of(saved)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise
    except Exception:  # noqa: BLE001  (a file may be damaged in any way)
        return None
    return [] if position is None else [position]
