"""Reads of boxes of a checkpoint's tensors, decoded, into memory of any layout.

Chunk after chunk is taken, so that each is read once however many boxes are wanted of it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from offload.ambient import in_neutral
from offload.checkpoint.state_owners import StateOwner, StoredBox
from offload.checkpoint.whole_state import WholeState
from offload.errors import CheckpointNotFoundError
from offload.format.arrays import MASTER
from offload.format.boxes import Box, cut_range, hull
from offload.format.chunk_plan import ChunkPlan, Piece, Span
from offload.format.layout import ModelTensor
from offload.update.coding.decoder import (
    STATE_BLOCK_ELEMENTS,
    StateDecoder,
    has_master,
    kept_arrays,
    stored_arrays,
)
from offload.update.dtypes import DTYPES

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class WantedState:
    """A box of a parameter whose state is wanted, with the memory for it."""

    name: str
    """Name of the parameter."""

    box: Box
    """Elements of the whole parameter."""

    arrays: Mapping[str, torch.Tensor]
    """Tensors of the box's sizes, by the name of the state array; `MASTER` for the FP32 parameter.
    They may have any dtype and device. If the parameter has no state yet, only the master is
    written."""


@dataclass(frozen=True, slots=True, eq=False)
class WantedTensor:
    """A box of a tensor of ``model.safetensors`` that is wanted, with the memory for it."""

    tensor: ModelTensor
    box: Box
    out: torch.Tensor
    """Tensor of the box's sizes. It may have any dtype and device."""


def read_state_boxes(state: WholeState, wanted: Sequence[WantedState]) -> None:
    """Read optimizer state as FP32, as the next step would see it.

    No value is written to the memory of a wanted box before the chunk that it comes from has been
    compared with its digests, unless `state` does not compare. This takes the memory of the stored
    values of one chunk that are wanted, and a constant.
    """
    by_name: dict[str, list[WantedState]] = {}
    for one in wanted:
        if one.box.num_elements:
            state.require_cover(one.name, one.box)
            by_name.setdefault(one.name, []).append(one)
    found = [
        (box, by_name[name])
        for name in by_name
        for box in state.boxes[name]
        if any(box.box.intersection(one.box) for one in by_name[name])
    ]
    for number, of_owner in groupby(
        sorted(found, key=lambda one: (one[0].owner.number, one[0].index)),
        key=lambda one: one[0].owner.number,
    ):
        owner = next(owner for owner in state.owners if owner.number == number)
        _read_owner(state, owner, {box.index: (box, names) for box, names in of_owner})


def read_model_boxes(state: WholeState, wanted: Iterable[WantedTensor]) -> None:
    """Read tensors of the model, with the errors of `read_state_boxes`.

    No value is written before it has been compared with its digest, unless `state` does not
    compare.
    """
    for one in wanted:
        for start in range(0, one.box.num_elements, STATE_BLOCK_ELEMENTS):
            stop = min(start + STATE_BLOCK_ELEMENTS, one.box.num_elements)
            for part in cut_range(one.box.sizes, start, stop):
                values = read_model_box(state, one.tensor, part.shifted(one.box.offsets))
                one.out[part.slices].copy_(values.view(part.sizes))


def read_model_box(state: WholeState, tensor: ModelTensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor of the model, flat, in its own dtype; see `read_model_boxes`."""
    dtype = DTYPES[tensor.dtype]
    size = dtype.itemsize
    out = torch.empty(box.num_elements, dtype=dtype, device="cpu")
    data = out.view(torch.uint8).numpy().data if box.num_elements else memoryview(b"")
    at = 0
    for start, stop in box.runs(tensor.shape):
        nbytes = (stop - start) * size
        data[at : at + nbytes] = state.read_model(tensor.name, start * size, stop * size)
        at += nbytes
    return out


class OwnedParameters:
    """Parameters in the model file, read by an owner's boxes; implements `ParameterViews`."""

    def __init__(self, state: WholeState, owner: StateOwner) -> None:
        self._state = state
        self._owner = owner
        self._tensors = {tensor.name: tensor for tensor in owner.layout.model}

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Read the elements of each piece from the file."""
        return [self.read(piece.parameter, piece.start, piece.stop) for piece in pieces]

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of an owner's box from the file, flat."""
        spec = self._owner.layout.parameters[index]
        tensor = self._tensors[spec.name]
        offsets = spec.cut.box.offsets if spec.cut else (0,) * len(spec.shape)
        parts = [
            read_model_box(self._state, tensor, part.shifted(offsets))
            for part in cut_range(spec.shape, start, stop)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Do nothing: the elements are not kept."""


def _read_owner(
    state: WholeState,
    owner: StateOwner,
    wanted: Mapping[int, tuple[StoredBox, Sequence[WantedState]]],
) -> None:
    """Read boxes of one owner, chunk by chunk."""
    layout = owner.layout
    live = OwnedParameters(state, owner)
    decoder = StateDecoder(layout, owner.scalars, live)
    for chunk in sorted({chunk for index in wanted for chunk in layout.chunks_of(index)}):
        spans = []
        plan = layout.plans[chunk]
        for number, piece in enumerate(plan.pieces):
            if piece.parameter not in wanted:
                continue
            for span in plan.cut([number], most=STATE_BLOCK_ELEMENTS):
                trimmed = _trimmed(plan, number, span, *wanted[piece.parameter])
                if trimmed is not None:
                    targets = list(_targets(trimmed.pieces[0], *wanted[piece.parameter]))
                    spans.append((trimmed, targets))
        stored = StoredChunk(state, owner, chunk)
        for span, targets in spans:
            stored.want(span, {array for target in targets for array in target.arrays})
        for span, targets in spans:
            (piece,) = span.pieces
            arrays = {array for target in targets for array in target.arrays}
            _, _, values = decoder.block(piece, stored.values(span, arrays), arrays)
            if MASTER in arrays and not has_master(layout.parameters[piece.parameter]):
                values[MASTER] = live.read(piece.parameter, piece.start, piece.stop)
            for target in targets:
                target.take(values)


class StoredChunk:
    """Stored values of one chunk.

    If data is compared with its digests, everything that is wanted of an array is read at once.
    Otherwise each span is read by itself, so that nothing else is read.

    Args:
        state: State of the checkpoint.
        owner: Owner of the chunk.
        chunk: Index of the chunk in the owner's layout.
    """

    def __init__(self, state: WholeState, owner: StateOwner, chunk: int) -> None:
        self._state = state
        self._owner = owner
        self._chunk = chunk
        self._ranges: dict[str, tuple[int, int]] = {}
        self._read: dict[str, torch.Tensor] = {}

    def want(self, span: Span, arrays: Iterable[str]) -> None:
        """Add the values of a span to those that are wanted, for the given decoded arrays."""
        for name in self._names(span, arrays):
            start, stop = span.values[name]
            low, high = self._ranges.get(name, (start, stop))
            self._ranges[name] = (min(low, start), max(high, stop))

    def values(self, span: Span, arrays: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return values of a span by stored array, after `want` of the same span and arrays."""
        found = {}
        for name in self._names(span, arrays):
            start, stop = span.values[name]
            if not self._state.verifies:
                found[name] = self._tensor(name, start, stop)
                continue
            first, last = self._ranges[name]
            if name not in self._read:
                self._read[name] = self._tensor(name, first, last)
            found[name] = self._read[name][start - first : stop - first]
        return found

    def _names(self, span: Span, arrays: Iterable[str]) -> list[str]:
        (piece,) = span.pieces
        if self._owner.scalars[piece.parameter] is None:
            return []  # what is stored means nothing
        spec = self._owner.layout.parameters[piece.parameter]
        return [name for array in arrays for name in stored_arrays(spec, array)]

    def _tensor(self, name: str, start: int, stop: int) -> torch.Tensor:
        dtype = DTYPES[self._owner.layout.formats[name].dtype]
        data = self._state.read_state(self._owner, name, self._chunk, start, stop)
        return torch.frombuffer(data, dtype=dtype)


def _trimmed(
    plan: ChunkPlan, number: int, span: Span, box: StoredBox, wanted: Sequence[WantedState]
) -> Span | None:
    """Return a span from its first to its last wanted element; None if none is wanted."""
    (piece,) = span.pieces
    commons = [box.box.intersection(one.box) for one in wanted]
    ranges = [hull(box.box, common) for common in commons if common is not None]
    if not ranges:
        return None
    starts, stops = zip(*ranges, strict=True)
    # A value may stand for several elements, and begins at a multiple of as many in the piece.
    block = max((plan.arrays[name].block for name in plan.kept[number]), default=1)
    begin = plan.pieces[number].start
    low = max(piece.start, min(starts))
    low = max(piece.start, begin + (low - begin) // block * block)
    high = min(piece.stop, max(stops))
    high = min(piece.stop, begin - (begin - high) // block * block)
    if low >= high:
        return None
    return plan.part(number, low, high)


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Elements of one block that belong into one wanted box."""

    first: int
    """First element of the block's box, counted from the first of the block."""

    part: Box
    """Box of the whole parameter that consists of elements of the block."""

    common: Box
    """Elements of the part that are wanted."""

    wanted: WantedState

    @property
    def arrays(self) -> Iterable[str]:
        """Names of the arrays that are wanted."""
        return self.wanted.arrays

    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy the wanted elements from a block's values, by array."""
        inner, outer = self.common.within(self.part), self.common.within(self.wanted.box)
        for array, out in self.wanted.arrays.items():
            if array in values:
                block = values[array][self.first : self.first + self.part.num_elements]
                out[outer.slices].copy_(block.view(self.part.sizes)[inner.slices])


def _targets(piece: Piece, box: StoredBox, wanted: Sequence[WantedState]) -> Iterator[_Target]:
    """Yield what a block gives to wanted boxes of its parameter."""
    first = 0
    for within in cut_range(box.spec.shape, piece.start, piece.stop):
        part = within.shifted(box.box.offsets)
        for one in wanted:
            common = part.intersection(one.box)
            if common is not None:
                yield _Target(first, part, common, one)
        first += part.num_elements


def read_state(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """Read the optimizer state of one parameter of a checkpoint.

    If several ranks made the checkpoint, the tensors are put together from the boxes of all its
    owners. This takes the memory of the result twice at most, and a constant. The chunks that hold
    the parameter are read as a whole, and compared with their digests.

    Args:
        checkpoint: The checkpoint. It is kept from being recycled during the call, even if it was
            not opened by `open_checkpoint`.
        name: The parameter's name, as in ``model.safetensors``.

    Returns:
        FP32 tensors of the parameter's shape: ``master`` and every state array, as the next step
        would compute with them. They are decoded if they are stored in fewer bits. If a parameter
        was edited after the last step, ``master`` is the edited value. The arrays of a parameter
        that has never had a gradient are zeros.

    Raises:
        CheckpointNotFoundError: The checkpoint has no trainable parameter of that name.
        DamagedError: A chunk is damaged. The message names file and bytes.
        CheckpointError: The part of another rank that has elements of the parameter is missing, or
            is not seen on this node. The message names its owner.
        RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been recycled.
        gds.StorageError: The checkpoint cannot be read.
    """
    with checkpoint.held(), WholeState(checkpoint) as state:
        return _read_state(state, name)


@in_neutral
def _read_state(state: WholeState, name: str) -> dict[str, torch.Tensor]:
    layout = state.layout
    spec = next((p for p in layout.parameters if p.name == name), None)
    if spec is None:
        state.require_all()
        names = ", ".join(p.name for p in layout.parameters[:8])
        raise CheckpointNotFoundError(
            errno.ENOENT,
            f"no trainable parameter {name!r} here (it has: {names}, ...)",
            state.path,
        )
    # A parameter that was never stepped keeps these zeros, since none of its arrays is read.
    out = {
        array: torch.zeros(spec.shape, dtype=torch.float32, device="cpu")
        for array in (MASTER, *kept_arrays(spec, layout))
    }
    read_state_boxes(state, [WantedState(name, Box.whole(spec.shape), out)])
    return out
