"""Trainings with FSDP2, as people set it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import offload
from tests.ranks_training.trainings import Model, Training

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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
    """FP32 shards, computed with in bf16; blocks stay gathered after the forward."""

    dtype = torch.float32
    policy = MIXED
    reshards = False
    clip = 0.1


class Resharded(Fsdp2):
    """Blocks are resharded after the forward, to fewer ranks than all."""

    reshards = True
    clip = 0.05


class Prefetched(Fsdp2):
    """Each layer gathers the next one, forward and backward."""

    widths = (12, 9, 8, 7, 3)

    def wrap(self, model: Any) -> torch.nn.Module:
        model = self.shard(model)
        for this, following in pairwise(model.layers):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
        return model  # type: ignore[no-any-return]


class Accumulated(Fsdp2):
    """Gradients of three batches, reduced with the last one, or with each of them."""

    reshards = False

    def backward(self, model: Any, step: int, scale: float) -> None:
        for number in range(3):
            model.set_requires_gradient_sync(step % 2 == 0 or number == 2)
            self.loss(model(self.data(step, number).to(self.dtype)), scale).backward()


class Uneven(Fsdp2):
    """Layers with fewer rows than ranks, so that some shards are empty."""

    widths = (12, 2, 1, 3)
    clip = 0.1


class Meta(Fsdp2):
    """A model that is made without memory, gets it after sharding, and is then initialised."""

    def wrap(self, model: Any) -> torch.nn.Module:
        empty = self.empty().to_empty(device="cpu")
        torch.manual_seed(11)
        for name, value in self.spread(empty, model).items():
            empty.state_dict()[name].copy_(value)
        return empty

    def empty(self) -> Any:
        """Return a sharded model on the meta device."""
        with torch.device("meta"):
            model = Model(self.widths).to(self.dtype)
        return self.shard(model)

    def spread(self, empty: Any, model: Any) -> dict[str, torch.Tensor]:
        """Return the values of a model, sharded as an empty one is."""
        values, held = model.state_dict(), empty.state_dict()
        return {
            name: distribute_tensor(value, held[name].device_mesh, held[name].placements)
            if isinstance(held[name], DTensor)
            else value
            for name, value in values.items()
        }


class Reset(Meta):
    """The optimizer is made while the parameters have no values yet; then they are initialised."""

    def wrap(self, model: Any) -> torch.nn.Module:
        return self.empty().to_empty(device="cpu")  # type: ignore[no-any-return]

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


class Assigned(Meta):
    """Weights are put in the place of those on the meta device, before the first forward."""

    def wrap(self, model: Any) -> torch.nn.Module:
        empty = self.empty()
        empty.load_state_dict(self.spread(empty, model), assign=True)
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


class Recomputed(Fsdp2):
    """Activations are recomputed, by torch's wrapper and by its function."""

    policy = MIXED
    dtype = torch.float32

    def wrap(self, model: Any) -> torch.nn.Module:
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
        inner = model.maybe.forward
        model.maybe.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        return self.shard(model)  # type: ignore[no-any-return]


class Compiled(Fsdp2):
    """Modules that are compiled, before or after they are sharded, and the model itself."""

    def wrap(self, model: Any) -> torch.nn.Module:
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
        model = self.shard(model)
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
        return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


class Scaled(Fsdp2):
    """torch's gradient scaler; an infinite gradient of one rank skips the step on all."""

    scaler = torch.amp.GradScaler
    infinite = 2
    clip = 0.1


class Half(Fsdp2):
    """fp16 parameters with our gradient scaler; likewise."""

    dtype = torch.float16
    scaler = offload.GradScaler
    infinite = 2
    clip = 0.1


class Split(Fsdp2):
    """Masters of which only the lower 16 bits are stored."""

    options: Mapping[str, Any] = {"master": "split"}


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


class Ignored(Fsdp2):
    """A parameter that is not sharded, whose gradients the script adds up."""

    def shard(self, model: Any, **more: Any) -> Any:
        return super().shard(model, ignored_params={model.scale, model.norm.weight}, **more)

    def backward(self, model: Any, step: int, scale: float) -> None:
        super().backward(model, step, scale)
        for parameter in (model.scale, model.norm.weight):
            torch.distributed.all_reduce(parameter.grad)
