"""Parameters that the call of a module needs, also those that FSDP2 gathers for it.

A module that was given to ``fully_shard`` gathers, before its forward, its own parameters and those
of its submodules that were not given to ``fully_shard`` themselves. It may also begin to gather
those of other modules (``set_modules_to_forward_prefetch``). After that, the submodules have whole
parameters in place of the DTensors that the optimizer steps. So whoever waits for a step must do so
before the outermost of these modules gathers, and for all that it gathers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def needed_by(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the parameters that a call of a module needs, without those of its submodules.

    Parameters that FSDP2 gathers are returned as the optimizer knows them, whether or not they are
    gathered at the moment.
    """
    yield from own_parameters(module)
    for state in _states_of(module):
        for group in _groups_of(state):
            for parameter in group.fsdp_params:
                yield parameter.sharded_param


def own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Return the parameters that a module has itself, without those of its submodules."""
    return (p for p in module._parameters.values() if p is not None)


def gathers(module: torch.nn.Module) -> bool:
    """Return whether a call of a module gathers parameters of FSDP2."""
    return next(_states_of(module), None) is not None


def begins_lazily(module: torch.nn.Module) -> bool:
    """Return whether the next call of a module is the one in which FSDP2 looks at all parameters.

    This is the first call of a root. It shows nothing of how later calls use the parameters.
    """
    state = next(_states_of(module), None)
    return state is not None and state._is_root is None


def put_first(hooks: Iterable[tuple[torch.nn.Module, int]]) -> None:
    """Make hooks run before FSDP2 gathers.

    A hook that was put on a module before ``fully_shard`` would run after FSDP2's.
    """
    for module, number in hooks:
        present: Any = module._forward_pre_hooks  # torch does not type its hooks
        if gathers(module) and number in present and next(iter(present)) != number:
            # torch does the same for `register_forward_pre_hook(..., prepend=True)`.
            present.move_to_end(number, last=False)


def _states_of(module: torch.nn.Module) -> Iterator[Any]:
    """Return what FSDP2 knows of a module, and of the modules that it gathers with it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None or not isinstance(module, kind):
        return
    own: Any = module._get_fsdp_state()
    yield own
    yield from own._states_to_forward_prefetch


def _groups_of(state: Any) -> Iterable[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group  # torch before 2.13
    return [] if group is None else [group]
