"""Coder of one block's state and master: from their stored form to FP32, and back.

The exact format is FP32 already, and is updated in place. Smaller formats are decoded into scratch
memory that stays in cache, and are encoded again after torch's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from offload.device.boundary import is_on_device
from offload.format import rounding_keys
from offload.format.arrays import BLOCK_ELEMENTS, MASTER, MASTER_LOW, scale_name
from offload.format.chunk_plan import Piece
from offload.format.layout import Layout
from offload.update.coding import blocks8, rounding
from offload.update.pool import BlockMemory


class StateCoder:
    """Decodes and encodes the state arrays other than masters."""

    def __init__(self, layout: Layout, seed: int = 0, step: int = 0) -> None:
        self._layout = layout
        self._state_dtype = layout.state_dtype
        self._seed = seed
        self._step = step
        self._keys: dict[str, rounding_keys.ParameterKeys] = {}
        """Rounding keys by state array. The first thread that needs the keys makes them."""

    @cached_property
    def _names(self) -> np.ndarray[Any, Any]:
        return rounding_keys.name_numbers(self._layout.rounding_names)

    @cached_property
    def _has_cuts(self) -> bool:
        return any(self._layout.rounding_starts)

    @property
    def is_exact(self) -> bool:
        """Whether the stored values are the FP32 values themselves."""
        return self._state_dtype == "float32"

    def load(
        self,
        context: BlockMemory,
        names: Sequence[str],
        stored: Mapping[str, torch.Tensor],
        pieces: Sequence[Piece],
        *,
        new: bool,
    ) -> dict[str, torch.Tensor]:
        """Return arrays of a block as flat FP32, to be changed in place and passed to `store`."""
        if self.is_exact:
            return {name: stored[name] for name in names}
        return {name: self._load(context, name, stored, pieces, new=new) for name in names}

    def _load(
        self,
        context: BlockMemory,
        name: str,
        stored: Mapping[str, torch.Tensor],
        pieces: Sequence[Piece],
        *,
        new: bool,
    ) -> torch.Tensor:
        values = stored[name]
        out = context.buffer(name, torch.float32, len(values))
        if new:
            return out
        if self._state_dtype == "bfloat16":
            out.copy_(values)
            return out
        scales = stored[scale_name(name)]
        for elements, blocks in _spans(pieces):
            blocks8.decode_blocks(
                values[elements],
                scales[blocks],
                out[elements],
                scratch=context.scratch,
            )
        return out

    def store(
        self,
        context: BlockMemory,
        values: Mapping[str, torch.Tensor],
        stored: Mapping[str, torch.Tensor],
        pieces: Sequence[Piece],
    ) -> None:
        """Encode arrays of a block into their stored form. Does nothing for the exact format."""
        for name, exact in values.items():
            if self._state_dtype == "bfloat16":
                self._round(context, name, exact, stored[name], pieces)
            elif self._state_dtype == "int8":
                scales = stored[scale_name(name)]
                for elements, blocks in _spans(pieces):
                    blocks8.encode_blocks(
                        exact[elements],
                        stored[name][elements],
                        scales[blocks],
                        scratch=context.scratch,
                    )

    def _round(
        self,
        context: BlockMemory,
        name: str,
        values: torch.Tensor,
        out: torch.Tensor,
        pieces: Sequence[Piece],
    ) -> None:
        """Round an array of a block to bfloat16."""
        keys = self._keys.get(name)
        if keys is None:
            keys = rounding_keys.ParameterKeys(self._names, self._seed, name, self._step)
            self._keys[name] = keys
        if self._has_cuts:
            pieces = [self._in_parameter(piece) for piece in pieces]
        rounding.round_runs(values, out, pieces, keys=keys, scratch=context.scratch)

    def _in_parameter(self, piece: Piece) -> Piece:
        """Return a piece of a box, counted from the first element of the whole parameter."""
        start = self._layout.rounding_starts[piece.parameter]
        return replace(piece, start=piece.start + start, stop=piece.stop + start)


def load_master(
    memory: BlockMemory,
    live: torch.Tensor,
    stored: Mapping[str, torch.Tensor],
    *,
    new: bool,
    in_place: bool,
) -> torch.Tensor:
    """Return the FP32 parameter of a block, with the edits of its live parameter.

    If `in_place`, it is the stored master itself, or the live parameter if that is its own master.
    """
    if in_place and MASTER not in stored and MASTER_LOW not in stored:
        return live
    if in_place and MASTER in stored:
        out = stored[MASTER]
    else:
        out = memory.buffer(MASTER, torch.float32, len(live))
    if new:
        return out.copy_(live)
    if MASTER_LOW in stored:
        rounding.join_master(live, stored[MASTER_LOW], out, scratch=memory.scratch)
        return out
    rounded = memory.buffer("rounded", live.dtype, len(live)).copy_(stored[MASTER])
    if not in_place:
        out.copy_(stored[MASTER])
    take_edits(out, live, rounded)
    return out


def take_edits(master: torch.Tensor, live: torch.Tensor, rounded: torch.Tensor) -> None:
    """Replace the values of a master whose live parameter has been edited since the last step."""
    # Bits are compared: NaN equals itself, and 0.0 differs from -0.0. If the alignment allows it,
    # eight bytes are compared at a time, which takes a third of the time of a cast.
    if is_on_device(master):  # torch.equal would wait for the device
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))
        return
    wide = len(live) % 4 == 0 and live.data_ptr() % 8 == 0 and live.storage_offset() % 4 == 0
    wide = wide and live.is_contiguous()
    bits = torch.int64 if wide else torch.int16
    if not torch.equal(rounded.view(bits), live.view(bits)):
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))


def _spans(pieces: Sequence[Piece]) -> Iterator[tuple[slice, slice]]:
    """Yield slices of elements, and of their blocks, which begin anew at each piece."""
    first_element = first_block = element = num_blocks = 0
    for piece in pieces:
        length = piece.stop - piece.start
        element += length
        num_blocks += -(-length // BLOCK_ELEMENTS)
        if length % BLOCK_ELEMENTS:
            yield slice(first_element, element), slice(first_block, num_blocks)
            first_element, first_block = element, num_blocks
    if first_element < element:
        yield slice(first_element, element), slice(first_block, num_blocks)
