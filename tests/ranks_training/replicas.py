"""Calls of a rank that changes parameters which other ranks hold as well, for `Calls.do`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.ranks_training.calls import Calls, Model
from tests.ranks_training.program import local


def ignore(calls: Calls, name: str) -> None:
    """Let each rank have its own values of a parameter, which the wrapper leaves alone."""
    torch.manual_seed(7)
    model: Any = Model(calls.setting.widths).to(torch.bfloat16)
    with torch.no_grad():
        dict(model.named_parameters())[name].add_(calls.rank)
    if calls.setting.kind == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        calls.model = DistributedDataParallel(model)
    else:
        calls.model = fully_shard(model, ignored_params={dict(model.named_parameters())[name]})


def change(calls: Calls, name: str, ranks: Sequence[int], how: str = "counted") -> None:
    """Add 1 to this rank's part of a parameter, on some ranks.

    How: ``counted``, as torch counts changes; ``data``, past the count; ``broadcast`` for a change
    that the first of the ranks brings to all of them.
    """
    parameter = {n.removeprefix("module."): p for n, p in calls.model.named_parameters()}[name]
    with torch.no_grad():
        if how == "broadcast":
            if calls.rank == ranks[0]:
                parameter.add_(1)
            dist.broadcast(parameter, ranks[0])
        elif calls.rank in ranks:
            held = local(parameter)
            (held.data if how == "data" else held).add_(1)


def fill(calls: Calls, name: str, value: float) -> None:
    """Give a parameter one value everywhere, on this rank."""
    with torch.no_grad():
        dict(calls.model.named_parameters())[name].fill_(value)


def open_reversed(calls: Calls) -> None:
    """Make the optimizer without model=; the last rank gives parameters of one shape in reverse."""
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    calls.model = DistributedDataParallel(torch.nn.Sequential(*layers).to(torch.bfloat16))
    order = -1 if calls.rank == calls.size - 1 else 1
    calls.open(model=None, params=[*calls.model.parameters()][::order])


def open_two(calls: Calls, name: str) -> None:
    """Make an optimizer of all ranks, and one of each rank for a parameter of its own."""
    own = dict(calls.model.named_parameters())[f"module.{name}"]
    folder = calls.directory.parent / f"own-{calls.rank}"
    calls.open(
        model=None,
        params=[own],
        directory=folder,
        process_group=offload.SEPARATE,
    )
    calls.own, calls.parameter = calls.optimizer, own
    calls.open(model=None, params=[p for p in calls.model.parameters() if p is not own])


def step_two(calls: Calls) -> float:
    """Take a step with both; return by how much the rank's own parameter differs from torch's."""
    calls.backward()
    own = calls.parameter
    expected = torch.nn.Parameter(own.detach().float())
    expected.grad = own.grad.float()
    torch.optim.AdamW([expected], **calls.setting.hyper).step()
    calls.own.step()
    calls.update()
    calls.own.checkpoint().result()
    return float((own.float() - expected.to(own.dtype).float()).abs().max())
