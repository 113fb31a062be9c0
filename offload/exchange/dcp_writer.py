"""Streaming writer of `torch.distributed.checkpoint` directories, on torch's own public classes.

The planner declares that every tensor consists of many boxes, and torch asks for the data of one
box at a time. torch's writer (2.13) holds every tensor that it was given until the end. So the
planner frees the memory of a box once it has been written.
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
from offload.format.boxes import cut_range
from offload.update.coding.decoder import STATE_BLOCK_ELEMENTS, cut_by_parameter
from offload.update.dtypes import DTYPES


def write_dcp(
    stream: CheckpointStream, path: str, state_dict: Callable[..., dict[str, Any]]
) -> None:
    """Write a checkpoint as ``{"model", "optim", "step", "master"}``, keyed by parameter names.

    ``master`` is left out if no parameter has one.
    """
    tensors: dict[int, _Source] = {}
    """Source of each tensor, by the identity of the placeholder (a tensor without data)."""

    def stand_in(source: _Source) -> torch.Tensor:
        """Return a placeholder without data for a source, and register it."""
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
        "step": stream.manifest.step,
    }
    if stream.has_optimizer:
        value["optim"] = state_dict(
            stream,
            lambda i, name: stand_in(_Source(i, name, specs[i].shape, torch.float32)),
            by_name=True,
        )
    masters = {
        spec.name: stand_in(_Source(i, MASTER, spec.shape, torch.float32))
        for i, spec in enumerate(specs)
        if MASTER in stream.exported_arrays(i)
    }
    if masters:
        value["master"] = masters
    # This compares every block of the model with its digest; later range reads are not compared.
    for _ in stream.model_blocks():
        continue
    # With one thread and no copies ahead, torch asks for one tensor after another.
    writer = FileSystemWriter(path, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
    planner = _StreamingPlanner(stream, tensors)
    with torch_writing(path, stream.total_bytes), warnings.catch_warnings():
        # The option no_dist of the save causes this warning.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _save(value, writer, planner)
    stream.finish()


def _save(value: dict[str, Any], writer: FileSystemWriter, planner: _StreamingPlanner) -> None:
    try:
        save(value, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        # The original error is inside, with a traceback for each rank.
        raise next(iter(error.failures.values()))[0] from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """Origin of one exported tensor in the checkpoint."""

    index: int | None
    """Index of the parameter in the layout; None for a tensor of the model."""

    name: str
    """Name of the state array, or of the tensor of the model."""

    shape: tuple[int, ...]

    dtype: torch.dtype


class _StreamingPlanner(DefaultSavePlanner):
    """Planner that cuts tensors into boxes in stream order, and reads each box on demand."""

    def __init__(self, stream: CheckpointStream, tensors: dict[int, _Source]) -> None:
        super().__init__()
        self._stream = stream
        self._tensors = tensors
        self._written: torch.Tensor | None = None
        self._ranges: dict[tuple[str, tuple[int, ...]], tuple[_Source, int, int]] = {}

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan with each placeholder replaced by its boxes."""
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
                if not math.prod(source.shape):  # an empty tensor is in no block
                    items += self._boxes(item, source, 0, 0)
        for chunk in layout.plans:
            for span in cut_by_parameter(chunk):
                (piece,) = span.pieces
                for name in self._stream.exported_arrays(piece.parameter):
                    found = state.get((piece.parameter, name))
                    if found is None:
                        continue  # the parameter is in no group
                    source = self._tensors[id(self.state_dict[found.index.fqn])]
                    items += self._boxes(found, source, piece.start, piece.stop)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one box, and free the memory of the previous box."""
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
            flat = data.view(source.dtype).clone()  # the memory of a clone can be freed
        elif start == stop:
            flat = torch.empty(0, dtype=source.dtype, device="cpu")
        else:
            flat = self._stream.block_of_state(source.index, source.name, start, stop).clone()
        self._written = flat.view(chunk.sizes)
        return self._written

    def _boxes(
        self, item: WriteItem, source: _Source, start: int, stop: int
    ) -> Iterator[WriteItem]:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is planned as something other than a tensor")
        first = start
        for box in cut_range(source.shape, start, stop):
            where = (item.index.fqn, box.offsets)
            self._ranges[where] = (source, first, first + box.num_elements)
            first += box.num_elements
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            yield WriteItem(
                index=MetadataIndex(item.index.fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
            )
