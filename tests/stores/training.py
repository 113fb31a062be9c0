"""A small training run, the same every time, and what each of its steps must leave behind.

The model mixes FP32 and bf16 parameters and has buffers that every forward changes. `Reference`
trains it with the plain torch optimizer and FP32 masters in memory, so that what the tests expect
does not come from the code that they test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch

from gds import Backend
from offload import AdamW, Checkpoint, Options
from tests.stores import small
from tests.stores.files import read

FEATURES = 30
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
HEAD_HYPER = {"lr": 3e-3, "weight_decay": 0.0}
ARRAYS = ("master", "exp_avg", "exp_avg_sq")

Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """bf16 matrices around an FP32 batch norm, and a head that may join the training later."""

    def __init__(self, history: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1000 + history)
            self.first = torch.nn.Linear(FEATURES, 40).to(torch.bfloat16)
            self.norm = torch.nn.BatchNorm1d(40)
            self.last = torch.nn.Linear(40, 10).to(torch.bfloat16)
            self.head = torch.nn.Linear(10, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x).float()).relu()
        return self.head(self.last(hidden.to(torch.bfloat16)).float())

    def body_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are trained from the start."""
        return [p for n, p in self.named_parameters() if not n.startswith("head")]


def backward(model: Model, step: int, history: int = 0) -> None:
    """Compute the gradients of one step; they depend on its number and the live parameters."""
    generator = torch.Generator().manual_seed(7919 * history + step)
    x = torch.randn(6, FEATURES, generator=generator).to(torch.bfloat16)
    model.zero_grad()
    model(x).square().mean().backward()


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint of one step holds, but for the train state."""

    model: Tensors
    arrays: dict[str, Tensors]


@dataclass
class Reference:
    """The same training in memory: torch's AdamW on FP32 masters."""

    history: int = 0
    head_from: int | None = None
    """The step that the head is trained from; None leaves it frozen."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """By number of steps taken."""

    def __post_init__(self) -> None:
        self._model = Model(self.history)
        self._masters: Tensors = {}
        self._optimizer = torch.optim.AdamW(self._add(self._model.body_parameters()), **HYPER)
        self.snapshots.append(self._snapshot())

    def after(self, step: int) -> Snapshot:
        """Return what there is after `step` steps, training as far as it takes."""
        while len(self.snapshots) <= step:
            number = len(self.snapshots)
            if number == self.head_from:
                masters = self._add(list(self._model.head.parameters()))
                self._optimizer.add_param_group({"params": masters, **HEAD_HYPER})
            backward(self._model, number, self.history)
            live = dict(self._model.named_parameters())
            for name, master in self._masters.items():
                master.grad = live[name].grad.float()
            self._optimizer.step()
            with torch.no_grad():
                for name, master in self._masters.items():
                    live[name].copy_(master)
            self.snapshots.append(self._snapshot())
        return self.snapshots[step]

    def _add(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        names = {p: n for n, p in self._model.named_parameters()}
        added = {names[p]: p.detach().float().clone().requires_grad_() for p in parameters}
        self._masters.update(added)
        return list(added.values())

    def _snapshot(self) -> Snapshot:
        live = dict(self._model.named_parameters())
        arrays: dict[str, Tensors] = {name: {} for name in ARRAYS}
        for name, master in self._masters.items():
            state = self._optimizer.state[master]
            if live[name].dtype != torch.float32:
                arrays["master"][name] = master.detach().clone()
            for array in ARRAYS[1:]:
                if array in state:
                    arrays[array][name] = state[array].clone()
        return Snapshot({k: v.clone() for k, v in self._model.state_dict().items()}, arrays)


def options(backend: Backend | None = None, **changes: Any) -> Options:
    """Return settings that make a run of several small chunks."""
    settings = {
        "ring_chunks": 2,
        "allow_volatile": backend is not None,
        "reader_timeout_s": 0.2,
    }
    return small.options(backend, **{**settings, **changes})


def optimizer_for(
    model: Model,
    directory: str | Sequence[str],
    settings: Options,
    *,
    with_head: bool = False,
    **changes: Any,
) -> AdamW:
    """Construct the optimizer of the run.

    Args:
        model: What it trains.
        directory: The store; a list for one on several drives.
        settings: `options`.
        with_head: Whether the head is in a group of its own from the start.
        changes: Other arguments of the constructor.
    """
    groups: list[dict[str, Any]] = [{"params": model.body_parameters()}]
    if with_head:
        groups.append({"params": list(model.head.parameters()), **HEAD_HYPER})
    return AdamW(groups, directory=directory, model=model, options=settings, **{**HYPER, **changes})


def take_step(model: Model, optimizer: AdamW, number: int) -> None:
    """Take the step of a number, which its gradients depend on."""
    backward(model, number)
    optimizer.step()


def train(model: Model, optimizer: AdamW, *steps: int, seal: bool = True) -> None:
    """Take steps by number.

    Args:
        model: Model that the optimizer trains.
        optimizer: Optimizer, whose next step is the first of `steps`.
        steps: Numbers of the steps, which their gradients depend on.
        seal: Whether a checkpoint with the train state ``{"step": number}`` is made of each, and
            waited for.
    """
    for step in steps:
        take_step(model, optimizer, step)
        if seal:
            optimizer.checkpoint({"step": step}).result()


def add_head(model: Model, optimizer: AdamW) -> None:
    """Begin to train the head."""
    optimizer.add_param_group({"params": list(model.head.parameters()), **HEAD_HYPER})


def read_tensors(backend: Backend, path: str) -> Tensors:
    """Read a safetensors file with the safetensors library."""
    return safetensors.torch.load(read(backend, path))


def read_array(backend: Backend, checkpoint: Checkpoint, array: str, like: Tensors) -> Tensors:
    """Read a state array from all drives, and put together what was cut.

    Args:
        backend: Where the checkpoint is.
        checkpoint: One of any number of drives.
        array: Its name.
        like: Tensors of the shapes that are expected.
    """
    found: dict[str, dict[int, torch.Tensor]] = {}
    for place in (checkpoint.path, *checkpoint.parts):
        for key, values in read_tensors(backend, f"{place}/{array}.safetensors").items():
            cut = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", key)
            name, start = (cut[1], int(cut[2])) if cut else (key, 0)
            assert not cut or len(values) == int(cut[3]) - start
            found.setdefault(name, {})[start] = values.reshape(-1)
    joined = {name: torch.cat([cuts[at] for at in sorted(cuts)]) for name, cuts in found.items()}
    return {
        name: values.reshape(like[name].shape) if name in like else values
        for name, values in joined.items()
    }


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Return whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(_bits(a[name]), _bits(b[name]))
        for name in a
    )


def differences(checkpoint: Checkpoint, backend: Backend, expected: Snapshot) -> list[str]:
    """Say what of a checkpoint is not to the bit what the uninterrupted run had."""
    found = []
    if not same_bits(read_tensors(backend, f"{checkpoint.path}/model.safetensors"), expected.model):
        found.append("parameters or buffers")
    for array, tensors in expected.arrays.items():
        if tensors and not same_bits(read_array(backend, checkpoint, array, tensors), tensors):
            found.append(array)
    found.extend(checkpoint.verify().problems)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
