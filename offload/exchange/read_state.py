"""Reading of one parameter's optimizer state from a checkpoint, decoded to FP32."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import torch

from offload.ambient import in_neutral
from offload.checkpoint.whole_state import WholeState
from offload.errors import CheckpointNotFoundError
from offload.exchange.state_boxes import WantedState, read_state_boxes
from offload.format.arrays import MASTER
from offload.format.boxes import Box
from offload.update.coding.decoder import kept_arrays

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint


def read_state(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """Read the optimizer state of one parameter of a checkpoint.

    If several ranks made the checkpoint, the tensors are put together from the boxes of all its
    owners. This takes the memory of the result twice at most, and a constant. The chunks that hold
    the parameter are read as a whole, and compared with their digests.

    Args:
        checkpoint: The checkpoint. It is kept from being recycled during the call, even if it was
            not opened by `open_checkpoint`.
        name: The parameter's name, as in ``model.safetensors``.

    Returns:
        FP32 tensors of the parameter's shape: ``master`` and every state array, as the next step
        would compute with them. They are decoded if they are stored in fewer bits. If a parameter
        was edited after the last step, ``master`` is the edited value. The arrays of a parameter
        that has never had a gradient are zeros.

    Raises:
        CheckpointNotFoundError: The checkpoint has no trainable parameter of that name.
        DamagedError: A chunk is damaged. The message names file and bytes.
        CheckpointError: The part of another rank that has elements of the parameter is missing, or
            is not seen on this node. The message names its owner.
        RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been recycled.
        gds.StorageError: The checkpoint cannot be read.
    """
    with checkpoint.held(), WholeState(checkpoint) as state:
        return _read_state(state, name)


@in_neutral
def _read_state(state: WholeState, name: str) -> dict[str, torch.Tensor]:
    layout = state.layout
    spec = next((p for p in layout.parameters if p.name == name), None)
    if spec is None:
        state.require_all()
        names = ", ".join(p.name for p in layout.parameters[:8])
        raise CheckpointNotFoundError(
            errno.ENOENT,
            f"no trainable parameter {name!r} here (it has: {names}, ...)",
            state.path,
        )
    # A parameter that was never stepped keeps these zeros, since none of its arrays is read.
    out = {
        array: torch.zeros(spec.shape, dtype=torch.float32, device="cpu")
        for array in (MASTER, *kept_arrays(spec, layout))
    }
    read_state_boxes(state, [WantedState(name, Box.whole(spec.shape), out)])
    return out
