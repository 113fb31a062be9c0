"""Trainings with DistributedDataParallel, as people set it up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.ranks_training.trainings import Model, Training


class Ddp(Training):
    """DistributedDataParallel with its defaults."""

    arguments: Mapping[str, Any] = {}
    wraps_again = True

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(model, **self.arguments)


class Accumulated(Ddp):
    """Gradients of three batches, in views of small buckets, of which only the last is reduced.

    An embedding is the output layer as well.
    """

    arguments: Mapping[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}
    clip = 0.1

    def build(self) -> torch.nn.Module:
        model = Model((12, 9, 12))
        model.norm.bias = model.norm.weight
        return model.to(self.dtype)

    def backward(self, model: Any, step: int, scale: float) -> None:
        for number in range(3):
            with model.no_sync() if number < 2 else nullcontext():
                self.loss(model(self.data(step, number).to(self.dtype)), scale).backward()


class Unused(Ddp):
    """A layer that some ranks do not use in some steps, and none in others."""

    arguments: Mapping[str, Any] = {"find_unused_parameters": True}
    last = 5
    stops_after = 3

    def backward(self, model: Any, step: int, scale: float) -> None:
        uses_all = (step == 1, self.rank == 0, False, self.rank == 1, True)[step - 1]
        self.loss(model(self.data(step).to(self.dtype), uses_all=uses_all), scale).backward()


class Freezing(Ddp):
    """A layer that is frozen for two steps, and another one that is trained only later."""

    last = 5
    stops_after = 2

    def build(self) -> torch.nn.Module:
        model = super().build()
        model.maybe.requires_grad_(requires_grad=False)  # type: ignore[union-attr]
        return model

    def before(self, step: int, model: Any, optimizer: Any) -> Any:
        if step == 3:
            model.module.layers[0].requires_grad_(requires_grad=False)
            model.zero_grad()
        if step == 4:
            model.module.maybe.requires_grad_(requires_grad=True)
        if step == 5:
            model.module.layers[0].requires_grad_(requires_grad=True)
        return self.wrap(model.module) if step >= 3 else model


class Buffers(Ddp):
    """FP32 parameters and SGD with momentum; running statistics, which each rank computes itself.

    Those of rank 0 are taken over by all.
    """

    optimizer = "SGD"
    hyper: Mapping[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    dtype = torch.float32

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        )

    def before(self, step: int, model: Any, optimizer: Any) -> Any:
        # Ranks other than the first get rank 0's at the next forward; a checkpoint has rank 0's.
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
        return model

    def backward(self, model: Any, step: int, scale: float) -> None:
        super().backward(model, step, scale)
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


class Groups(Ddp):
    """Groups with hyper-parameters of their own, which a schedule changes.

    The graph does not change, and does not use all parameters.
    """

    optimizer = "Adam"
    arguments: Mapping[str, Any] = {"static_graph": True, "gradient_as_bucket_view": True}

    def backward(self, model: Any, step: int, scale: float) -> None:
        self.loss(model(self.data(step).to(self.dtype), uses_all=False), scale).backward()

    def groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        parameters = [*model.parameters()]
        return [
            {"params": parameters[0::3], "lr": 3e-2, "weight_decay": 0.1},
            {"params": parameters[1::3], "amsgrad": True, "betas": (0.5, 0.8)},
            {"params": parameters[2::3], "maximize": True},
        ]

    def before(self, step: int, model: Any, optimizer: Any) -> Any:
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = (3e-2, 1e-2, 2e-2)[number] / step
        return model


class TorchScaler(Ddp):
    """torch's gradient scaler, which skips a step, with clipping."""

    scaler = torch.amp.GradScaler
    infinite = 2
    clip = 0.1


class Dropout(Ddp):
    """Dropout, and data from a sampler, whose states are in the train state of each rank."""

    dtype = torch.float32
    last = 5
    stops_after = 3

    def begin(self) -> None:
        torch.manual_seed(7)
        self.dataset = torch.randn(64, 12, generator=torch.Generator().manual_seed(3))
        self.sampler: Any = torch.utils.data.DistributedSampler(range(64), seed=5)
        self.position = 0

    def build(self) -> torch.nn.Module:
        model = torch.nn.Sequential(
            torch.nn.Linear(12, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 3)
        )
        torch.manual_seed(100 + self.rank)
        return model

    def data(self, step: int, number: int = 0) -> torch.Tensor:
        per_epoch = len(self.sampler) // 8
        epoch, batch = divmod(self.position, per_epoch)
        self.sampler.set_epoch(epoch)
        self.position += 1
        return self.dataset[[*self.sampler][8 * batch : 8 * batch + 8]]

    def state(self) -> Any:
        return {"position": self.position, "random": torch.get_rng_state()}

    def load(self, state: Any) -> None:
        self.position = state["position"]
        torch.set_rng_state(state["random"])


class Growing(Ddp):
    """A layer that the model and the optimizer get in the middle of the training."""

    is_resumed = False  # a new process deals all layers at once, and so in another way

    def before(self, step: int, model: Any, optimizer: Any) -> Any:
        if step != 2:
            return model
        torch.manual_seed(5)
        inner = model.module
        inner.layers.append(torch.nn.Linear(3, 3).to(self.dtype))
        optimizer.add_param_group({"params": [*inner.layers[-1].parameters()], "lr": 3e-2})
        return self.wrap(inner)

    def offloaded(self, groups: Any, directory: Path, model: Any, **more: Any) -> Any:
        return super().offloaded(groups, directory, getattr(model, "module", model), **more)
