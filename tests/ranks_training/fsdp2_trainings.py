"""Trainings with FSDP2, as people set it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import offload
from tests.ranks_training.calls import Calls
from tests.ranks_training.trainings import Model, Training


class Fsdp2(Training):
    """Each layer, and then the model, is sharded; bf16 parameters."""

    policy = MixedPrecisionPolicy()
    reshards: bool | int | None = None
    widths: Sequence[int] = (12, 17, 3)
    infinite_ranks = (1,)

    def build(self) -> torch.nn.Module:
        return Model(self.widths).to(self.dtype)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return self.shard(model)

    def shard(self, model: Any, **more: Any) -> Any:
        """Shard a model in place."""
        how = {"mp_policy": self.policy, "reshard_after_forward": self.reshards, **more}
        for layer in model.layers:
            fully_shard(layer, **how)
        return fully_shard(model, **how)


class Mixed(Fsdp2):
    """FP32 shards, computed with in bf16; blocks stay gathered after the forward.

    Activations are recomputed, by torch's wrapper and by its function.
    """

    dtype = torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshards = False
    clip = 0.1

    def wrap(self, model: Any) -> torch.nn.Module:
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
        inner = model.maybe.forward
        model.maybe.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        return self.shard(model)  # type: ignore[no-any-return]


class Prefetched(Fsdp2):
    """Blocks are resharded after the forward; each gathers the next one, forward and backward.

    Of masters only the lower 16 bits are stored.
    """

    options: Mapping[str, Any] = {"master": "split"}
    widths = (12, 9, 8, 7, 3)
    reshards = True
    clip = 0.05

    def wrap(self, model: Any) -> torch.nn.Module:
        model = self.shard(model)
        for this, following in pairwise(model.layers):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
        return model  # type: ignore[no-any-return]


class Accumulated(Fsdp2):
    """Gradients of three batches, reduced with the last one, or with each of them.

    The script itself adds up those of parameters that are not sharded.
    """

    reshards = False

    def shard(self, model: Any, **more: Any) -> Any:
        return super().shard(model, ignored_params={model.scale, model.norm.weight}, **more)

    def backward(self, model: Any, step: int, scale: float) -> None:
        for number in range(3):
            model.set_requires_gradient_sync(step % 2 == 0 or number == 2)
            self.loss(model(self.data(step, number).to(self.dtype)), scale).backward()
        for parameter in (model.scale, model.norm.weight):
            torch.distributed.all_reduce(parameter.grad)


class Reset(Fsdp2):
    """The optimizer is made while the parameters have no values yet; then they are initialised."""

    def wrap(self, model: Any) -> torch.nn.Module:
        return self.empty().to_empty(device="cpu")  # type: ignore[no-any-return]

    def empty(self) -> Any:
        """Return a sharded model on the meta device."""
        with torch.device("meta"):
            model = Model(self.widths).to(self.dtype)
        return self.shard(model)

    def _reset(self, model: Any) -> None:
        torch.manual_seed(11)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.normal_() if tensor.is_floating_point() else tensor.zero_()

    def in_memory(self, model: Any, directory: Path) -> Any:
        self._reset(model)
        return super().in_memory(model, directory)

    def make_optimizer(self, model: Any, directory: Path) -> Any:
        optimizer = super().make_optimizer(model, directory)
        self._reset(model)
        return optimizer


class Meta(Reset):
    """The same, where they are initialised before."""

    def wrap(self, model: Any) -> torch.nn.Module:
        empty = super().wrap(model)
        super()._reset(empty)
        return empty

    def _reset(self, model: Any) -> None:
        """It has its values."""


class Assigned(Meta):
    """Weights are put in the place of those on the meta device, before the first forward."""

    def wrap(self, model: Any) -> torch.nn.Module:
        empty = self.empty()
        held = empty.state_dict()
        values = {
            name: distribute_tensor(value, held[name].device_mesh, held[name].placements)
            if isinstance(held[name], DTensor)
            else value
            for name, value in model.state_dict().items()
        }
        empty.load_state_dict(values, assign=True)
        empty.frozen.requires_grad_(requires_grad=False)
        return empty  # type: ignore[no-any-return]


class SetByTorch(Fsdp2):
    """Weights from rank 0 by torch.distributed.checkpoint.state_dict, after the optimizer."""

    def make_optimizer(self, model: Any, directory: Path) -> Any:
        self.model = self._given()
        optimizer = super().make_optimizer(model, directory)
        self._set(model)
        return optimizer

    def in_memory(self, model: Any, directory: Path) -> Any:
        self.model = self._given()
        self._set(model)
        return super().in_memory(model, directory)

    def _given(self) -> torch.nn.Module:
        torch.manual_seed(13)
        return Model(self.widths).to(self.dtype)

    def _set(self, model: Any) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given = self.model.state_dict() if self.rank == 0 else {}
        set_model_state_dict(model, given, options=options)


class Compiled(Fsdp2):
    """Modules that are compiled, before or after they are sharded, and the model itself."""

    def wrap(self, model: Any) -> torch.nn.Module:
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
        model = self.shard(model)
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
        return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


class Scaled(Fsdp2):
    """torch's gradient scaler; an infinite gradient of one rank skips the step on all.

    Layers have fewer rows than there are ranks, so that some shards are empty.
    """

    widths = (12, 2, 1, 3)

    scaler = torch.amp.GradScaler
    infinite = 2
    clip = 0.1


class Half(Fsdp2):
    """fp16 parameters with our gradient scaler; likewise."""

    dtype = torch.float16
    scaler = offload.GradScaler
    infinite = 2
    clip = 0.1


class ShardedLater(Fsdp2):
    """The model is sharded when the optimizer exists, whose groups then get the new parameters."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def in_memory(self, model: Any, directory: Path) -> Any:
        return super().in_memory(self.shard(model), directory)

    def make_optimizer(self, model: Any, directory: Path) -> Any:
        optimizer = super().make_optimizer(model, directory)
        names = {p: n for n, p in model.named_parameters()}
        self.shard(model)
        sharded = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[p]] for p in group["params"]]
        return optimizer


class Growing(Fsdp2):
    """A layer that the model and the optimizer get in the middle of the training."""

    def before(self, step: int, model: Any, optimizer: Any) -> Any:
        if step == 2:
            torch.manual_seed(5)
            model.layers.append(self._layer())
            optimizer.add_param_group({"params": [*model.layers[-1].parameters()], "lr": 3e-2})
        return model

    def make_optimizer(self, model: Any, directory: Path) -> Any:
        if not (directory / "step-00000002").exists():
            return super().make_optimizer(model, directory)
        parameters = [*model.parameters()]  # a run that is resumed begins with all layers
        model.layers.append(self._layer())
        groups = [
            {"params": parameters},
            {"params": [*model.layers[-1].parameters()], "lr": 3e-2},
        ]
        return self.offloaded(groups, directory, model)

    def _layer(self) -> Any:
        return fully_shard(torch.nn.Linear(3, 3).to(self.dtype))


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
