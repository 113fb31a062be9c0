"""Where the bytes of each chunk are in the tensors of a model; both ends compute the same."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeAlias

from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout

Part: TypeAlias = tuple[int, int, int]
"""Number of a tensor, first byte, and one past the last byte."""


class ChunkParts:
    """The parts of tensors that each chunk of a layout consists of.

    Args:
        layout: Layout of the parameters.
        numbers: Number of each parameter's tensor, in the order of the layout.
    """

    def __init__(self, layout: Layout, numbers: Sequence[int]) -> None:
        self.layout = layout
        self.numbers = numbers
        self._sizes = [DTYPE_BYTES[p.dtype] for p in layout.parameters]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.layout.num_chunks

    def of(self, chunk: int, only: Container[int] | None = None) -> list[Part]:
        """Return the parts of a chunk in order: all, or those of tensors with some numbers."""
        found = []
        for piece in self.layout.plans[chunk].pieces:
            number, size = self.numbers[piece.parameter], self._sizes[piece.parameter]
            if only is None or number in only:
                found.append((number, piece.start * size, piece.stop * size))
        return found


def views(parts: Sequence[Part], bytes_of: Sequence[memoryview]) -> list[memoryview]:
    """Return the memory of some parts, given the bytes of each tensor."""
    return [bytes_of[number][start:stop] for number, start, stop in parts]
