"""Reader of checkpoints as they lie, for `torch.distributed.checkpoint`.

torch plans which boxes of which tensors a rank needs, whatever the layout of the model is there:
FSDP2, tensor parallelism, HSDP, or no ranks at all. This module offers the tensors of a checkpoint
under the names that torch gives them, and reads the planned boxes. The checkpoint may have been
made by one process or by any number of ranks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gds import Backend
from offload.ambient import in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.opening import open_checkpoint
from offload.checkpoint.whole_state import WholeState
from offload.errors import CheckpointError
from offload.exchange.checkpoint_stream import parameter_groups
from offload.exchange.state_boxes import (
    WantedState,
    WantedTensor,
    read_model_boxes,
    read_state_boxes,
)
from offload.format.arrays import MASTER
from offload.format.boxes import Box
from offload.format.layout import ModelTensor
from offload.update.coding.decoder import has_master, kept_arrays
from offload.update.dtypes import DTYPES
from offload.update.kept_state import write_scalars


class CheckpointReader(StorageReader):
    """Storage reader of `torch.distributed.checkpoint` for a checkpoint as it lies.

    Pass it as ``storage_reader=`` to ``torch.distributed.checkpoint.load``. Each rank makes one.
    The names of a checkpoint are those of `get_model_state_dict` and `get_optimizer_state_dict`:

    - ``model.<name>``: parameters and buffers. A 16-bit parameter that is loaded into a tensor of
      another dtype has its FP32 master as the value;
    - ``optim.state.<name>.<key>`` and ``optim.param_groups``: the optimizer's state, in FP32, and
      its hyper-parameters; also as ``flatten_optimizer_state_dict=True`` names them;
    - ``master.<name>``: the FP32 value of each 16-bit parameter;
    - ``step``: the number of optimizer steps.

    All data is compared with its digests before it is copied to its place. A digest covers a chunk,
    so a rank reads whole chunks, each one once: those that have elements of its own tensors.

    Args:
        path: Directory of a checkpoint, or of a store, which means its newest usable checkpoint.
        model: Name of the model in the state dict that is loaded; empty if its names have no
            prefix, and None to leave the model out.
        optimizer: Name of the optimizer's state in the state dict; likewise.
        parts: Directories of the store on other drives or nodes, as for `open_checkpoint`.
        verify: Whether data is compared with its digests. Without that, a rank reads the bytes of
            its own tensors only.
        backend: Storage backend of the checkpoint; the local file system by default.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = "model",
        optimizer: str | None = "optim",
        parts: PartDirectories = None,
        verify: bool = True,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self._path = os.fsdecode(path)
        self._model = model
        self._optimizer = optimizer
        self._parts = parts
        self._verify = verify
        self._backend = backend
        self._checkpoint: Checkpoint | None = None
        self._catalogue: Catalogue | None = None
        self.bytes_read = 0
        """Number of bytes of tensors that this rank has read so far."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another checkpoint if one is given."""
        self.close()
        if checkpoint_id is not None:
            self._path = os.fsdecode(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path may be that of a checkpoint or a store."""
        return os.path.isdir(checkpoint_id)

    @in_neutral
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Open the checkpoint, and return what it has. It is kept until it has been read."""
        self.close()
        self._checkpoint = open_checkpoint(self._path, parts=self._parts, backend=self._backend)
        try:
            with WholeState(self._checkpoint) as state:
                state.require_all()
                self._catalogue = Catalogue(self._checkpoint, state, self._model, self._optimizer)
                return self._catalogue.metadata
        except BaseException:
            self.close()
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: `read_metadata` has prepared everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in this rank's plan which checkpoint it is for."""
        manifest = self._opened.manifest
        return replace(plan, storage_data=(manifest.store_id, manifest.generation))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read one checkpoint."""
        found = [plan.storage_data for plan in plans]
        for rank, one in enumerate(found):
            if one != found[0]:
                raise CheckpointError(
                    f"{self._path}: rank {rank} would load generation {one[1]} of store "
                    f"{one[0]}, and rank 0 generation {found[0][1]} of store {found[0][0]}: name "
                    "the directory of one checkpoint, step-<N>, on all ranks"
                )
        return plans

    @in_neutral
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan into the tensors that the planner has for them."""
        checkpoint, catalogue = self._opened, self._catalogue
        assert catalogue is not None  # noqa: S101  (made when the checkpoint was opened)
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        with WholeState(checkpoint, verify=self._verify) as state:
            requests = _Requests(state)
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _saved(catalogue.values[name]))
                    continue
                out = planner.resolve_tensor(item).detach()
                tensors.append((item, out))
                if name in catalogue.values:
                    out.copy_(catalogue.values[name])
                else:
                    requests.add(catalogue.tensors[name], _box_of(item), out)
            try:
                requests.read()
            finally:
                self.bytes_read += state.bytes_read
        for item, out in tensors:
            planner.commit_tensor(item, out)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the checkpoint, so that a training process may recycle it. Idempotent."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    @property
    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise CheckpointError(f"{self._path}: not open: call read_metadata() first")
        return self._checkpoint


class _Requests:
    """Boxes that a rank wants, collected so that each chunk is read once."""

    def __init__(self, state: WholeState) -> None:
        self._state = state
        self._specs = {spec.name: i for i, spec in enumerate(state.layout.parameters)}
        self._arrays: dict[tuple[str, Box], dict[str, torch.Tensor]] = {}
        self._more: list[WantedState] = []
        self._model: list[WantedTensor] = []

    def add(self, what: Offered, box: Box, out: torch.Tensor) -> None:
        """Add a box of a tensor, with the memory for it."""
        tensor, array = what.tensor, what.array
        index = self._specs.get(tensor.name)
        spec = None if index is None else self._state.layout.parameters[index]
        if not array:
            if out.dtype == DTYPES[tensor.dtype] or spec is None or not has_master(spec):
                self._model.append(WantedTensor(tensor, box, out))
                return
            array = MASTER
        if index is not None and array != MASTER and self._state.scalars[index] is None:
            out.zero_()
            return
        arrays = self._arrays.setdefault((tensor.name, box), {})
        if array in arrays:  # a tied parameter, or a master that is loaded twice
            self._more.append(WantedState(tensor.name, box, {array: out}))
        else:
            arrays[array] = out

    def read(self) -> None:
        """Read everything, with the errors of `read_state_boxes`."""
        entries = self._state.layout.model_header.entries
        self._model.sort(key=lambda one: (entries[one.tensor.name].start, one.box))
        read_model_boxes(self._state, self._model)
        wanted = [WantedState(name, box, arrays) for (name, box), arrays in self._arrays.items()]
        read_state_boxes(self._state, [*wanted, *self._more])


def _box_of(item: ReadItem) -> Box:
    """Return the elements of the whole tensor that an item of a plan asks for."""
    begin = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
    return Box(offsets, tuple(item.lengths))


def _saved(value: Any) -> io.BytesIO:
    """Return a value as torch's planner reads it."""
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


_ZERO_BEFORE_THE_FIRST_STEP: Final = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
"""Classes whose state before a parameter's first step is zeros, which torch's own state dicts
have for each parameter."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A tensor that is offered to torch."""

    tensor: ModelTensor
    """Tensor of the model, or the parameter that a state array belongs to."""

    array: str
    """Name of the state array; empty for the tensor itself."""


class Catalogue:
    """Everything that is offered to torch, by the names that torch's own state dicts have."""

    def __init__(
        self, checkpoint: Checkpoint, state: WholeState, model: str | None, optimizer: str | None
    ) -> None:
        self.tensors: dict[str, Offered] = {}
        """Tensors that are read from the checkpoint's files."""
        self.values: dict[str, Any] = {}
        """Other values, which are known already: small tensors, and anything else."""
        self._checkpoint = checkpoint
        self._state = state
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        for one in state.layout.model:
            for name in (one.name, *one.aliases):
                if model is not None:
                    self._offer((model, name), Offered(one, ""), DTYPES[one.dtype])
        by_name = {tensor.name: tensor for tensor in state.layout.model}
        for index, spec in enumerate(state.layout.parameters):
            one = by_name[spec.name]
            for name in (one.name, *one.aliases):
                if has_master(spec):
                    self._offer((MASTER, name), Offered(one, MASTER), torch.float32)
                if optimizer is not None:
                    self._offer_state((optimizer, "state", name), one, index)
        if optimizer is not None:
            self._offer_groups((optimizer, "param_groups"))
        self._offer_value(("step",), checkpoint.step)

    @property
    def metadata(self) -> Metadata:
        """What torch plans with."""
        return Metadata(self._entries, planner_data=dict(self._paths))

    def _offer_state(self, path: tuple[str | int, ...], tensor: ModelTensor, index: int) -> None:
        for key, value in self._scalars(index).items():
            self._offer_value((*path, key), value)
        for array in self._arrays(index):
            self._offer((*path, array), Offered(tensor, array), torch.float32)

    def _offer_groups(self, path: tuple[str | int, ...]) -> None:
        """Offer the groups by number, and the hyper-parameters of each parameter by its name."""
        groups = parameter_groups(self._checkpoint.manifest, self._state.layout)
        for number, group in enumerate(groups):
            names = group["params"] = group["param_names"]
            for key, value in group.items():
                self._offer_value((*path, number, key), value)
            for name in names:
                for key, value in group.items():
                    if key not in ("params", "param_names"):
                        self._offer_value((*path, name, key), value)

    def _offer(self, path: tuple[str | int, ...], what: Offered, dtype: torch.dtype) -> None:
        key = self._key(path)
        self.tensors[key] = what
        # A tensor that is in no owner's state is whole.
        shape = what.tensor.shape
        found = [one.box for one in self._state.boxes.get(what.tensor.name, ())]
        self._entries[key] = _tensor_metadata(shape, dtype, found or [Box.whole(shape)])

    def _offer_value(self, path: tuple[str | int, ...], value: Any) -> None:
        key = self._key(path)
        if key in self._entries:
            return
        self.values[key] = value
        self._entries[key] = BytesStorageMetadata()
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            self._entries[key] = _tensor_metadata(shape, value.dtype, [Box.whole(shape)])

    def _key(self, path: tuple[str | int, ...]) -> str:
        parts = tuple(part for part in path if part != "")
        key = ".".join(map(str, parts))
        self._paths.setdefault(key, parts)
        return key

    def _arrays(self, index: int) -> Sequence[str]:
        """Return the state arrays of a parameter that torch's own state dict would have."""
        if self._state.scalars[index] is None and not self._has_zeros:
            return ()
        return kept_arrays(self._state.layout.parameters[index], self._state.layout)

    def _scalars(self, index: int) -> Mapping[str, Any]:
        """Return the scalar state of a parameter that torch's own state dict would have."""
        values = self._state.scalars[index]
        if values is not None:
            return write_scalars(values)
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        return {"step": zero} if self._has_zeros else {}

    @property
    def _has_zeros(self) -> bool:
        """Whether the state of a parameter that was never stepped is zeros."""
        return self._checkpoint.optimizer in _ZERO_BEFORE_THE_FIRST_STEP


def _tensor_metadata(
    shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]
) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in sorted(boxes)
        if box.num_elements
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
