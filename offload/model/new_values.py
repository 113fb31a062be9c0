"""New values of one step, which ranks that step a part of a model bring to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.format.layout import Layout


@dataclass(frozen=True, slots=True)
class Step:
    """A step that begins on this rank."""

    number: int
    """Number of the step, from 1."""

    layout: Layout
    """Layout of this rank's state."""

    stepped: Sequence[str]
    """Names of all parameters with a gradient, also of those that only other ranks step."""

    chunks: Sequence[int]
    """Chunks of this rank that the step updates, in their order."""

    memory: Callable[[str], torch.Tensor]
    """Function that returns the live tensor of the model with a name."""

    before_write: Callable[[str], object]
    """Function that waits until a tensor may be overwritten."""


class Values(Protocol):
    """New values of one step, on their way between ranks. All methods are called by one thread."""

    @property
    def num_arrived(self) -> int:
        """Number of messages that have been completed, in their order. Any thread may read it."""
        ...

    @property
    def stops(self) -> Mapping[str, int]:
        """Number of messages after which all new values of other ranks are here, by tensor.

        Tensors are named as in `Step.memory`. A tensor that no other rank steps is left out. Any
        thread may read it.
        """
        ...

    def updated(self, chunk: int) -> None:
        """Send the new values of a chunk.

        Raises:
            RanksError: A rank was lost.
        """
        ...

    def advance(self) -> bool:
        """Complete the oldest message on its way, and return whether there was one.

        This waits for the rank that sends it.
        """
        ...

    def finish(self) -> None:
        """Wait until all new values are here.

        Raises:
            RanksError: A rank failed or was lost.
        """
        ...

    def fail(self, error: BaseException) -> BaseException:
        """Take part to the end in spite of an error of this rank; return the error to raise."""
        ...
