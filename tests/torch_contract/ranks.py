"""Two processes over gloo that construct optimizers as users of several ranks would.

python -m tests.torch_contract.ranks DIRECTORY RANK      # started twice; prints one JSON document
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload import (
    AdamW,
    DriveTuning,
    EverySteps,
    LastK,
    MismatchError,
    Options,
    ParametersOnly,
)
from tests.limits import AGREEMENT_S
from tests.stores.training import Model, backward, optimizer_for, options

NUM_RANKS = 2
SEPARATE: dict[str, Any] = {"process_group": offload.SEPARATE}
STEPS = 3


def said(directory: Any, model: torch.nn.Module | None, **changes: Any) -> str:
    """Return the error that a constructor raises, or that it has none."""
    settings = Options(
        allow_volatile=True,
        chunk_bytes=4096,
        drives=changes.pop("drives", DriveTuning(calibrate=False)),
        overlap=changes.pop("overlap", None),
        parameters=changes.pop("parameters", None),
        agreement_timeout_s=AGREEMENT_S,
    )
    params = changes.pop("params", None) or model.parameters()
    try:
        AdamW(params, directory=directory, model=model, options=settings, **changes).close()
    except Exception as error:  # noqa: BLE001  (whatever it is, the test sees it)
        return f"{type(error).__name__}: {error}"
    return "constructed"


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).bfloat16()


def resumed(directory: Path) -> str:
    """Return what a restore of all ranks says on the terminal of this one."""
    model = linear()
    settings = Options(allow_volatile=True, chunk_bytes=4096, agreement_timeout_s=AGREEMENT_S)
    given: dict[str, Any] = {"directory": directory, "model": model, "options": settings}
    with AdamW(model.parameters(), **given) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.checkpoint().result()
    terminal = io.StringIO()
    with AdamW(model.parameters(), **given) as optimizer, redirect_stderr(terminal):
        optimizer.restore()
    return terminal.getvalue()


def beside_parameters_only(directory: Path, rank: int) -> list[str]:
    """Return what all ranks find in a store of one process, some of whose state is given up."""
    model = linear()
    settings = Options(allow_volatile=True, chunk_bytes=4096, agreement_timeout_s=AGREEMENT_S)
    given: dict[str, Any] = {"directory": directory, "model": model, "options": settings}
    if rank == 0:
        only = LastK(1) | ParametersOnly(EverySteps(1))
        with AdamW(model.parameters(), keep=only, **given, **SEPARATE) as optimizer:
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                optimizer.checkpoint().result()
    dist.barrier()
    with AdamW(model.parameters(), keep=LastK(1) | EverySteps(1), **given) as optimizer:
        try:
            optimizer.restore(1, discard_newer=True)
        except MismatchError as error:
            refused = str(error)
        found = optimizer.restore()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.checkpoint().result()
        listed = [f"{c.step}{' only' * c.parameters_only}" for c in optimizer.checkpoints()]
    return [refused, str(found.step), *listed]


def main(root: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    refused = root / "refused"
    own = refused / str(rank)
    found["one directory for all"] = said(root / "common", linear())
    found["one directory each"] = said(root / f"each-{rank}", linear())
    alone = [dist.new_group([number]) for number in range(NUM_RANKS)][rank]
    found["a group of one"] = said(root / f"alone-{rank}", linear(), process_group=alone)
    found["overlap backward"] = said(refused, linear(), overlap="backward")
    shares = DriveTuning(shares=(1, 1))
    only = LastK(1) | ParametersOnly(EverySteps(2))
    found["parameters only"] = said(refused, linear(), keep=only)
    found["shares"] = said([refused / "a", refused / "b"], linear(), drives=shares)

    found["parameters on drive"] = said(refused, linear(), parameters="drive")

    wrapped = DistributedDataParallel(linear())
    found["ddp"] = said(own, wrapped, **SEPARATE)
    found["ddp inside"] = said(own, torch.nn.ModuleDict({"net": wrapped}), **SEPARATE)
    sharded = FullyShardedDataParallel(linear(), device_id=torch.device("cpu"))
    found["fsdp"] = said(own, sharded, **SEPARATE)
    found["fsdp of several ranks"] = said(refused, sharded)
    found["ddp of several ranks"] = said(root / "ddp", wrapped)

    found["resumed"] = resumed(root / "resumed")
    found["beside"] = beside_parameters_only(root / "beside", rank)

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = linear()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    found["fsdp2"] = said(own, model, **SEPARATE)
    found["fsdp2 without model"] = said(own, None, params=model.parameters(), **SEPARATE)
    frozen = torch.nn.Sequential(torch.nn.Linear(4, 4), model)
    model.requires_grad_(False)
    found["fsdp2 frozen"] = said(own, frozen, **SEPARATE)
    dist.barrier()
    found["made"] = sorted(str(p.relative_to(root)) for p in root.rglob("refused*"))

    found["ddp.module"] = said(root / "unwrapped" / str(rank), wrapped.module, **SEPARATE)
    torch.set_num_threads(1)
    trained = Model(history=rank)
    settings = options(allow_volatile=True)
    with optimizer_for(trained, str(root / f"own-{rank}"), settings, **SEPARATE) as optimizer:
        for step in range(1, STEPS + 1):
            backward(trained, step, history=rank)
            optimizer.step()
            optimizer.checkpoint({"step": step}).result()
    dist.destroy_process_group()
    found["environment"] = said(own, linear())
    found["made"] += sorted(str(p.relative_to(root)) for p in root.rglob("refused*"))
    return found


if __name__ == "__main__":
    os.environ["WORLD_SIZE"] = str(NUM_RANKS)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
