"""Process groups: whether this process is one of several ranks that train one model.

This is found out before any directory is touched. If each rank of a training had a store of its
own, the ranks would make checkpoints at different steps, and continue from different steps after a
kill.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from offload.errors import ProcessGroupError, UnsupportedParameterError

if TYPE_CHECKING:
    import torch.distributed as dist


class _Mode(Enum):
    """Relation between the processes of a group."""

    SEPARATE = "separate"

    def __repr__(self) -> str:
        return f"offload.{self.name}"


SEPARATE = _Mode.SEPARATE
"""Value of ``process_group=`` if each process trains its own model, in its own directory."""

ProcessGroup: TypeAlias = "Literal[_Mode.SEPARATE] | dist.ProcessGroup | None"
"""Accepted values of ``process_group=``."""

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.parallel",
    "DataParallel": "torch.nn.parallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
}
"""Classes whose state dicts have other names or tensors than the wrapped module, and the modules
that define the classes. If such a module is not imported, its class has no instances."""


_REMEDIES = {
    "DistributedDataParallel": "pass that module (`ddp.module`)",
    "DataParallel": "pass that module (`parallel.module`)",
    "FullyShardedDataParallel": "use torch.distributed.fsdp.fully_shard instead",
}


def are_several(process_group: ProcessGroup, model: torch.nn.Module | None) -> bool:
    """Return whether this process is one of several ranks that train one model.

    Args:
        process_group: Group of the ranks; None for the default group, if there is one; `SEPARATE`
            if each process trains a model of its own.
        model: Model that is trained; None if it was not given.

    Raises:
        ProcessGroupError: There are to be several ranks, but there is no process group yet; this
            process is not in the group; or the model is wrapped in a way that is not supported.
        UnsupportedParameterError: One process trains alone, and the model has a DTensor.
        TypeError: `process_group` is something else.
    """
    size = 1 if process_group is SEPARATE else _size_of(process_group)
    if model is not None:
        _require_supported_wrappers(model, several=size > 1)
        if size == 1:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                require_whole(name, tensor)
    return size > 1


def _size_of(process_group: object) -> int:
    """Return the number of ranks of a group."""
    distributed = sys.modules.get("torch.distributed")
    if process_group is not None:
        if distributed is None or not isinstance(process_group, distributed.ProcessGroup):
            raise TypeError(
                "process_group takes None for the default group, a torch.distributed.ProcessGroup, "
                "or offload.SEPARATE for a separate model in each process; got "
                f"{type(process_group).__name__}"
            )
        if distributed.get_rank(process_group) < 0:
            raise ProcessGroupError(
                "this process is not in process_group=: construct the optimizer in the processes "
                "of the group only"
            )
        return int(distributed.get_world_size(process_group))
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    given = os.environ.get("WORLD_SIZE", "")
    if given.isdecimal() and int(given) > 1:
        raise ProcessGroupError(
            f"the environment has WORLD_SIZE={given}, but there is no process group: call "
            "torch.distributed.init_process_group() before constructing the optimizer. If each "
            "process trains a separate model, pass process_group=offload.SEPARATE and a directory "
            "of its own to each"
        )
    return 1


def require_whole(name: str, tensor: torch.Tensor) -> None:
    """Refuse a DTensor, because this process has only a part of it."""
    # Importing this module takes long. If it has not been imported, no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise UnsupportedParameterError(
            f"{name!r} is a DTensor, of which each rank has a part (FSDP2's fully_shard, or "
            "tensor parallelism), but one process trains alone here. Leave out "
            "process_group=offload.SEPARATE, or construct the optimizer of a model that is not "
            "sharded"
        )


def _require_supported_wrappers(model: torch.nn.Module, *, several: bool) -> None:
    wrappers = tuple(
        getattr(sys.modules[module], name)
        for name, module in _WRAPPERS.items()
        if hasattr(sys.modules.get(module), name)
        and not (several and name == "DistributedDataParallel")
    )
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            kind = next(cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS)
            of = f"has a {kind} in it ({name!r})" if name else f"is a {kind}"
            raise ProcessGroupError(
                f"model= {of}, whose parameters have other names than those of the module that "
                f"you wrapped: {_REMEDIES[kind]}"
            )
