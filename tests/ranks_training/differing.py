"""Calls of a rank that makes something else than the others, for `Calls.do`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import offload
from tests.ranks_training.calls import Calls


def open_otherwise(calls: Calls, change: str) -> None:
    """Make the optimizer with one thing unlike that of the other ranks."""
    CHANGES[change](calls)


def open_in_pair(calls: Calls) -> None:
    """Make the optimizer: rank 0 for the group of ranks 0 and 1, and the others for all ranks."""
    pair = dist.new_group([0, 1])  # a call of all ranks
    calls.open(process_group=pair if calls.rank == 0 else None)


def add_layer(calls: Calls, width: int) -> None:
    """Give the optimizer a new layer of the model, with the values that all ranks give it."""
    torch.manual_seed(width)
    model = calls.model.module
    model.added = torch.nn.Linear(width, 2, bias=False).to(torch.bfloat16)
    try:
        calls.optimizer.add_param_group({"params": [*model.added.parameters()]})
    except BaseException:
        del model.added
        raise


def add_entry(calls: Calls, name: str) -> None:
    """Let the model's state dict have a tensor more, which only its hooks know of."""
    further = torch.zeros(3)

    def add(module: Any, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        del module, metadata
        entries[f"{prefix}{name}"] = further

    getattr(calls.model, "module", calls.model).register_state_dict_post_hook(add)


def step_without(calls: Calls, name: str) -> None:
    """Take a step in which a parameter has no gradient on this rank."""
    calls.backward()
    dict(calls.model.named_parameters())[name].grad = None
    calls.update()


def _unwrap(calls: Calls) -> None:
    """Make the model anew, without its shards."""
    calls.setting = replace(calls.setting, kind="one")
    calls.model = calls._wrapped()
    calls.open()


def _add_a_layer(calls: Calls) -> None:
    model = getattr(calls.model, "module", calls.model)
    model.layers.append(torch.nn.Linear(3, 3).to(torch.bfloat16))
    calls.open()


def _change_dtype(calls: Calls) -> None:
    calls.model.float()
    calls.open()


def _freeze(calls: Calls) -> None:
    getattr(calls.model, "module", calls.model).layers[0].bias.requires_grad_(False)
    calls.open()


def _change_rate_of_a_group(calls: Calls) -> None:
    groups = [{"params": [one]} for one in calls.model.parameters()]
    groups[-1]["lr"] = 0.5
    calls.open(params=groups)


def _set_options(**options: Any) -> Callable[[Calls], None]:
    def change(calls: Calls) -> None:
        calls.setting.options.update(options)
        calls.open()

    return change


def _set_arguments(**arguments: Any) -> Callable[[Calls], None]:
    return lambda calls: calls.open(**arguments)


def _set_version(package: Any) -> Callable[[Calls], None]:
    def change(calls: Calls) -> None:
        package.__version__ = "0.0.7"
        calls.open()

    return change


def _open_with_buffer(calls: Calls) -> None:
    getattr(calls.model, "module", calls.model).register_buffer("further", torch.zeros(3))
    calls.open()


CHANGES: dict[str, Callable[[Calls], None]] = {
    "unwrap": _unwrap,
    "layer": _add_a_layer,
    "dtype": _change_dtype,
    "freeze": _freeze,
    "model": _set_arguments(model=None),
    "groups": _change_rate_of_a_group,
    "lr": _set_arguments(lr=0.5),
    "class": _set_arguments(optimizer_class=offload.Adam),
    "keep": _set_arguments(keep=offload.LastK(3) | offload.EverySteps(5)),
    "int8": _set_options(state_dtype="int8"),
    "overlap": _set_options(overlap="forward"),
    "chunk_bytes": _set_options(chunk_bytes=8192),
    "buffer": _open_with_buffer,
    "torch": _set_version(torch),
    "offload": _set_version(offload),
}
