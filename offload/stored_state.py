"""The state of one hot block as FP32, whatever it is stored as.

The exact format is FP32 already, and is worked on where it lies. Smaller formats are decoded into
scratch memory that stays in cache, and encoded again when torch's step has run.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from offload import blocks8, codecs
from offload.formats import BLOCK_ELEMENTS, scale_name
from offload.layout import Piece
from offload.update_pool import BlockMemory


class StateCoder:
    """Decodes and encodes the state arrays other than masters.

    Args:
        state_dtype: As in `Options`.
        seed: Of stochastic rounding.
        step: Number of the step that is being taken: each one rounds differently.
    """

    def __init__(self, state_dtype: str, seed: int, step: int) -> None:
        self._state_dtype = state_dtype
        self._seed = seed
        self._step = step

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
            codecs.round_stochastic(
                values,
                stored[name],
                seed=self._seed,
                stream=zlib.crc32(name.encode()),
                step=self._step,
                first_element=first_element,
                scratch=context.scratch,
            )
        elif self._state_dtype == "int8":
            scales = stored[scale_name(name)]
            for elements, blocks in _spans(pieces):
                blocks8.encode_blocks(
                    values[elements],
                    stored[name][elements],
                    scales[blocks],
                    scratch=context.scratch,
                )


def _spans(pieces: Sequence[Piece]) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of elements, and of the blocks of 32 in them, to be encoded in one call.

    Blocks start anew at each parameter, so a call ends where a parameter ends inside a block.
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
