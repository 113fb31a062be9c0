"""Directories of `torch.distributed.checkpoint`, written through its own public classes, streamed.

Its planner is told that every tensor consists of many boxes, and asks for the data of one at a
time. The writer keeps what it has been given until the end (torch 2.13), so what it has written is
emptied again.
"""

from __future__ import annotations

import dataclasses
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from offload.exchange.checkpoint_stream import CheckpointStream
from offload.exchange.destination import torch_writing
from offload.format.arrays import MASTER
from offload.update.decoder import STATE_BLOCK_ELEMENTS, Block, cut_pieces
from offload.update.dtypes import DTYPES

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in each dimension."""


def write_dcp(
    stream: CheckpointStream, path: str, state_dict: Callable[..., dict[str, Any]]
) -> None:
    """Write a checkpoint as ``{"model": ..., "optim": ..., "master": ...}``, by names.

    Args:
        stream: What to write.
        path: The directory to make.
        state_dict: Gives ``optim`` by names, with what it is told for each array.

    Raises:
        DamagedError: What was read is not what was written.
        gds.StorageError: Something could not be read or written.
    """
    tensors: dict[int, _Source] = {}
    """By identity of what stands for it: a tensor without data."""

    def stand_in(source: _Source) -> torch.Tensor:
        tensor = torch.empty(source.shape, dtype=source.dtype, device="meta")
        tensors[id(tensor)] = source
        return tensor

    layout = stream.layout
    specs = layout.parameters
    model = {
        t.name: stand_in(_Source(None, t.name, t.shape, DTYPES[t.dtype])) for t in layout.model
    }
    value: dict[str, Any] = {
        "model": {**model, **{a: model[t.name] for t in layout.model for a in t.aliases}},
        "optim": state_dict(
            stream,
            lambda i, name: stand_in(_Source(i, name, specs[i].shape, torch.float32)),
            by_name=True,
        ),
        "step": stream.manifest.step,
    }
    masters = {
        spec.name: stand_in(_Source(i, MASTER, spec.shape, torch.float32))
        for i, spec in enumerate(specs)
        if MASTER in stream.exported_arrays(i)
    }
    if masters:
        value["master"] = masters
    for _ in stream.model_blocks():
        continue  # compares every block with its digest; below, ranges are read
    # One thread and nothing copied ahead: tensors are asked for one after the other.
    writer = FileSystemWriter(path, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
    planner = _StreamingPlanner(stream, tensors)
    with torch_writing(path, stream.total_bytes), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # by no_dist
        _save(value, writer, planner)
    planner.finish()


def _save(value: dict[str, Any], writer: FileSystemWriter, planner: _StreamingPlanner) -> None:
    try:
        save(value, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        # What went wrong is inside, with a traceback for each rank.
        raise next(iter(error.failures.values()))[0] from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    index: int | None
    """Of a parameter in the layout; None for a tensor of the model."""

    name: str
    """Of a state array, or of a tensor of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _StreamingPlanner(DefaultSavePlanner):
    """Plans boxes in the order in which the state is streamed, and reads each when it is written.

    Args:
        stream: Where data comes from.
        tensors: By identity of the tensors without data that are to be saved.
    """

    def __init__(self, stream: CheckpointStream, tensors: dict[int, _Source]) -> None:
        super().__init__()
        self._stream = stream
        self._tensors = tensors
        self._blocks: Iterator[Block] | None = None
        self._block: Block = (-1, 0, {})
        self._written: torch.Tensor | None = None
        self._ranges: dict[tuple[str, tuple[int, ...]], tuple[_Source, int, int]] = {}

    def create_local_plan(self) -> SavePlan:
        """Replace each tensor that has no data by its boxes."""
        plan = super().create_local_plan()
        layout = self._stream.layout
        items: list[WriteItem] = []
        state: dict[tuple[int, str], WriteItem] = {}
        for item in plan.items:
            value = self.state_dict[item.index.fqn]
            source = self._tensors.get(id(value)) if isinstance(value, torch.Tensor) else None
            if source is None:
                items.append(item)
            elif source.index is None:
                num_elements = math.prod(source.shape)
                for start in range(0, max(num_elements, 1), STATE_BLOCK_ELEMENTS):
                    stop = min(start + STATE_BLOCK_ELEMENTS, num_elements)
                    items += self._boxes(item, source, start, stop)
            else:
                state[source.index, source.name] = item
                if not math.prod(source.shape):  # no block has it
                    items += self._boxes(item, source, 0, 0)
        for chunk in range(layout.num_chunks):
            for piece in cut_pieces(layout, chunk):
                for name in self._stream.exported_arrays(piece.parameter):
                    found = state.get((piece.parameter, name))
                    if found is None:
                        continue  # of a parameter that is in no group
                    source = self._tensors[id(self.state_dict[found.index.fqn])]
                    items += self._boxes(found, source, piece.start, piece.stop)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one box; that of the one before is emptied."""
        if write_item.type == WriteItemType.BYTE_IO or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        key = (write_item.index.fqn, tuple(chunk.offsets))
        if key not in self._ranges:
            return super().resolve_data(write_item)
        source, start, stop = self._ranges[key]
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        if source.index is None:
            size = source.dtype.itemsize
            data = self._stream.read_model(source.name, start * size, stop * size)
            flat = data.view(source.dtype).clone()  # whose memory can be given back
        elif start == stop:
            flat = torch.empty(0, dtype=source.dtype, device="cpu")
        else:
            flat = self._state(source.index, source.name, start, stop).clone()
        self._written = flat.view(chunk.sizes)
        return self._written

    def finish(self) -> None:
        """Read to the end, where the stream lets go of its memory."""
        for _ in self._blocks or ():
            continue

    def _state(self, index: int, name: str, start: int, stop: int) -> torch.Tensor:
        for _ in range(2):  # the order is that of the plan; if it were not, all is read again
            if self._blocks is None:
                self._blocks = self._stream.blocks()
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

    def _boxes(
        self, item: WriteItem, source: _Source, start: int, stop: int
    ) -> Iterator[WriteItem]:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is planned as something else than a tensor")
        for offsets, sizes in boxes(source.shape, start, stop):
            first = _flat_index(source.shape, offsets)
            where = (item.index.fqn, offsets)
            self._ranges[where] = (source, first, first + math.prod(sizes))
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            yield WriteItem(
                index=MetadataIndex(item.index.fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
            )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[_Box]:
    """Cut a range of a tensor's elements, in row-major order, into boxes of it, in that order."""
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    if len(shape) == 1 or (start == 0 and stop == shape[0] * inner):
        rest = len(shape) - 1
        yield (start // max(inner, 1), *[0] * rest), (_rows(shape, start, stop), *shape[1:])
        return
    while start < stop:
        row, column = divmod(start, inner)
        if column == 0 and stop - start >= inner:
            num = (stop - start) // inner
            yield (row, *[0] * (len(shape) - 1)), (num, *shape[1:])
            start += num * inner
            continue
        last = min(inner, column + stop - start)
        for offsets, sizes in boxes(shape[1:], column, last):
            yield (row, *offsets), (1, *sizes)
        start += last - column


def _rows(shape: tuple[int, ...], start: int, stop: int) -> int:
    return stop - start if len(shape) == 1 else shape[0]


def _flat_index(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    flat = 0
    for size, offset in zip(shape, offsets, strict=True):
        flat = flat * size + offset
    return flat
