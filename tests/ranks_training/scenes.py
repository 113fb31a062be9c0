"""Scenes that ranks play: what a user might do to the parameters of shards, for `Calls.do`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from gds import PosixBackend
from offload import SealError
from tests.crash.fault_backend import FaultBackend
from tests.ranks_training.calls import Calls
from tests.ranks_training.fsdp2_trainings import Fsdp2
from tests.ranks_training.mesh_trainings import Tensor
from tests.ranks_training.trainings import take_step


def replace_parameters(calls: Calls, how: str) -> None:
    """Step an optimizer whose parameters are not those that it was made with.

    How: ``sharded``, ``assigned`` or ``on meta`` when it exists; ``on the cpu`` for shards that
    FSDP2 keeps in host memory.
    """
    training = Fsdp2(calls.rank, calls.size)
    torch.manual_seed(7)
    with torch.device("meta" if how == "on meta" else "cpu"):
        model = training.build()
    more: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if how == "on the cpu" else {}
    if how != "sharded":
        training.shard(model, **more)
    with training.offloaded(model.parameters(), calls.directory, model) as optimizer:
        if how == "sharded":
            training.shard(model)
        if how == "assigned":
            values = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
        training.backward(model, 1, 1.0)
        optimizer.step()


def columns_that_cannot_be_written(calls: Calls) -> None:
    """Let a rank fail in the middle of its columns; the seal fails on all, and training goes on."""
    training, backend = Tensor(calls.rank, calls.size), FaultBackend(PosixBackend())
    training.options = {"backend": backend}
    model = training.wrap(training.build())
    optimizer = training.offloaded(model.parameters(), calls.directory, model)
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


def restore_columns(calls: Calls, directory: str) -> None:
    """Continue from a checkpoint in a directory."""
    training = Tensor(calls.rank, calls.size)
    model = training.wrap(training.build())
    with training.offloaded(model.parameters(), Path(directory), model) as optimizer:
        optimizer.restore()
