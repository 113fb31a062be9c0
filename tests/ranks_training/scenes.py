"""Scenes that ranks play: what a user might do, of which a test looks at the outcome."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from gds import PosixBackend
from offload import SealError
from tests.crash.fault_backend import FaultBackend
from tests.ranks_training.fsdp2_trainings import Fsdp2
from tests.ranks_training.mesh_trainings import Tensor
from tests.ranks_training.trainings import take_step


def _training() -> Fsdp2:
    return Fsdp2(dist.get_rank(), dist.get_world_size())


def sharded_after_construction(folder: Path, name: str) -> None:
    """Shard the model when the optimizer exists, as a script with a wrong order does."""
    training = _training()
    torch.manual_seed(7)
    model = training.build()
    with training.offloaded(model.parameters(), folder / name, model) as optimizer:
        training.shard(model)
        training.backward(model, 1, 1.0)
        optimizer.step()


def assigned_after_construction(folder: Path, name: str) -> None:
    """Put other tensors in the place of the parameters when the optimizer exists."""
    training = _training()
    model = training.shard(training.build())
    optimizer = training.offloaded(model.parameters(), folder / name, model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    training.backward(model, 1, 1.0)
    optimizer.step()
    optimizer.close()


def offloaded_to_the_cpu(folder: Path, name: str) -> None:
    """Let FSDP2 keep shards in host memory."""
    training = _training()
    model = training.shard(training.build(), offload_policy=CPUOffloadPolicy())
    optimizer = training.offloaded(model.parameters(), folder / name, model)
    training.backward(model, 1, 1.0)
    optimizer.step()
    optimizer.close()


def on_meta(folder: Path, name: str) -> None:
    """Construct the optimizer before the parameters have memory."""
    training = _training()
    with torch.device("meta"):
        model = training.build()
    training.shard(model)
    training.offloaded(model.parameters(), folder / name, model)


def columns_that_cannot_be_written(folder: Path, name: str) -> None:
    """Let a rank fail in the middle of its columns; the seal fails on all, and training goes on."""
    training, backend = Tensor(dist.get_rank(), dist.get_world_size()), FaultBackend(PosixBackend())
    training.options = {"backend": backend}
    model = training.wrap(training.build())
    optimizer = training.offloaded(model.parameters(), folder / name, model)
    for step, fails in ((1, True), (2, False)):
        take_step(training, model, optimizer, step, None)
        if fails and training.rank == 1:
            num_writes = 0

            def is_tenth(kind: str, path: str) -> bool:
                nonlocal num_writes
                num_writes += kind == "write_bytes" and path.endswith("model.safetensors")
                return num_writes == 10

            backend.fail_if(is_tenth)
        handle = optimizer.checkpoint()
        if fails:
            with pytest.raises(SealError, match="sealing step 1 failed"):
                handle.result()
            with suppress(SealError):
                optimizer.synchronize()
        else:
            handle.result()
    optimizer.close()


def damaged_columns(folder: Path, name: str) -> None:
    """Continue from a checkpoint whose model file has been damaged."""
    training = Tensor(dist.get_rank(), dist.get_world_size())
    model = training.wrap(training.build())
    with training.offloaded(model.parameters(), folder / name, model) as optimizer:
        optimizer.restore()
