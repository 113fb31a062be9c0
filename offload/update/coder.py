"""The state of one hot block as FP32, whatever it is stored as.

The exact format is FP32 already, and is worked on where it lies. Smaller formats are decoded into
scratch memory that stays in cache, and encoded again when torch's step has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from offload.format import rounding_keys
from offload.format.arrays import BLOCK_ELEMENTS, scale_name
from offload.format.layout import Layout, Piece
from offload.update import blocks8, codecs
from offload.update.pool import BlockMemory


class StateCoder:
    """Decodes and encodes the state arrays other than masters.

    Args:
        layout: Of the store.
        seed: Of stochastic rounding.
        step: Number of the step that is being taken: each one rounds differently.
    """

    def __init__(self, layout: Layout, seed: int = 0, step: int = 0) -> None:
        self._layout = layout
        self._state_dtype = layout.state_dtype
        self._seed = seed
        self._step = step
        self._keys: dict[str, rounding_keys.ParameterKeys] = {}
        """By state array: made by the first thread that needs them."""

    @cached_property
    def _names(self) -> np.ndarray[Any, Any]:
        return rounding_keys.name_numbers([p.name for p in self._layout.parameters])

    @property
    def is_exact(self) -> bool:
        """Whether what is stored is the FP32 values themselves."""
        return self._state_dtype == "float32"

    def load(
        self,
        context: BlockMemory,
        name: str,
        stored: Mapping[str, torch.Tensor],
        pieces: Sequence[Piece],
        *,
        new: bool,
    ) -> torch.Tensor:
        """Return an array of a block as flat FP32, to be changed in place and given to `store`.

        Args:
            context: Memory of the thread.
            name: The array.
            stored: What is stored of each array for the block.
            pieces: What the block is made up of.
            new: Whether there is nothing stored yet; the result may then hold anything.
        """
        values = stored[name]
        if self.is_exact:
            return values
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
        name: str,
        values: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        pieces: Sequence[Piece],
        first_element: int,
    ) -> None:
        """Write an array of a block back to what is stored of it.

        Args:
            context: Memory of the thread.
            name: The array.
            values: What `load` returned.
            stored: As for `load`.
            pieces: As for `load`.
            first_element: Where the block begins in element space.
        """
        if self._state_dtype == "bfloat16":
            self._round(context, name, values, stored[name], pieces, first_element)
        elif self._state_dtype == "int8":
            scales = stored[scale_name(name)]
            for elements, blocks in _spans(pieces):
                blocks8.encode_blocks(
                    values[elements],
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
        first_element: int,
    ) -> None:
        """Round an array of a block with the random numbers that its layout says."""
        if self._layout.counts_from == "chunk":
            stream = rounding_keys.stream_of(name)
            key = partial(rounding_keys.element_space_key, self._seed, stream, self._step)
            codecs.round_stochastic(
                values, out, key=key, first_element=first_element, scratch=context.scratch
            )
            return
        keys = self._keys.get(name)
        if keys is None:
            keys = rounding_keys.ParameterKeys(self._names, self._seed, name, self._step)
            self._keys[name] = keys
        codecs.round_runs(values, out, pieces, keys=keys, scratch=context.scratch)


def _spans(pieces: Sequence[Piece]) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of elements, and of the blocks of 32 in them, to be encoded in one call.

    Blocks start anew at each piece, so a call ends where a piece ends inside a block. A piece
    begins where the layout's blocks do: see `Layout.chunk_range`.
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
