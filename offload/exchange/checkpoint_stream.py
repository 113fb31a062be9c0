"""Stream of a checkpoint's state as FP32, through a bounded ring, with its digests checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.second_read import checked
from offload.checkpoint.state_owners import StateOwner
from offload.checkpoint.whole_state import WholeState
from offload.exchange.state_boxes import OwnedParameters, WantedState, read_state_boxes
from offload.format.arrays import MASTER
from offload.format.boxes import cut_range
from offload.format.layout import Layout, ParameterSpec
from offload.format.manifest import Manifest
from offload.stream.passes import RingPass, ring_for_one_pass
from offload.update.coding.decoder import (
    DecodedBlock,
    ParameterViews,
    StateDecoder,
    StoredParameters,
    has_master,
    kept_arrays,
)
from offload.update.kept_state import Scalars, write_scalars

_BLOCK_BYTES: Final = 16 << 20
"""Number of bytes of a tensor in shard files that are put together at a time."""

Progress: TypeAlias = Callable[[int, int], object]
"""Function that is called with the number of bytes done so far and the total number of bytes."""


class CheckpointStream:
    """Source of an export's data: one checkpoint, put together from the boxes of all its owners.

    A checkpoint of one process is the case of one owner with whole parameters.

    Args:
        checkpoint: The checkpoint, which is locked against recycling.
        state: All its state; what is read is compared with its digests.
        again: The same, for reading what has been compared already.
        progress: Function that is told of the bytes read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: WholeState,
        again: WholeState,
        progress: Progress | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.manifest = checkpoint.manifest
        self.has_optimizer: bool = self.manifest.has_state and not self.manifest.is_untrained
        """Whether there is state of an optimizer to export."""
        self.layout: Layout = state.layout
        """Layout of whole parameters."""
        self.stored_scalars: Sequence[Scalars | None] = state.scalars
        """For each parameter, its scalar state; None if it has no state yet."""
        self._state = state
        self._again = again
        self._progress = progress
        self._done_bytes = 0
        self._blocks: Iterator[DecodedBlock] | None = None
        """What follows `_block` in stream order; None before the first block."""
        self._block: DecodedBlock = (-1, 0, {})
        """Parameter, first element and values of the block that was asked for last."""
        self._is_checked = False
        """Whether all state of several owners has been compared with its digests."""
        header = self.layout.model_header
        self.total_bytes: int = (
            header.file_bytes
            - header.data_start
            + sum(
                4 * p.num_elements * len(self.exported_arrays(i))
                for i, p in enumerate(self.layout.parameters)
            )
        )
        """Bytes of the model in its own dtype plus the state in FP32. An export is at least this
        large."""

    def exported_arrays(self, index: int) -> tuple[str, ...]:
        """Return the names of the FP32 arrays in a parameter's `blocks`: the master, then state."""
        spec = self.layout.parameters[index]
        if not self.has_optimizer:
            return ()
        names: tuple[str, ...] = (MASTER,) if has_master(spec) else ()
        if self.stored_scalars[index] is not None:
            names += kept_arrays(spec, self.layout)
        return names

    def scalars(self, index: int) -> dict[str, Any]:
        """Return fresh objects for the scalar state of a parameter, as torch has them."""
        values = self.stored_scalars[index]
        return write_scalars(values) if values is not None else {}

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups as in torch's state dict, with parameter numbers and names."""
        return parameter_groups(self.manifest, self.layout)

    def blocks(self) -> Iterator[DecodedBlock]:
        """Yield the FP32 state as the next step would see it, owner after owner.

        Every chunk is compared with its digests.

        Raises:
            DamagedError: The data that was read differs from the data that was written.
        """
        numbers = {spec.name: index for index, spec in enumerate(self.layout.parameters)}
        for owner in self._state.owners:
            for index, start, values in self._decoded(owner):
                spec = owner.layout.parameters[index]
                number = numbers[spec.name]
                if spec.cut is None:
                    yield number, start, values
                else:
                    whole = self.layout.parameters[number].shape
                    yield from _uncut(number, whole, spec, start, values)
                self._advance(sum(block.nbytes for block in values.values()))

    def _decoded(self, owner: StateOwner) -> Iterator[DecodedBlock]:
        """Yield the blocks of one owner, each chunk compared with its digests."""
        layout, files = owner.layout, self._state.files(owner)
        live: ParameterViews = (
            OwnedParameters(self._state, owner)
            if self.manifest.owners
            else StoredParameters(files.model, layout)
        )
        decoder = StateDecoder(layout, owner.scalars, live)
        chunks = range(layout.num_chunks)
        with ring_for_one_pass(self.checkpoint.backend, layout, verify_reads=True) as streamer:
            reading = RingPass(streamer, source=files)
            reading.announce(chunks)
            for chunk in chunks:
                with reading.taken(chunk) as frame:
                    yield from decoder.blocks(chunk, frame.tensors())

    def block_of_state(self, index: int, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a state array as FP32, which are valid until the next call.

        Elements are asked for in the order of one owner's `blocks`, and in blocks that
        `decoder.cut_by_parameter` makes of the layout's chunks. Every chunk is compared with its
        digests: those of several owners all at the first call, and what is returned is then read
        again. Call `finish` after the last call.
        """
        at, first, values = self._block
        if at != index or start < first or stop > first + len(values[name]):
            find = self._read_again if self.manifest.owners else self._next_with
            at, first, values = self._block = find(index, name, start, stop)
        return values[name][start - first : stop - first]

    def _next_with(self, index: int, name: str, start: int, stop: int) -> DecodedBlock:
        """Return the next block that has some elements."""
        # If the order is another, the second pass reads all again.
        for _ in range(2):
            self._blocks = self._blocks or self.blocks()
            for block in self._blocks:
                at, first, values = block
                if at == index and first <= start and stop <= first + len(values[name]):
                    return block
            self._blocks = None
        raise RuntimeError(f"no block has elements {start} to {stop} of parameter {index}")

    def _read_again(self, index: int, _name: str, start: int, stop: int) -> DecodedBlock:
        """Return a block of all arrays of a parameter, when all state has been checked."""
        if not self._is_checked:
            for _ in self.blocks():
                continue
            self._is_checked = True
        spec = self.layout.parameters[index]
        values = {
            array: torch.empty(stop - start, dtype=torch.float32, device="cpu")
            for array in self.exported_arrays(index)
        }
        wanted, done = [], 0
        for box in cut_range(spec.shape, start, stop):
            end = done + box.num_elements
            arrays = {n: v[done:end].view(box.sizes) for n, v in values.items()}
            wanted.append(WantedState(spec.name, box, arrays))
            done = end
        read_state_boxes(self._again, wanted)
        return index, start, values

    def finish(self) -> None:
        """Read what `block_of_state` has not been asked for, so that the memory is freed."""
        for _ in self._blocks or ():
            continue

    def model_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the data of the model in order, as pairs of byte offset and bytes.

        Offsets count from the start of the data in ``model.safetensors``. If the model is in shard
        files, it is put together tensor by tensor. Every block is compared with its digest.

        Raises:
            DamagedError: The data that was read differs from the data that was written.
        """
        for start, data in self._pieces_of_model() if self._state.is_sharded else self._ranges():
            yield start, data
            self._advance(len(data))

    def _pieces_of_model(self) -> Iterator[tuple[int, bytes]]:
        for entry in self.layout.model_header.entries.values():
            for start in range(0, entry.nbytes, _BLOCK_BYTES):
                stop = min(start + _BLOCK_BYTES, entry.nbytes)
                yield entry.start + start, bytes(self._state.read_model(entry.name, start, stop))

    def _ranges(self) -> Iterator[tuple[int, bytes]]:
        slot, data_start = self._state.slot, self.layout.model_header.data_start
        for block in slot.model_ranges():
            read = memoryview(slot.model.read_bytes(block.offset, block.nbytes))
            # The first read went through the page cache.
            data, _ = checked(slot.model, block, read, slot.context, direct=True)
            yield block.offset - data_start, bytes(data)

    def read_model(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return bytes `start` to `stop` of one tensor of the model, without checking them."""
        if start == stop:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._again.read_model(name, start, stop), dtype=torch.uint8)

    def _advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(min(self._done_bytes, self.total_bytes), self.total_bytes)


def _uncut(
    number: int,
    whole: tuple[int, ...],
    spec: ParameterSpec,
    start: int,
    values: Mapping[str, torch.Tensor],
) -> Iterator[DecodedBlock]:
    """Yield a block of a box in ranges that are contiguous in the whole parameter."""
    first, num = 0, len(next(iter(values.values()), ()))
    for part in cut_range(spec.shape, start, start + num) if num else ():
        for low, high in part.shifted(spec.box.offsets).runs(whole):
            last = first + high - low
            yield number, low, {name: v[first:last] for name, v in values.items()}
            first = last


def parameter_groups(manifest: Manifest, layout: Layout) -> list[dict[str, Any]]:
    """Return parameter groups as in torch's state dict, with parameter numbers and names."""
    out, number = [], 0
    for hyper, members in zip(manifest.groups, _members(manifest, layout), strict=True):
        group = {k: v for k, v in hyper.items() if k not in ("params", "param_names")}
        group["params"] = list(range(number, number + len(members)))
        group["param_names"] = [layout.model[position].name for position in members]
        number += len(members)
        out.append(group)
    return out


def _members(manifest: Manifest, layout: Layout) -> list[list[int]]:
    """Return the positions of each group's parameters in the model."""
    if manifest.order is not None:
        return [list(group) for group in manifest.order]
    positions = {tensor.name: i for i, tensor in enumerate(layout.model)}
    members: list[list[int]] = [[] for _ in manifest.groups]
    for spec in layout.parameters:
        members[spec.group].append(positions[spec.name])
    return members


@contextmanager
def open_stream(
    checkpoint: Checkpoint, progress: Progress | None = None
) -> Iterator[CheckpointStream]:
    """Open the files of a checkpoint for streaming; they are closed at the end of the block."""
    with (
        checkpoint.held(),
        WholeState(checkpoint) as state,
        WholeState(checkpoint, verify=False) as again,
    ):
        state.require_all()
        if not checkpoint.manifest.owners:
            state.slot.open_all()
        yield CheckpointStream(checkpoint, state, again, progress)
