"""Ranks over gloo that train DTensors: FSDP2, tensor parallelism, and both.

python -m tests.ranks.sharded DIRECTORY RANK NUM_RANKS     # started once for each rank

The last line of the output is a JSON document: what each case has found, by its name.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from offload import SEPARATE, AdamW
from offload.errors import UnsupportedParameterError
from offload.format.shares.dealing import OwnedBox, own_boxes
from offload.model.shards import Shards, cut_of, local, own_shards
from tests.numerics.reference import Reference, bits
from tests.ranks.rank import Rank, manifests_may_have_boxes, settings
from tests.ranks.replicas import arrays_of

BF16, FP32 = torch.bfloat16, torch.float32
HYPER = {"lr": 0.01, "weight_decay": 0.1}


def own(model: torch.nn.Module) -> tuple[tuple[OwnedBox, ...], Shards]:
    """Return who owns which box of a model's DTensors, and the shards of this rank."""
    mine = []
    for name, tensor in model.named_parameters():
        shard = local(tensor, name)
        if shard is not None:
            mine.append((name, cut_of(shard)))
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, mine)
    owned = own_boxes(views)
    rank = dist.get_rank()
    boxes = {item.name: item.cut for item in owned if item.owner == rank}
    return owned, own_shards(boxes, {item.name for item in owned}, keeps_others=rank == 0)


def layers(dtype: torch.dtype, *sizes: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    linear = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*linear).to(dtype)


def shard_layers(model: torch.nn.Sequential, **how: Any) -> torch.nn.Module:
    for layer in model:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    return model


def backward(model: torch.nn.Module, step: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, width, dtype=dtype)).float().square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(bits(a.to_local()), bits(b.to_local())) for a, b in pairs)


def train(
    root: Path,
    make: Callable[[], torch.nn.Module],
    width: int,
    input_dtype: torch.dtype,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **hyper: Any,
) -> dict[str, Any]:
    """Train, seal and restore, beside torch on FP32 masters of the local shards."""
    found: dict[str, Any] = {"equal": []}
    directory = root / str(dist.get_rank())
    model, expected = make(), make()
    _, shards = own(model)
    reference: Reference | None = None
    found["sizes"] = [list(p.to_local().shape) for p in model.parameters()]
    with Rank(optimizer_class, model.parameters(), directory, shards, model=model, **hyper) as rank:
        for step in (1, 2, 3):
            for trained in (model, expected):
                backward(trained, step, width, input_dtype)
            if reference is None:  # made late: the first forward may replace the memory
                held = [p.to_local().detach() for p in expected.parameters()]
                reference = Reference(optimizer_class, held, **hyper)
            rank.step()
            for part, parameter in zip(held, expected.parameters(), strict=True):
                part.grad = parameter.grad.to_local()
            reference.step()
            for trained in (model, expected):
                trained.zero_grad()
            handle = rank.checkpoint({"step": step})
            found["equal"].append(same(model, expected))
        arrays = arrays_of(handle.result().path)
        found["names"] = [*next(iter(arrays.values()))]
    again = make()
    _, shards = own(again)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    with Rank(optimizer_class, again.parameters(), directory, shards, model=again, **hyper) as rank:
        restored = rank.restore()
        found["restored"] = restored.step if restored is not None else None
        found["equal"].append(same(again, expected))
        for trained in (again, expected):
            backward(trained, 4, width, input_dtype)
        rank.step()
        for part, parameter in zip(held, expected.parameters(), strict=True):
            part.grad = parameter.grad.to_local()
        reference.step()
        found["equal"].append(same(again, expected))
        found["current"] = rank.training.table.is_current(rank.param_groups)
    return found


def uneven(root: Path) -> dict[str, Any]:
    """Rows that do not divide among ranks, and a parameter of which the last rank has nothing."""
    return train(root, lambda: shard_layers(layers(BF16, 9, 7, 1)), 9, BF16, **HYPER)


def momentum(root: Path) -> dict[str, Any]:
    """SGD with momentum."""
    hyper = {"lr": 0.1, "momentum": 0.9}
    return train(
        root, lambda: shard_layers(layers(BF16, 6, 5, 3)), 6, BF16, torch.optim.SGD, **hyper
    )


def mixed(root: Path) -> dict[str, Any]:
    """FP32 shards that are gathered as bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    return train(
        root, lambda: shard_layers(layers(FP32, 9, 7, 1), mp_policy=policy), 9, FP32, **HYPER
    )


def columns(root: Path) -> dict[str, Any]:
    """Shards that are columns: their elements are not neighbours in the parameter."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        linear = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        model = torch.nn.Sequential(*linear).to(BF16)
        return shard_layers(model, shard_placement_fn=lambda _: Shard(1))

    return train(root, make, 8, BF16, **HYPER)


def one_process(root: Path, state_dtype: str) -> dict[str, Any]:
    """Compare shards that end at multiples of 32 elements with one process on whole gradients."""
    rank, options = dist.get_rank(), settings(state_dtype=state_dtype, rounding_seed=3)
    model = shard_layers(layers(BF16, 32, 7, 64))
    alone = layers(BF16, 32, 7, 64)
    model[1].bias.requires_grad_(requires_grad=False)
    alone[1].bias.requires_grad_(requires_grad=False)
    _, shards = own(model)
    optimizer = AdamW(
        alone.parameters(),
        directory=root / f"alone-{rank}",
        model=alone,
        options=options,
        process_group=SEPARATE,
        **HYPER,
    )
    equal = []
    own_rank = Rank(
        torch.optim.AdamW,
        model.parameters(),
        root / str(rank),
        shards,
        model=model,
        options=options,
        **HYPER,
    )
    with optimizer, own_rank:
        for step in (1, 2, 3):
            backward(model, step, 32, BF16)
            for whole, part in zip(alone.parameters(), model.parameters(), strict=True):
                whole.grad = None if part.grad is None else part.grad.full_tensor()
            own_rank.step()
            optimizer.step()
            model.zero_grad()
            for whole, part in zip(alone.parameters(), model.parameters(), strict=True):
                equal.append(bool(torch.equal(bits(whole), bits(part.full_tensor()))))
    return {"equal": equal}


def refused(_: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}

    def said(name: str, tensor: DTensor) -> None:
        try:
            local(tensor, name)
        except UnsupportedParameterError as error:
            found[name] = str(error)

    said("partial", DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    said(
        "lies", DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], shape=(4, 2), stride=(2, 1))
    )
    strided = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2)])
    said("apart", strided)
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    shard = local(parameter, "gradient")
    parameter._local_tensor = torch.full((2, 2), 5.0)  # as FSDP2 may do at the first forward
    found["anew"] = shard.tensor().tolist()
    try:
        shard.gradient()
    except UnsupportedParameterError as error:
        found["gradient"] = str(error)
    return found


class Block(torch.nn.Module):
    """Two matrices as tensor parallelism shards them, a norm, and an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(8, 12, bias=False)
        self.down = torch.nn.Linear(12, 8, bias=False)
        self.norm = torch.nn.LayerNorm(6)
        self.odd = torch.nn.Linear(5, 7)


def meshes(_: Path) -> dict[str, Any]:
    """Boxes on meshes of two dimensions, compared with the values of the whole tensors."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    replicated = fully_shard(Block(), mesh=mesh)
    both = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
    parallelize_module(both, mesh["tensor"], plan)
    del both.odd
    fully_shard(both, mesh=mesh["data"])
    for case, model in {"replicated": replicated, "both": both}.items():
        equal = []
        for name, parameter in model.named_parameters():
            shard = local(parameter, name)
            part = parameter.full_tensor().detach()[cut_of(shard).box.slices]
            equal.append(bool(torch.equal(part, shard.tensor())))
        owned, _ = own(model)
        found[case] = {
            "equal": equal,
            "placements": {n: str(p.placements) for n, p in model.named_parameters()},
            "owned": [
                (item.name, item.cut.box.notation(), item.owner, item.holders) for item in owned
            ],
        }
    return found


TWO: dict[str, Callable[[Path], Any]] = {
    "uneven": uneven,
    "momentum": momentum,
    "mixed": mixed,
    "columns": columns,
    "bfloat16": lambda root: one_process(root, "bfloat16"),
    "int8": lambda root: one_process(root, "int8"),
    "refused": refused,
}
FOUR: dict[str, Callable[[Path], Any]] = {"meshes": meshes}


def main(root: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=num_ranks
    )
    found: dict[str, Any] = {}
    for name, case in (TWO if num_ranks == 2 else FOUR).items():
        try:
            found[name] = case(root / name)
        except Exception:  # noqa: BLE001  (the test shows it)
            found[name] = {"error": traceback.format_exc()}
            break  # the ranks are no longer at the same place
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    manifests_may_have_boxes(pytest.MonkeyPatch())
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:4]))))
