"""Steps with gradients that are given by a formula, so that any number of ranks trains the same.

What one process stores is then the oracle for what several ranks have stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import offload
from offload import DriveTuning, Options
from tests.ranks_training.calls import Calls, Model, Setting

CHUNK_BYTES = 4096


def open_optimizer(calls: Calls, optimizer: str = "AdamW", **hyper: Any) -> None:
    """Make an optimizer of a class of `offload`, with two groups: weights, and the rest."""
    named = [(plain_name(n), p) for n, p in calls.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() <= 1]},
    ]
    calls.optimizer = getattr(offload, optimizer)(
        groups,
        directory=calls.directory,
        model=calls.model,
        options=Options(
            allow_volatile=True,
            agreement_timeout_s=calls.setting.timeout_s,
            chunk_bytes=CHUNK_BYTES,
            drives=DriveTuning(calibrate=False),
            **calls.setting.options,
        ),
        **{"lr": 1e-2, **hyper},
    )


def plain_name(name: str) -> str:
    """Return the name of a parameter without the prefix of a wrapper."""
    return name.removeprefix("module.")


def gradient(name: str, step: int, shape: Sequence[int]) -> torch.Tensor:
    """Return the gradient of a parameter in a step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(torch.Size(shape), generator=generator)


def set_gradients(model: torch.nn.Module, step: int, skip: str = "") -> None:
    """Give each trained parameter its gradient of a step, sharded as the parameter is."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (skip and skip in name):
            continue
        whole = gradient(plain_name(name), step, parameter.shape).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        else:
            parameter.grad = whole


def steps(calls: Calls, times: int, skip: str = "") -> None:
    """Take steps."""
    for _ in range(times):
        set_gradients(calls.model, calls.num_steps + 1, skip)
        calls.optimizer.step()
        calls.num_steps += 1
        calls.model.zero_grad()


def model_of(widths: Sequence[int], dtype: str, layout: str, seed: int) -> torch.nn.Module:
    """Return a model with the random values of a seed, laid out over all ranks."""
    torch.manual_seed(seed)
    model = Model(widths).to(getattr(torch, dtype))
    num = dist.get_world_size() if dist.is_initialized() else 1
    mesh = None
    if layout in ("tp", "fsdp-tp"):
        shape = (num,) if layout == "tp" else (num // 2, 2)
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        parallelize_module(
            model,
            whole["tp"],
            {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()},
        )
        mesh = whole["dp"] if layout == "fsdp-tp" else None
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, num // 2), mesh_dim_names=("copies", "shards"))
    elif layout == "fsdp2":
        mesh = init_device_mesh("cpu", (num,))
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(calls: Calls, times: int = 3, *, skip: str = "", layout: str = "", **how: Any) -> None:
    """Make an optimizer, take steps, and seal a checkpoint.

    Args:
        calls: The rank.
        times: Number of steps.
        skip: Part of the names of parameters that have no gradients.
        layout: Layout of `model_of`; empty for the model that the rank has.
        how: Arguments of `open_optimizer`.
    """
    if layout:
        calls.model = model_of(calls.setting.widths, calls.setting.dtype, layout, seed=7)
    open_optimizer(calls, **how)
    steps(calls, times, skip)
    calls.optimizer.checkpoint({"step": calls.num_steps}).result()
    calls.optimizer.close()


def train_alone(folder: Path, setting: dict[str, Any], **how: Any) -> Path:
    """Do the same in this process; return the store."""
    folder.mkdir(exist_ok=True)
    how.pop("layout", None)
    alone = Calls(folder, 0, 1, Setting(**{**setting, "kind": "one"}))
    train(alone, **how)
    return folder / "run"
