"""Blocks: a chunk cut for code that steps neighbouring parameters with the same key in one call.

A chunk is cut into runs, which are neighbouring parameters with the same key. A run is cut into
blocks of a limited number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from offload.format.arrays import BLOCK_ELEMENTS
from offload.format.chunk_plan import Piece
from offload.format.layout import Layout
from offload.update.step_code import LoadedChunk, PieceNumbers
from offload.update.step_keys import Key


class Block(NamedTuple):
    """Elements that one call works on."""

    key: Key
    pieces: Sequence[Piece]
    stored: dict[str, torch.Tensor]
    """Stored values of the block, by state array."""

    starts: dict[str, int]
    """Index of the block's first stored value in the chunk, by state array."""


def runs(
    layout: Layout, chunk: int, keys: Sequence[Key], numbers: PieceNumbers
) -> Iterator[tuple[Key, list[int]]]:
    """Yield each run among some pieces of a chunk: its key, and the numbers of its pieces.

    Args:
        layout: Layout of the state.
        chunk: Index of the chunk.
        keys: Key of each parameter.
        numbers: The pieces.
    """
    pieces, given = layout.plans[chunk].pieces, numbers.tolist()
    found = [keys[pieces[number].parameter] for number in given]
    # The place among the given ones is subtracted, so that the numbers of a run are consecutive.
    for (key, _), run in groupby(enumerate(given), lambda at: (found[at[0]], at[1] - at[0])):
        yield key, [number for _, number in run]


def blocks(layout: Layout, chunk: LoadedChunk, key: Key, run: Sequence[int]) -> Iterator[Block]:
    """Yield the blocks of a run that `runs` has yielded, of at most `chunk.block_elements`."""
    plan = layout.plans[chunk.number]
    multiple = BLOCK_ELEMENTS if layout.state_dtype == "int8" else 1
    for span in plan.cut(run, most=chunk.block_elements, multiple=multiple):
        stored = {n: chunk.arrays[n][start:stop] for n, (start, stop) in span.values.items()}
        starts = {name: start for name, (start, _) in span.values.items()}
        yield Block(key, span.pieces, stored, starts)
