"""Names and metadata under which `torch.distributed.checkpoint` sees a checkpoint as it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.whole_state import WholeState
from offload.exchange.checkpoint_stream import parameter_groups
from offload.format.arrays import MASTER
from offload.format.boxes import Box
from offload.format.layout import ModelTensor
from offload.update.coding.decoder import has_master, kept_arrays
from offload.update.dtypes import DTYPES
from offload.update.kept_state import write_scalars

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
    """Everything that is offered to torch, by the names that torch's own state dicts have.

    Args:
        checkpoint: The checkpoint.
        state: Its state, all owners of which are seen here.
        model: First part of the names of the model; empty for none, None to leave the model out.
        optimizer: First part of the names of the optimizer's state; likewise.
    """

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
