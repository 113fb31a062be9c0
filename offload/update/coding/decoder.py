"""Decoder of stored state: the FP32 values that the next step would see, block by block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from gds import File
from offload.device.filed import NewValues
from offload.device.staging import on_host
from offload.format.arrays import MASTER, MASTER_LOW, scale_name
from offload.format.chunk_plan import ChunkPlan, Piece, Span
from offload.format.layout import Layout, ParameterSpec
from offload.update.coding.coder import StateCoder, load_master
from offload.update.dtypes import DTYPES
from offload.update.kept_state import Scalars
from offload.update.pool import BlockMemory

STATE_BLOCK_ELEMENTS = 512 << 10
"""Elements that are decoded or encoded at a time: 2 MiB of each array in FP32. A multiple of 32."""

DecodedBlock: TypeAlias = tuple[int, int, dict[str, torch.Tensor]]
"""Index of a parameter in the layout, index of the first element, and values of the block.

The values are flat FP32 tensors, one per state array and one for the master. They are valid until
the next block is requested. A parameter that has no state yet has a master only. An FP32 parameter
is its own master, so its blocks have no master."""


class ParameterViews(Protocol):
    """Flat parameters, such as `FlatTensors`."""

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the elements of each piece."""
        ...

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Report that elements of pieces, which have been viewed, are not used any more."""
        ...


def copy_values(live: ParameterViews, into: NewValues) -> None:
    """Copy live parameters into flat memory of the host, as they are.

    What is in that memory already, because it was read there, is left as it is.
    """
    for pieces, out in into:
        views, at = live.views(pieces), 0
        for view in views:
            part = out[at : at + len(view)]
            at += len(view)
            if view.data_ptr() != part.data_ptr():
                part.copy_(view)


class StoredParameters:
    """Parameters in the ``model.safetensors`` of a checkpoint; implements `ParameterViews`."""

    def __init__(self, file: File, layout: Layout) -> None:
        self._file = file
        self._layout = layout

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Read the elements of each piece from the file."""
        return [self.read(piece.parameter, piece.start, piece.stop) for piece in pieces]

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of a parameter from the file."""
        spec, header = self._layout.parameters[index], self._layout.model_header
        dtype = DTYPES[spec.dtype]
        if start == stop:
            return torch.empty(0, dtype=dtype, device="cpu")
        at = header.data_start + header.entries[spec.name].start + start * dtype.itemsize
        data = self._file.read_bytes(at, (stop - start) * dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=dtype)

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Do nothing: the elements are not kept."""


def kept_arrays(spec: ParameterSpec, layout: Layout) -> tuple[str, ...]:
    """Return the state arrays that the optimizer keeps for a parameter, by torch's names."""
    return tuple(
        name
        for name in spec.arrays
        if name not in (MASTER, MASTER_LOW) and layout.formats[name].block == 1
    )


def has_master(spec: ParameterSpec) -> bool:
    """Return whether a parameter has an FP32 master apart from itself."""
    return spec.dtype != "F32"


def stored_arrays(spec: ParameterSpec, array: str) -> tuple[str, ...]:
    """Return the stored arrays of a parameter that one decoded array is computed from.

    Args:
        spec: The parameter.
        array: `MASTER`, or one of `kept_arrays`.
    """
    names = (MASTER, MASTER_LOW) if array == MASTER else (array, scale_name(array))
    return tuple(name for name in names if name in spec.arrays)


def cut_by_parameter(plan: ChunkPlan) -> list[Span]:
    """Cut a chunk into blocks of one parameter each, where 8-bit state can be cut."""
    return [
        span
        for number in range(len(plan.pieces))
        for span in plan.cut([number], most=STATE_BLOCK_ELEMENTS)
    ]


def stored_block(span: Span, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of a block's stored values, by state array."""
    return {name: arrays[name][start:stop] for name, (start, stop) in span.values.items()}


class StateDecoder:
    """Decodes stored state. Every reader of state as FP32 uses this class.

    Args:
        layout: Layout of the store.
        scalars: Scalar state of each parameter; None for a parameter that has no state yet.
        live: Live parameters. If one differs from its rounded master, its own value is used, as
            in a step.
    """

    def __init__(
        self, layout: Layout, scalars: Sequence[Scalars | None], live: ParameterViews
    ) -> None:
        self._layout = layout
        self._scalars = scalars
        self._live = live
        self._memory = BlockMemory()
        self._coder = StateCoder(layout)

    def blocks(self, chunk: int, arrays: Mapping[str, torch.Tensor]) -> Iterator[DecodedBlock]:
        """Decode one chunk, block by block.

        Args:
            chunk: Index of the chunk.
            arrays: The chunk's range of each state array, as it is stored.
        """
        plan = self._layout.plans[chunk]
        with on_host(self._live, chunk, plan.pieces):
            for span in cut_by_parameter(plan):
                (piece,) = span.pieces
                yield self.block(piece, stored_block(span, arrays))

    def block(
        self,
        piece: Piece,
        stored: Mapping[str, torch.Tensor],
        wanted: Collection[str] | None = None,
    ) -> DecodedBlock:
        """Decode one block.

        Args:
            piece: The one piece of a span of `cut_by_parameter`.
            stored: Stored values of the block, by state array; see `stored_arrays`.
            wanted: Names of the arrays to decode, as they are in the result; None for all.
        """
        spec = self._layout.parameters[piece.parameter]
        new = self._scalars[piece.parameter] is None
        out = {}
        if has_master(spec) and (wanted is None or MASTER in wanted):
            (live,) = self._live.views([piece])
            out[MASTER] = load_master(self._memory, live, stored, new=new, in_place=False)
            self._live.finish([piece])
        if not new:
            names = kept_arrays(spec, self._layout)
            if wanted is not None:
                names = tuple(name for name in names if name in wanted)
            out |= self._coder.load(self._memory, names, stored, [piece], new=False)
        return piece.parameter, piece.start, out
