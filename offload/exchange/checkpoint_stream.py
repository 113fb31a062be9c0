"""Stream of a checkpoint's state as FP32, through a bounded ring, with its digests checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.sealed_slot import SealedSlot
from offload.checkpoint.second_read import checked
from offload.checkpoint.whole_state import WholeState
from offload.exchange.state_boxes import OwnedParameters, WantedState, read_state_boxes
from offload.format.arrays import MASTER
from offload.format.boxes import cut_range
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.stream.passes import RingPass, ring_for_one_pass
from offload.update.coding.decoder import (
    DecodedBlock,
    StateDecoder,
    StoredParameters,
    has_master,
    kept_arrays,
)
from offload.update.kept_state import Scalars, write_scalars

Progress: TypeAlias = Callable[[int, int], object]
"""Function that is called with the number of bytes done so far and the total number of bytes."""


class CheckpointStream:
    """Source of an export's data: one open checkpoint, locked against recycling, read in order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        slot: SealedSlot,
        progress: Progress | None,
        state: WholeState,
    ) -> None:
        self.checkpoint = checkpoint
        self.manifest = checkpoint.manifest
        self.layout: Layout = state.layout
        """Layout of whole parameters."""
        self.stored_scalars: Sequence[Scalars | None] = state.scalars
        """For each parameter, its scalar state; None if it has no state yet."""
        self._slot = slot
        self._progress = progress
        self._done_bytes = 0
        self._blocks: Iterator[DecodedBlock] | None = None
        self._block: DecodedBlock = (-1, 0, {})
        header = self.layout.model_header
        self._model_bytes = header.file_bytes - header.data_start
        self.total_bytes: int = self._model_bytes + sum(
            4 * p.num_elements * len(self.exported_arrays(i))
            for i, p in enumerate(self.layout.parameters)
        )
        """Bytes of the model in its own dtype plus the state in FP32. An export is at least this
        large."""

    def exported_arrays(self, index: int) -> tuple[str, ...]:
        """Return the names of the FP32 arrays in a parameter's `blocks`: the master, then state."""
        spec = self.layout.parameters[index]
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
        """Yield the FP32 state block by block, as the next step would see it.

        Every chunk is compared with its digests.

        Raises:
            DamagedError: The data that was read differs from the data that was written.
        """
        live = StoredParameters(self._slot.model, self.layout)
        decoder = StateDecoder(self.layout, self.manifest.scalars, live)
        for block in self._decoded(decoder, self.layout, self._slot):
            yield block
            self._advance(sum(values.nbytes for values in block[2].values()))

    def _decoded(
        self, decoder: StateDecoder, layout: Layout, files: SealedSlot
    ) -> Iterator[DecodedBlock]:
        """Yield the blocks of one owner, each chunk compared with its digests."""
        chunks = range(layout.num_chunks)
        with ring_for_one_pass(self.checkpoint.backend, layout, verify_reads=True) as streamer:
            reading = RingPass(streamer, source=files)
            reading.announce(chunks)
            for chunk in chunks:
                with reading.taken(chunk) as frame:
                    yield from decoder.blocks(chunk, frame.tensors())

    def block_of_state(self, index: int, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a state array as FP32, which are valid until the next call.

        This is quick if elements are asked for in the order of `blocks`, and in blocks that
        `decoder.cut_by_parameter` makes of the layout's chunks. Every chunk is compared with its
        digests. Call `finish` after the last call.
        """
        # If the order is another, the second pass reads all again.
        for _ in range(2):
            if self._blocks is None:
                self._blocks = self.blocks()
            while True:
                at, first, values = self._block
                if at == index and first <= start and stop <= first + len(values[name]):
                    return values[name][start - first : stop - first]
                try:
                    self._block = next(self._blocks)
                except StopIteration:
                    self._blocks, self._block = None, (-1, 0, {})
                    break
        raise RuntimeError(f"no block has elements {start} to {stop} of parameter {index}")

    def finish(self) -> None:
        """Read what `block_of_state` has not been asked for, so that the memory is freed."""
        for _ in self._blocks or ():
            continue

    def model_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the data of ``model.safetensors`` in order, as pairs of byte offset and bytes.

        Offsets count from the start of the data. Every block is compared with its digest.

        Raises:
            DamagedError: The data that was read differs from the data that was written.
        """
        file, data_start = self._slot.model, self.layout.model_header.data_start
        for block in self._slot.model_ranges():
            read = memoryview(file.read_bytes(block.offset, block.nbytes))
            # The first read went through the page cache.
            data, _ = checked(file, block, read, self._slot.context, direct=True)
            yield block.offset - data_start, bytes(data)
            self._advance(len(data))

    def read_model(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return bytes `start` to `stop` of one tensor of the model, without checking them."""
        header = self.layout.model_header
        at = header.data_start + header.entries[name].start + start
        if start == stop:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        data = self._slot.model.read_bytes(at, stop - start)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(min(self._done_bytes, self.total_bytes), self.total_bytes)


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


_BLOCK_BYTES: Final = 16 << 20
"""Number of bytes of a tensor in shard files that are put together at a time."""


class OwnersStream(CheckpointStream):
    """Source of an export's data, put together from the boxes of all owners; all are seen here."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: WholeState,
        again: WholeState,
        progress: Progress | None,
    ) -> None:
        super().__init__(checkpoint, state.slot, progress, state)
        self._state = state
        self._again = again
        self._is_checked = False
        """Whether all state has been compared with its digests."""
        self._found: tuple[int, int, dict[str, torch.Tensor]] = (-1, 0, {})
        """Parameter, first element and values of the block that was asked for last."""

    def blocks(self) -> Iterator[DecodedBlock]:
        """Yield the FP32 state, owner after owner, in ranges that are contiguous in parameters.

        Every chunk is compared with its digests.

        Raises:
            DamagedError: The data that was read differs from the data that was written.
        """
        numbers = {spec.name: index for index, spec in enumerate(self.layout.parameters)}
        for owner in self._state.owners:
            live = OwnedParameters(self._state, owner)
            decoder = StateDecoder(owner.layout, owner.scalars, live)
            files = self._state.files(owner)
            for index, start, values in self._decoded(decoder, owner.layout, files):
                spec = owner.layout.parameters[index]
                number, num = numbers[spec.name], len(next(iter(values.values()), ()))
                first = 0
                offsets = spec.cut.box.offsets if spec.cut else (0,) * len(spec.shape)
                for part in cut_range(spec.shape, start, start + num) if num else ():
                    whole = self.layout.parameters[number].shape
                    for low, high in part.shifted(offsets).runs(whole):
                        last = first + high - low
                        yield number, low, {n: v[first:last] for n, v in values.items()}
                        first = last
                self._advance(sum(block.nbytes for block in values.values()))
        self._is_checked = True

    def model_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the data of the model in order, as pairs of byte offset and bytes.

        If it is in shard files, it is put together tensor by tensor.
        """
        if not self._state.is_sharded:
            yield from super().model_blocks()
            return
        for entry in self.layout.model_header.entries.values():
            for start in range(0, entry.nbytes, _BLOCK_BYTES):
                stop = min(start + _BLOCK_BYTES, entry.nbytes)
                data = bytes(self._state.read_model(entry.name, start, stop))
                yield entry.start + start, data
                self._advance(len(data))

    def read_model(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return bytes of one tensor of the model; they are not compared with digests."""
        if not self._state.is_sharded or start == stop:
            return super().read_model(name, start, stop)
        return torch.frombuffer(self._again.read_model(name, start, stop), dtype=torch.uint8)

    def block_of_state(self, index: int, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a state array as FP32, which are valid until the next call.

        All state is compared with its digests at the first call. What is returned is then read
        again, in the wanted order.
        """
        if not self._is_checked:
            for _ in self.blocks():
                continue
        at, first, values = self._found
        if at != index or first > start or stop > first + len(values[name]):
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
            self._found, first = (index, start, values), start
        return values[name][start - first : stop - first]


@contextmanager
def open_stream(
    checkpoint: Checkpoint, progress: Progress | None = None
) -> Iterator[CheckpointStream]:
    """Open the files of a checkpoint for streaming; they are closed at the end of the block."""
    with checkpoint.held(), WholeState(checkpoint) as state:
        state.require_all()
        if checkpoint.manifest.owners:
            with WholeState(checkpoint, verify=False) as again:
                yield OwnersStream(checkpoint, state, again, progress)
            return
        state.slot.open_all()
        yield CheckpointStream(checkpoint, state.slot, progress, state)
