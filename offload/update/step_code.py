"""The protocol of code that steps parameters of a chunk, and the blocks that its calls work on.

The implementations are `TorchStep` (`torch_step`), `KernelStep` (`kernel.kernel_step`) for the CPU,
and `DeviceStep` (`device_step`). A chunk is cut into runs, which are neighbouring parameters with
the same key, and a run into blocks of a limited number of elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from offload.format.arrays import BLOCK_ELEMENTS
from offload.format.chunk_plan import Piece
from offload.format.digests import Digests
from offload.format.layout import Layout
from offload.update.pool import BlockContext
from offload.update.step_keys import Key

PieceNumbers: TypeAlias = np.ndarray[Any, Any]
"""Numbers of pieces, as indices into `ChunkPlan.pieces`: ascending, int64, shape (n,)."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedChunk:
    """A chunk in memory, and how the place in which it is stepped divides the work."""

    number: int
    """Index of the chunk."""

    arrays: Mapping[str, torch.Tensor]
    """The chunk's range of each state array, flat, in the stored dtype; updated in place."""

    digests: Digests | None
    """Digests that each call tells of the bytes that are final after it; None if no call does."""

    num_threads: int
    """Number of threads that run the calls."""

    block_elements: int
    """Maximal number of elements that one call of torch's step works on."""


Call: TypeAlias = Callable[[BlockContext], object]
"""Function that steps some elements of a chunk, and tells the chunk's digests of them."""


class StepCode(ABC):
    """Code that steps parameters: `calls` is asked once for each chunk, and `done` follows."""

    doubts: Sequence[str] = ()
    """How this code differs from torch's own step, although it is used."""

    def why_not(self, group: int) -> str:  # noqa: ARG002
        """Return why this code can step no parameter of a group; empty if it can."""
        return ""

    def add_gradient(self, index: int) -> None:  # noqa: B027
        """Note that a parameter has received a gradient, before any of its chunks is stepped.

        This looks at no tensor: a backward pass may be in progress, and may be watched.
        """

    @abstractmethod
    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        """Take the pieces of a chunk that this code can step, out of those that are left.

        The result is calls, for any threads in any order, and the numbers of the other pieces.
        """

    def done(self, chunk: LoadedChunk) -> None:  # noqa: B027
        """Note that all calls for a chunk have returned."""


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
    """Yield each run among some pieces of a chunk: its key, and the numbers of its pieces."""
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
