"""Parameters -> element space -> chunks -> byte ranges in files.

Element space is all trainable elements laid end to end, in an order fixed per store. It is cut
into chunks of equal length. Each state array (``master``, ``exp_avg``, ...) is one file that lists,
in element-space order, only the parameters that have that array, so a chunk's share of a file is
always one contiguous range. A layout is pure arithmetic: no torch, no files.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from offload.tensorfile import DTYPE_BYTES, Header, build_header

STATE_BYTES = 4
"""Bytes of one element of a state array: all are F32."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One trainable parameter, as the files know it."""

    name: str
    """The model's name for it, or ``group<i>.param<j>``."""

    dtype: str
    """safetensors code of the live parameter: ``BF16``, ``F16`` or ``F32``."""

    shape: tuple[int, ...]

    group: int
    """Index of its parameter group."""

    arrays: tuple[str, ...]
    """The state arrays it has; ``master`` only where `dtype` is not F32."""

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a 0-d parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of ``model.safetensors``: a trainable or frozen parameter, or a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same (tied) tensor in the model's state dict."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one chunk."""

    parameter: int
    """Index into `Layout.parameters`."""

    start: int
    """First element, counted from the parameter's first element."""

    stop: int
    """One past the last element, counted likewise."""

    at: int
    """Where `start` lies, in elements from the start of the chunk."""


@dataclass(frozen=True)
class Layout:
    """Where every element of a store's state is.

    Immutable. Two layouts that compare equal put every byte at the same place.
    """

    parameters: tuple[ParameterSpec, ...]
    """Trainable parameters in element-space order."""

    model: tuple[ModelTensor, ...]
    """Tensors of ``model.safetensors``, in file order: by descending dtype size."""

    chunk_elements: int
    """Elements in every chunk but the last; a multiple of 1024, so 4096-byte aligned in F32."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each parameter in element space, and one past the last of all."""
        return (0, *accumulate(p.num_elements for p in self.parameters))

    @property
    def num_elements(self) -> int:
        """Length of element space."""
        return self.starts[-1]

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 for an empty element space."""
        return -(-self.num_elements // self.chunk_elements)

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        """All state arrays, ``master`` first, then in the order in which parameters have them."""
        names = dict.fromkeys(name for p in self.parameters for name in p.arrays)
        return tuple(sorted(names, key=lambda name: name != "master"))

    @cached_property
    def _array_starts(self) -> dict[str, tuple[int, ...]]:
        return {
            name: (
                0,
                *accumulate(p.num_elements if name in p.arrays else 0 for p in self.parameters),
            )
            for name in self.array_names
        }

    @cached_property
    def array_headers(self) -> dict[str, Header]:
        """The safetensors header of each state array's file."""
        return {
            name: build_header(
                [(p.name, "F32", p.shape) for p in self.parameters if name in p.arrays]
            )
            for name in self.array_names
        }

    @cached_property
    def model_header(self) -> Header:
        """The safetensors header of ``model.safetensors``.

        Carries ``format: pt`` and, for tied tensors, ``alias: stored name``, as the safetensors
        library's own `save_model` does.
        """
        metadata = {"format": "pt"}
        for tensor in self.model:
            metadata.update(dict.fromkeys(tensor.aliases, tensor.name))
        return build_header([(t.name, t.dtype, t.shape) for t in self.model], metadata)

    @property
    def state_bytes(self) -> int:
        """Bytes of all state arrays together, headers not counted."""
        return sum(starts[-1] for starts in self._array_starts.values()) * STATE_BYTES

    def file_sizes(self) -> dict[str, int]:
        """Return the final size in bytes of every safetensors file of a slot, by file name."""
        sizes = {"model.safetensors": self.model_header.file_bytes}
        for name, header in self.array_headers.items():
            sizes[array_file_name(name)] = header.file_bytes
        return sizes

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the chunk's first element and one past its last, in element space."""
        first = chunk * self.chunk_elements
        return first, min(first + self.chunk_elements, self.num_elements)

    def pieces(self, chunk: int) -> Iterator[Piece]:
        """Yield the parts of parameters that make up a chunk, in order; empty ones are left out."""
        first, last = self.chunk_range(chunk)
        index = bisect_right(self.starts, first) - 1
        while index < len(self.parameters) and self.starts[index] < last:
            begin, end = self.starts[index], self.starts[index + 1]
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                yield Piece(index, start - begin, stop - begin, start - first)
            index += 1

    def array_range(self, array: str, first: int, last: int) -> tuple[int, int]:
        """Map a range of element space to elements of one state array.

        Returns the first element and one past the last, counted within the array. Elements whose
        parameter lacks the array take no room.
        """
        return self._array_position(array, first), self._array_position(array, last)

    def _array_position(self, array: str, element: int) -> int:
        index = min(bisect_right(self.starts, element) - 1, len(self.parameters))
        position = self._array_starts[array][index]
        if index < len(self.parameters) and array in self.parameters[index].arrays:
            position += element - self.starts[index]
        return position

    def byte_range(self, array: str, chunk: int) -> tuple[int, int]:
        """Return the chunk's offset in the array's file and its length there, both in bytes."""
        first, last = self.array_range(array, *self.chunk_range(chunk))
        data_start = self.array_headers[array].data_start
        return data_start + first * STATE_BYTES, (last - first) * STATE_BYTES

    def max_chunk_bytes(self, array: str) -> int:
        """Return the most bytes that one chunk of the array needs."""
        return max((self.byte_range(array, c)[1] for c in range(self.num_chunks)), default=0)

    @cached_property
    def model_stops(self) -> tuple[int, ...]:
        """For each chunk: bytes of ``model.safetensors`` data up to the end of its parameters.

        A seal that has copied that many bytes has copied every parameter of the chunk.
        """
        entries = self.model_header.entries
        stops = [entries[p.name].stop for p in self.parameters]
        return tuple(
            max((stops[piece.parameter] for piece in self.pieces(chunk)), default=0)
            for chunk in range(self.num_chunks)
        )

    def contains(self, older: Layout) -> bool:
        """Return whether every element of `older` has the same place in this layout."""
        return (
            self.chunk_elements == older.chunk_elements
            and self.parameters[: len(older.parameters)] == older.parameters
        )


def array_file_name(array: str) -> str:
    """Return the name of a state array's file within a slot."""
    return f"{array}.safetensors"


def element_space_order(parameters: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Order parameters for a new store: by descending dtype size, otherwise as given.

    It is the order of ``model.safetensors`` too, so that a seal copies parameters in the order in
    which the next step wants to overwrite them.
    """
    return sorted(parameters, key=lambda p: -DTYPE_BYTES[p.dtype])


def model_order(
    trainable: Sequence[ModelTensor], others: Sequence[ModelTensor]
) -> tuple[ModelTensor, ...]:
    """Order the tensors of ``model.safetensors``: by descending dtype size, trainable ones first.

    Without that order an F32 tensor could start at an odd multiple of 2 bytes.
    """
    return tuple(sorted((*trainable, *others), key=lambda t: -DTYPE_BYTES[t.dtype]))
