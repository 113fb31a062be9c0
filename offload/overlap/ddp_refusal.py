"""Refusal of DistributedDataParallel by steps that overlap with backward.

Such a step applies each gradient of this process before DistributedDataParallel averages it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload.errors import OverlapError

_DDP = (
    'overlap="backward" steps each parameter with the gradient of this process alone, before '
    "DistributedDataParallel has averaged it with those of the others, and {of}: use "
    'Options(overlap="forward"), or None'
)


def require_no_ddp(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse parameters that belong to a DistributedDataParallel of this process.

    Raises:
        OverlapError: A parameter belongs to one. The message names the parameter.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # there can be no DistributedDataParallel
    trained = set(map(id, tensors))
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.nn.parallel.DistributedDataParallel):
            for name, parameter in candidate.named_parameters():
                if id(parameter) in trained:
                    raise OverlapError(
                        _DDP.format(of=f"a DistributedDataParallel holds the parameter {name!r}")
                    )


def require_no_active_ddp(is_trained: Callable[[torch.Tensor], bool]) -> None:
    """Refuse a forward that a DistributedDataParallel calls.

    This finds a DistributedDataParallel that was made after the optimizer.
    """
    kind: Any = torch.nn.parallel.DistributedDataParallel
    active = getattr(kind, "_active_ddp_module", None)
    if active is not None and any(map(is_trained, active.parameters())):
        raise OverlapError(_DDP.format(of="a DistributedDataParallel calls the model"))
