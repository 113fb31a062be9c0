"""Reading of one parameter's optimizer state from a checkpoint, decoded to FP32."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import torch

from offload.ambient import in_neutral
from offload.checkpoint.checkpoint import require_one_owner
from offload.checkpoint.sealed_slot import SealedSlot
from offload.errors import CheckpointNotFoundError
from offload.format.arrays import MASTER
from offload.format.chunk_plan import Span
from offload.update.coding.decoder import (
    StateDecoder,
    StoredParameters,
    cut_by_parameter,
    has_master,
    kept_arrays,
)
from offload.update.dtypes import DTYPES

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint


def read_state(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """Read the optimizer state of one parameter of a checkpoint.

    This takes the memory of the result and of one block (`decoder.STATE_BLOCK_ELEMENTS`).

    Args:
        checkpoint: The checkpoint. It is kept from being recycled during the call, even if it was
            not opened by `open_checkpoint`.
        name: The parameter's name, as in ``model.safetensors``.

    Returns:
        FP32 tensors of the parameter's shape: ``master`` and every state array, as the next step
        would compute with them. They are decoded if they are stored in fewer bits. If a parameter
        was edited after the last step, ``master`` is the edited value. The arrays of a parameter
        that has never had a gradient are zeros. The data is not compared with the digests;
        `Checkpoint.verify` does that.

    Raises:
        CheckpointNotFoundError: The checkpoint has no trainable parameter of that name.
        RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been recycled.
        gds.StorageError: The checkpoint cannot be read.
    """
    require_one_owner(checkpoint)
    with checkpoint.held():
        return _read_state(checkpoint, name)


@in_neutral
def _read_state(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    manifest = checkpoint.manifest
    layout = manifest.layout
    index = next((i for i, p in enumerate(layout.parameters) if p.name == name), None)
    if index is None:
        names = ", ".join(p.name for p in layout.parameters[:8])
        raise CheckpointNotFoundError(
            errno.ENOENT,
            f"no trainable parameter {name!r} here (it has: {names}, ...)",
            checkpoint.path,
        )
    spec = layout.parameters[index]
    # A parameter that was never stepped keeps these zeros, since none of its arrays is read.
    out = {
        array: torch.zeros(spec.num_elements, dtype=torch.float32, device="cpu")
        for array in (MASTER, *kept_arrays(spec, layout))
    }
    with checkpoint.open_slot() as slot:
        live = StoredParameters(slot.model, layout)
        decoder = StateDecoder(layout, manifest.scalars, live)
        has_state = manifest.scalars[index] is not None
        for chunk in layout.chunks_of(index):
            for span in cut_by_parameter(layout.plans[chunk]):
                (piece,) = span.pieces
                if piece.parameter != index:
                    continue
                arrays = _read_span(slot, chunk, span) if has_state else {}
                _, start, values = decoder.block(piece, arrays)
                if not has_master(spec):  # an FP32 parameter is its own master
                    values[MASTER] = live.read(index, piece.start, piece.stop)
                for array, block in values.items():
                    out[array][start : start + len(block)] = block
    return {array: values.view(spec.shape) for array, values in out.items()}


def _read_span(slot: SealedSlot, chunk: int, span: Span) -> dict[str, torch.Tensor]:
    """Return the stored values of a span of a chunk, by state array."""
    layout = slot.layout
    out = {}
    for array, (start, stop) in span.values.items():
        form, share = layout.formats[array], layout.plans[chunk].arrays[array]
        data = slot.array(array, chunk).read_bytes(
            share.offset + start * form.nbytes, (stop - start) * form.nbytes
        )
        out[array] = torch.frombuffer(bytearray(data), dtype=DTYPES[form.dtype])
    return out
