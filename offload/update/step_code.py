"""The protocol of code that steps parameters of a chunk: torch's own code, and the kernels.

There are three implementations, which do not know of each other: `TorchStep` (`torch_step`),
`KernelStep` (`kernel.kernel_step`) for the CPU, and `DeviceStep` (`device_step`). The module
`updaters` decides which of them stand behind an updater.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from offload.format.digests import Digests
from offload.update.pool import BlockContext

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


class Call(Protocol):
    """One call of some code, for some elements of a chunk."""

    def run(self, context: BlockContext, /) -> None:
        """Step the elements, and tell the chunk's digests of them.

        Args:
            context: Memory and stepper of the calling thread.
        """
        ...


class StepCode(Protocol):
    """Code that steps parameters of a chunk, for one step of the optimizer.

    Each chunk is offered to `calls` once. When all calls of the chunk have returned, `done` is
    called.
    """

    def why_not(self, group: int) -> str:
        """Return why this code can step no parameter of a group; empty if it can.

        Args:
            group: Index of the parameter group.
        """
        ...

    def add_gradient(self, index: int) -> None:
        """Note that a parameter has received a gradient, before any of its chunks is stepped.

        This looks at no tensor: a backward pass may be in progress, and may be watched.
        """
        ...

    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        """Take the pieces of a chunk that this code can step.

        Args:
            chunk: The chunk.
            numbers: Pieces that no other code has taken.

        Returns:
            Calls that step the pieces taken, for any threads, in any order; and the other pieces.
        """
        ...

    def done(self, chunk: LoadedChunk) -> None:
        """Note that all calls for a chunk have returned."""
        ...
