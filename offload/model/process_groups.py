"""Refusal of training by several processes, before any directory is touched.

A store has one writer. If each rank of a training had its own store, the ranks would make
checkpoints at different steps, and continue from different steps after a kill.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Literal, TypeAlias

import torch

from offload.errors import ProcessGroupError, UnsupportedParameterError


class _Mode(Enum):
    """Relation between the processes of a group."""

    SEPARATE = "separate"

    def __repr__(self) -> str:
        return f"offload.{self.name}"


SEPARATE = _Mode.SEPARATE
"""Value of ``process_group=`` if each process trains its own model, in its own directory."""

ProcessGroup: TypeAlias = Literal[_Mode.SEPARATE] | None
"""Accepted values of ``process_group=``."""

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.parallel",
    "DataParallel": "torch.nn.parallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
}
"""Classes whose state dicts have other names or tensors than the wrapped module, and the modules
that define the classes. If such a module is not imported, its class has no instances."""


def require_one_process(process_group: ProcessGroup, model: torch.nn.Module | None) -> None:
    """Check that this process is not one of several that train one model.

    Args:
        process_group: `SEPARATE` if the processes train separate models; None otherwise.
        model: Model that is trained; None if it was not given.

    Raises:
        ProcessGroupError: A group of several ranks is initialised, or ``WORLD_SIZE`` says so; or
            the model is wrapped for several ranks, or contains such a wrapped module.
        UnsupportedParameterError: The model has a DTensor.
        TypeError: `process_group` is neither `SEPARATE` nor None.
    """
    if process_group is not None and process_group is not SEPARATE:
        raise TypeError(
            "process_group takes None, or offload.SEPARATE for a separate model in each process; "
            f"got {type(process_group).__name__}: process groups are not accepted yet"
        )
    if process_group is None and (found := _detected_ranks()):
        raise ProcessGroupError(
            f"{found}, but a store belongs to one process: training one model with several ranks "
            "is not supported yet. If each rank trains a separate model, pass "
            "process_group=offload.SEPARATE and a directory of its own to each"
        )
    if model is not None:
        _require_unwrapped(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            require_whole(name, tensor)


def require_whole(name: str, tensor: torch.Tensor) -> None:
    """Refuse a DTensor, because this process has only a part of it.

    Args:
        name: Name of the tensor, for the message.
        tensor: Parameter or buffer.

    Raises:
        UnsupportedParameterError: The tensor is a DTensor; names it.
    """
    # Importing this module takes long. If it has not been imported, no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise UnsupportedParameterError(
            f"{name!r} is a DTensor, of which each rank has a part (FSDP2's fully_shard, or "
            "tensor parallelism): training one model with several ranks is not supported yet. "
            "Construct the optimizer of a model that is not sharded"
        )


def _require_unwrapped(model: torch.nn.Module) -> None:
    wrappers = tuple(
        getattr(sys.modules[module], name)
        for name, module in _WRAPPERS.items()
        if hasattr(sys.modules.get(module), name)
    )
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            kind = next(cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS)
            of = f"has a {kind} in it ({name!r})" if name else f"is a {kind}"
            raise ProcessGroupError(
                f"model= {of}, whose parameters have other names than those of the module that "
                "you wrapped: pass that module (`ddp.module` of a DistributedDataParallel)"
            )


def _detected_ranks() -> str:
    """Return, for a message, how several ranks were detected; empty if they were not."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            return f"torch.distributed has a process group of {size} ranks"
    given = os.environ.get("WORLD_SIZE", "")
    if given.isdecimal() and int(given) > 1:
        return f"the environment has WORLD_SIZE={given}"
    return ""
