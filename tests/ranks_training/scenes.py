"""Scenes that ranks play: what a user might do, of which a test looks at the outcome."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.ranks_training.fsdp2_trainings import Fsdp2


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
