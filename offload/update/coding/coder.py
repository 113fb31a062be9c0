"""Coder of one block's state: from its stored form to FP32, and back.

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

from offload.format import rounding_keys
from offload.format.arrays import BLOCK_ELEMENTS, scale_name
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


def _spans(pieces: Sequence[Piece]) -> Iterator[tuple[slice, slice]]:
    """Yield slices of elements, and of their blocks of 32, that one call can decode or encode.

    Blocks of 32 restart at each piece, so a call ends if a piece ends inside a block. Every piece
    begins at a block of the layout, see `Layout.plans`.
    """
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
