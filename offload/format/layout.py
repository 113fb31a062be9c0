"""Layout of a store: from parameters to element space, chunks and byte ranges in files.

Element space is all trainable elements laid end to end. It is cut into chunks, which are dealt out
to the store's drives. On each drive a state array is one file, with the elements of the drive's
chunks in order. So a chunk's share of a file is always one contiguous range.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from offload.format.arrays import (
    BLOCK_ELEMENTS,
    MASTER,
    MASTER_LOW,
    ArrayFormat,
    array_format,
)
from offload.format.boxes import Box, Cut
from offload.format.chunk_plan import ArrayShare, ChunkPlan, Piece
from offload.format.header import DTYPE_BYTES, Header, build_header
from offload.format.model_shard import ModelShard
from offload.format.names import MODEL_NAME


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Description of one trainable parameter in the files."""

    name: str
    """Name in the model, or ``group<i>.param<j>`` if the model's name is not known."""

    dtype: str
    """safetensors code of the live parameter: ``BF16``, ``F16`` or ``F32``."""

    shape: tuple[int, ...]

    group: int
    """Index of the parameter's group."""

    arrays: tuple[str, ...]
    """State arrays of the parameter on storage. There is a master only if `dtype` is not F32."""

    cut: Cut | None = None
    """Box of the parameter that is stepped here, if other ranks step the rest; None for a whole
    parameter. `shape` is the shape of the box then."""

    @property
    def box(self) -> Box:
        """Elements of the whole parameter that are stepped here."""
        return Box.whole(self.shape) if self.cut is None else self.cut.box

    @property
    def stored_name(self) -> str:
        """Name of the parameter or of its box in state files: ``weight``, ``weight[2:4, 0:16]``."""
        return self.name if self.cut is None else self.name + self.cut.box.notation()

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a 0-d parameter."""
        return math.prod(self.shape)

    @property
    def rounding_origin(self) -> tuple[str, int]:
        """Name that the keys of stochastic rounding follow from, and index of the first element.

        If the elements of a box are neighbours in the whole parameter, they get the random numbers
        that one process would give them. The elements of other boxes are counted from the first
        element of the box, under the name of the box.
        """
        if self.cut is None:
            return self.name, 0
        found = self.cut.box.contiguous_range(self.cut.shape)
        return (self.stored_name, 0) if found is None else (self.name, found[0])


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
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Position of every element of a store's state.

    Layouts are immutable. Two layouts that compare equal put every byte of the state at the same
    place.
    """

    parameters: tuple[ParameterSpec, ...]
    """Trainable parameters in element-space order."""

    model: tuple[ModelTensor, ...]
    """Tensors of ``model.safetensors``, in file order: by descending dtype size."""

    chunk_elements: int
    """Nominal length of chunks in elements. Chunks begin at multiples of it, or up to 31 elements
    later. It is a multiple of 1024, so that F32 chunks are 4096-byte aligned."""

    state_dtype: str = "float32"
    """Form in which optimizer state other than masters is stored; see `StateFormat`."""

    shares: tuple[int, ...] = (1,)
    """For each drive, its share of the state, in proportion to the others."""

    shard: ModelShard | None = field(default=None, compare=False)
    """Boxes of the model that are in a shard file of this slot or part. None if there is a
    ``model.safetensors`` with all of `model`, beside the state of owner 0."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each parameter in element space, then the length of element space."""
        return (0, *accumulate(p.num_elements for p in self.parameters))

    @property
    def num_elements(self) -> int:
        """Length of element space, in elements."""
        return self.starts[-1]

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks; 0 for an empty element space."""
        num = -(-self.num_elements // self.chunk_elements)
        # If the start of the last chunk has moved to the end of element space, that chunk does not
        # exist.
        return num - 1 if num > 1 and self._chunk_start(num - 1) == self.num_elements else num

    @cached_property
    def rounding_names(self) -> tuple[str, ...]:
        """Name that the keys of stochastic rounding follow from, for each parameter."""
        return tuple(p.rounding_origin[0] for p in self.parameters)

    @cached_property
    def rounding_starts(self) -> tuple[int, ...]:
        """Index of each parameter's first element in stochastic rounding; 0 if it is whole."""
        return tuple(p.rounding_origin[1] for p in self.parameters)

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        """Names of all state arrays: masters first, then in the order of the parameters."""
        names = dict.fromkeys(name for p in self.parameters for name in p.arrays)
        return tuple(sorted(names, key=lambda name: name not in (MASTER, MASTER_LOW)))

    @cached_property
    def formats(self) -> dict[str, ArrayFormat]:
        """Form of one stored value of each array, by the array's name."""
        return {name: array_format(name, self.state_dtype) for name in self.array_names}

    @cached_property
    def drives(self) -> tuple[int, ...]:
        """Drive of each chunk, dealt out so that neighbouring chunks keep all drives busy.

        If parameters are added at the end, every earlier chunk stays on its drive.
        """
        counts = [0] * len(self.shares)
        total = sum(self.shares)
        found = []
        for chunk in range(self.num_chunks):
            behind = [(chunk + 1) * s - n * total for s, n in zip(self.shares, counts, strict=True)]
            drive = behind.index(max(behind))
            counts[drive] += 1
            found.append(drive)
        return tuple(found)

    @cached_property
    def array_headers(self) -> tuple[dict[str, Header], ...]:
        """For each drive, the safetensors header of each state array's file on that drive.

        A parameter that is not whole on the drive is listed in flat parts. A part is called
        ``name[start:stop]`` after the elements in it.
        """
        return tuple(
            {name: build_header(self._entries(name, drive)) for name in self.array_names}
            for drive in range(len(self.shares))
        )

    def _entries(self, array: str, drive: int) -> list[tuple[str, str, tuple[int, ...]]]:
        form = self.formats[array]
        parts: list[list[int]] = []  # parameter, first element, one past the last
        for chunk, owner in enumerate(self.drives):
            if owner != drive:
                continue
            for piece in self._pieces[chunk]:
                if array not in self.parameters[piece.parameter].arrays:
                    continue
                if parts and parts[-1][::2] == [piece.parameter, piece.start]:
                    parts[-1][2] = piece.stop
                else:
                    parts.append([piece.parameter, piece.start, piece.stop])
        # Empty parameters are in no chunk. The first drive lists them, at their place in the order.
        if drive == 0:
            empty = [
                [index, 0, 0]
                for index, p in enumerate(self.parameters)
                if array in p.arrays and not p.num_elements
            ]
            parts = sorted(parts + empty, key=lambda part: part[:2])
        entries: list[tuple[str, str, tuple[int, ...]]] = []
        for index, start, stop in parts:
            p = self.parameters[index]
            num_values = self._num_values_of(array, Piece(index, start, stop, 0))
            if stop - start < p.num_elements:
                entries.append((f"{p.stored_name}[{start}:{stop}]", form.dtype, (num_values,)))
            else:
                entries.append(
                    (p.stored_name, form.dtype, p.shape if form.block == 1 else (num_values,))
                )
        return entries

    @cached_property
    def model_header(self) -> Header:
        """The safetensors header of ``model.safetensors``.

        Its metadata has ``format: pt`` and, for tied tensors, ``alias: stored name``, as the
        safetensors library's own `save_model` writes it.
        """
        metadata = {"format": "pt"}
        for tensor in self.model:
            metadata.update(dict.fromkeys(tensor.aliases, tensor.name))
        return build_header([(t.name, t.dtype, t.shape) for t in self.model], metadata)

    @property
    def model_name(self) -> str:
        """Name of the file with the slot's tensors of the model: common to all, or a shard file."""
        return MODEL_NAME if self.shard is None else self.shard.name

    @cached_property
    def model_file_header(self) -> Header:
        """The safetensors header of the file `model_name`."""
        whole = self.model_header
        if self.shard is None:
            return whole
        tensors = [(t.name, t.dtype, t.shape) for t in self.model]
        return self.shard.header(tensors, whole.metadata)

    def array_bytes(self, array: str) -> int:
        """Return the size in bytes of one state array on all drives, without headers."""
        num_values = sum(
            self._num_values(array, p.num_elements) for p in self.parameters if array in p.arrays
        )
        return num_values * self.formats[array].nbytes

    @cached_property
    def state_bytes(self) -> int:
        """Size in bytes of all state arrays together, without headers."""
        return sum(self.array_bytes(name) for name in self.array_names)

    def file_sizes(self, drive: int = 0) -> dict[str, int]:
        """Return the final size in bytes of each tensor file of a slot on one drive, by name.

        These are the files of the state arrays and, on drive 0, that of the model's tensors.
        """
        sizes = {self.model_name: self.model_file_header.file_bytes} if drive == 0 else {}
        for name, header in self.array_headers[drive].items():
            sizes[array_file_name(name)] = header.file_bytes
        return sizes

    def chunks_of(self, parameter: int) -> range:
        """Return the chunks that hold elements of a parameter; none if the parameter is empty."""
        first, last = self.starts[parameter : parameter + 2]
        if first == last:
            return range(0)
        return range(self._chunk_at(first), self._chunk_at(last - 1) + 1)

    def _chunk_start(self, chunk: int) -> int:
        start = min(chunk * self.chunk_elements, self.num_elements)
        if start == self.num_elements or self.state_dtype != "int8":
            return start
        index = bisect_right(self.starts, start) - 1
        begin, end = self.starts[index], self.starts[index + 1]
        return min(start + (begin - start) % BLOCK_ELEMENTS, end)

    def _chunk_at(self, element: int) -> int:
        """Return the chunk that contains an element of element space."""
        chunk = element // self.chunk_elements
        return chunk - 1 if self._chunk_start(chunk) > element else chunk

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces of each chunk, in order."""
        return tuple(tuple(self._pieces_of(chunk)) for chunk in range(self.num_chunks))

    def _pieces_of(self, chunk: int) -> Iterator[Piece]:
        first, last = self._chunk_start(chunk), self._chunk_start(chunk + 1)
        index = bisect_right(self.starts, first) - 1
        while index < len(self.parameters) and self.starts[index] < last:
            begin, end = self.starts[index], self.starts[index + 1]
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                yield Piece(index, start - begin, stop - begin, start - first)
            index += 1

    @cached_property
    def plans(self) -> tuple[ChunkPlan, ...]:
        """The plan of each chunk.

        A chunk of int8 state that would begin inside a block begins at the end of that block. So it
        may have up to 31 elements more or less than `chunk_elements`.
        """
        ends = [
            {name: header.data_start for name, header in headers.items()}
            for headers in self.array_headers
        ]
        plans = []
        for chunk, (drive, pieces) in enumerate(zip(self.drives, self._pieces, strict=True)):
            shares = {}
            for name, form in self.formats.items():
                starts = (0, *accumulate(self._num_values_of(name, piece) for piece in pieces))
                nbytes = starts[-1] * form.nbytes
                shares[name] = ArrayShare(
                    array_file_name(name), ends[drive][name], nbytes, form.block, starts
                )
                ends[drive][name] += nbytes
            kept = tuple(self.parameters[piece.parameter].arrays for piece in pieces)
            first, last = self._chunk_start(chunk), self._chunk_start(chunk + 1)
            plans.append(ChunkPlan(first, last, drive, pieces, kept, shares))
        return tuple(plans)

    def _num_values_of(self, array: str, piece: Piece) -> int:
        """Return the number of a piece's stored values; 0 if its parameter lacks the array."""
        index = piece.parameter
        if array not in self.parameters[index].arrays:
            return 0
        return self._num_values(array, piece.stop) - self._num_values(array, piece.start)

    def _num_values(self, array: str, elements: int) -> int:
        """Return the number of stored values for the first `elements` elements of a parameter."""
        return -(-elements // self.formats[array].block)

    def byte_range(self, array: str, chunk: int) -> tuple[int, int]:
        """Return the offset and the length of a chunk in the array's file, both in bytes.

        The file is the one on the chunk's drive.
        """
        share = self.plans[chunk].arrays[array]
        return share.offset, share.nbytes

    def max_chunk_bytes(self, array: str) -> int:
        """Return the size in bytes of the array's largest chunk; 0 if there is no chunk."""
        return max((plan.arrays[array].nbytes for plan in self.plans), default=0)

    @cached_property
    def model_stops(self) -> tuple[int, ...]:
        """For each chunk, the end of its last parameter in ``model.safetensors``, in data bytes.

        A seal that has copied that many bytes has copied every parameter of the chunk.
        """
        entries = self.model_header.entries
        stops = [entries[p.name].stop for p in self.parameters]
        return tuple(
            max((stops[piece.parameter] for piece in pieces), default=0) for pieces in self._pieces
        )


def array_file_name(array: str) -> str:
    """Return the name of a state array's file within a slot."""
    return f"{array}.safetensors"


def element_space_order(parameters: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Order parameters for a new store: by descending dtype size, otherwise as given.

    ``model.safetensors`` has the same order. So a seal copies parameters in the order in which the
    next step wants to overwrite them.
    """
    return sorted(parameters, key=lambda p: -DTYPE_BYTES[p.dtype])


def model_order(
    trainable: Sequence[ModelTensor], others: Sequence[ModelTensor]
) -> tuple[ModelTensor, ...]:
    """Order the tensors of ``model.safetensors``: by descending dtype size, then trainable first.

    Without that order an F32 tensor could start at an odd multiple of 2 bytes.
    """
    return tuple(sorted((*trainable, *others), key=lambda t: -DTYPE_BYTES[t.dtype]))
