"""Stream of the state of a checkpoint that several ranks made; see `checkpoint_stream`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.state_owners import StateOwner
from offload.checkpoint.whole_state import WholeState
from offload.exchange.checkpoint_stream import CheckpointStream, Progress
from offload.exchange.state_boxes import OwnedParameters, WantedState, read_state_boxes
from offload.format.boxes import cut_range
from offload.stream.passes import RingPass, ring_for_one_pass
from offload.update.coding.decoder import DecodedBlock, StateDecoder

_BLOCK_BYTES: Final = 16 << 20
"""Number of bytes of a tensor in shard files that are put together at a time."""


class OwnersStream(CheckpointStream):
    """Source of an export's data, put together from the boxes of all owners.

    Args:
        checkpoint: The open checkpoint, locked against recycling.
        state: The state of all owners, which are all seen here.
        again: The same, which does not compare with digests.
        progress: Function that is called after each block; None for no reports.
    """

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
            for index, start, values in self._blocks_of(owner):
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

    def _blocks_of(self, owner: StateOwner) -> Iterator[DecodedBlock]:
        live = OwnedParameters(self._state, owner)
        decoder = StateDecoder(owner.layout, owner.scalars, live)
        chunks = range(owner.layout.num_chunks)
        with ring_for_one_pass(
            self.checkpoint.backend, owner.layout, verify_reads=True
        ) as streamer:
            reading = RingPass(streamer, source=self._state.files(owner))
            reading.announce(chunks)
            for chunk in chunks:
                with reading.taken(chunk) as frame:
                    yield from decoder.blocks(chunk, frame.tensors())

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
    with checkpoint.held(), _open_stream(checkpoint, progress) as stream:
        yield stream


@contextmanager
def _open_stream(checkpoint: Checkpoint, progress: Progress | None) -> Iterator[CheckpointStream]:
    with WholeState(checkpoint) as state:
        state.require_all()
        if checkpoint.manifest.owners:
            with WholeState(checkpoint, verify=False) as again:
                yield OwnersStream(checkpoint, state, again, progress)
            return
        state.slot.open_all()
        yield CheckpointStream(checkpoint, state.slot, progress, state)
