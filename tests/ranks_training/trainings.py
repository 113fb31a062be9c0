"""Trainings that ranks do twice: in memory, and with their state on storage, stopped and resumed.

A `Training` says what is special about one: its model, wrapper, optimizer, and what happens in
which step. `compare` does it in both ways, and returns every difference. Both ways prepare the
model alike, so that reductions over the ranks are the same.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import offload
from offload import DriveTuning, Options
from tests.limits import AGREEMENT_S
from tests.numerics.reference import bits
from tests.ranks_training.calls import Calls
from tests.ranks_training.models import Masters, local


class Model(torch.nn.Module):
    """Layers of odd sizes, of which one is used on demand; a frozen parameter; and a buffer."""

    def __init__(self, widths: Sequence[int] = (12, 17, 3)) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in pairs])
        self.norm = torch.nn.LayerNorm(widths[-1])
        self.maybe = torch.nn.Linear(widths[-1], widths[-1], bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        """Return the output, and count the calls."""
        self.seen += 1
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        x = self.norm(x) * self.scale
        return self.maybe(x) if uses_all else x


class Training:
    """A training, as its defaults say; subclasses differ in something."""

    optimizer = "AdamW"
    hyper: Mapping[str, Any] = {"lr": 1e-2}
    options: Mapping[str, Any] = {}
    dtype = torch.bfloat16
    last = 4
    stops_after = 2
    """Step after which the run with its state on storage is stopped and resumed."""

    clip: float | None = None
    scaler: type[torch.amp.GradScaler] | None = None
    infinite: int = 0
    """Step in which a gradient is infinite."""

    infinite_ranks: Sequence[int] = (0, 1)
    """Ranks that have the infinite element."""

    wraps_again = False
    """Whether a new process may divide the gradients into other buckets than the first one."""

    is_resumed = True
    """Whether the run with its state on storage is stopped and resumed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def build(self) -> torch.nn.Module:
        """Return the model on this rank."""
        return Model().to(self.dtype)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model ready for several ranks."""
        return model

    def groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """Return the parameter groups."""
        return [{"params": [*model.parameters()]}]

    def before(self, step: int, model: Any, optimizer: Any) -> Any:
        """Do what happens before a step; return another model if the model is wrapped anew."""
        del step, optimizer
        return model

    def data(self, step: int, number: int = 0) -> torch.Tensor:
        """Return the data of a step, which differ between ranks."""
        seed = 1000 * step + 100 * number + self.rank
        return torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))

    def backward(self, model: Any, step: int, scale: float) -> None:
        """Compute the gradients of a step."""
        self.loss(model(self.data(step).to(self.dtype)), scale).backward()

    def loss(self, output: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the scaled loss."""
        return output.float().square().mean() * scale

    def clip_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the norm of all gradients."""
        assert self.clip is not None
        torch.nn.utils.clip_grad_norm_(parameters, self.clip)

    def state(self) -> Any:
        """Return what this rank puts into the train state."""
        return {"rank": self.rank}

    def load(self, state: Any) -> None:
        """Continue from what `state` returned."""
        assert state == {"rank": self.rank}

    def begin(self) -> None:
        """Begin from the start, in a new process."""
        torch.manual_seed(7)

    def make_optimizer(self, model: Any, directory: Path) -> Any:
        """Return the optimizer with its state on storage."""
        return self.offloaded(self.groups(model), directory, model)

    def offloaded(self, groups: Any, directory: Path, model: Any, **more: Any) -> Any:
        """Return an optimizer of this library."""
        return getattr(offload, self.optimizer)(
            groups,
            directory=directory,
            model=model,
            options=Options(
                allow_volatile=True,
                agreement_timeout_s=AGREEMENT_S,
                chunk_bytes=4096,
                drives=DriveTuning(calibrate=False),
                **self.options,
            ),
            **{**self.hyper, **more},
        )

    def in_memory(self, model: Any, directory: Path) -> Any:
        """Return the optimizer that the other one must equal."""
        del directory
        return Masters(self.optimizer, self.groups(model), self.hyper)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the bits of this rank's memory, by name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left gathered parameters
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: bits(local(p)).clone() for name, p in named}


def take_step(training: Training, model: Any, optimizer: Any, step: int, scaler: Any) -> None:
    """Compute gradients, and step: in memory if the optimizer is of masters."""
    model.zero_grad()
    training.backward(model, step, 1.0 if scaler is None else scaler.get_scale())
    parameters = [p for p in model.parameters() if p.grad is not None]
    if step == training.infinite and training.rank in training.infinite_ranks:
        next(local(p.grad) for p in parameters if local(p.grad).numel()).view(-1)[0] = torch.inf
    if isinstance(optimizer, Masters):
        _step_masters(training, parameters, optimizer, step, scaler)
        return
    if scaler is None:
        if training.clip is not None:
            training.clip_gradients(parameters)
        optimizer.step()
        return
    if training.clip is not None and isinstance(scaler, offload.GradScaler):
        scaler.clip_grad_norm_(optimizer, training.clip)
    elif training.clip is not None:
        scaler.unscale_(optimizer)
        training.clip_gradients(parameters)
    scaler.step(optimizer)
    scaler.update()


def _step_masters(
    training: Training, parameters: Any, optimizer: Masters, step: int, scaler: Any
) -> None:
    """Step masters with gradients that are unscaled and clipped as the scaler's words say."""
    factor = 1.0 if scaler is None else 1.0 / scaler.get_scale()
    is_fp32 = isinstance(scaler, offload.GradScaler)  # unscales and clips gradients in FP32
    if not is_fp32:
        for parameter in parameters:
            parameter.grad.mul_(factor)
        if training.clip is not None:
            training.clip_gradients(parameters)
    optimizer.take_gradients(factor if is_fp32 else 1.0)
    if is_fp32 and training.clip is not None:
        training.clip_gradients(optimizer.gradients())
    if step != training.infinite:
        optimizer.step_taken()
    elif scaler is not None:
        scaler.update(scaler.get_scale() * scaler.get_backoff_factor())


def evaluate(training: Training, model: Any, step: int) -> float:
    """Run the model as a validation does; return the loss."""
    model.eval()
    with torch.no_grad():
        found = training.loss(model(training.data(1000 + step).to(training.dtype))).item()
    model.train()
    return float(found)


def compare(training: Training, folder: Path, *, beside: bool = False) -> list[Any]:
    """Train in both ways; return where they differ.

    Args:
        training: The training.
        folder: New folder.
        beside: Whether steps run beside the forward. Then nothing reads a parameter after a step
            but the forward, an evaluation, and a checkpoint that nobody waits for.
    """
    different: list[Any] = []
    losses: dict[int, float] = {}
    if beside:
        training.options = {**training.options, "overlap": "forward"}
    expected: dict[int, dict[str, torch.Tensor]] = {}
    training.begin()
    model = training.wrap(training.build())
    optimizer = training.in_memory(model, folder / f"memory-{training.rank}")
    scaler = _scaler(training)
    for step in range(1, training.last + 1):
        if step == training.stops_after + 1 and training.wraps_again and training.is_resumed:
            model = training.wrap(model.module)
        model = training.before(step, model, optimizer)
        take_step(training, model, optimizer, step, scaler)
        if beside:
            losses[step] = evaluate(training, model, step)
        expected[step] = values(model)
    optimizer.close()

    first, num_steps = 1, 0
    for last in (training.stops_after, training.last)[not training.is_resumed :]:
        training.begin()
        model = training.wrap(training.build())
        if first > 1:
            with torch.no_grad():
                for p in (*model.parameters(), *model.buffers()):
                    local(p).zero_()
        optimizer = training.make_optimizer(model, folder / "run")
        scaler = _scaler(training)
        if first > 1:
            found = optimizer.restore()
            assert found.step == num_steps  # steps that a scaler skips do not count
            training.load(found.train_state["own"])
            if scaler is not None:
                scaler.load_state_dict(found.train_state["scaler"])
            different += _differences(values(model), expected[first - 1], "restored")
        for step in range(first, last + 1):
            model = training.before(step, model, optimizer)
            take_step(training, model, optimizer, step, scaler)
            if beside:
                optimizer.checkpoint({"step": step})
                if evaluate(training, model, step) != losses[step]:
                    different.append([step, "loss"])
            if not beside or step == last:
                different += _differences(values(model), expected[step], step)
        state = {"own": training.state(), "scaler": scaler and scaler.state_dict()}
        sealed = optimizer.checkpoint(state).result()
        if optimizer.checkpoint(state).result().generation != sealed.generation:
            different.append(["a checkpoint of the same state is another one", last])
        num_steps = optimizer.num_steps
        optimizer.close()
        first = last + 1
    return different + _differences_in_file(model, folder / "run", training.rank)


def _scaler(training: Training) -> Any:
    if training.scaler is None:
        return None
    scaler = training.scaler("cpu", init_scale=2.0**8, growth_interval=100)
    scaler.scale(torch.ones(()))  # with the first loss it begins to have a scale
    return scaler


def _differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: Any
) -> list[Any]:
    different = [[where, name] for name in expected if not torch.equal(found[name], expected[name])]
    return different if found.keys() == expected.keys() else [*different, [where, "names"]]


def _differences_in_file(model: Any, directory: Path, rank: int) -> list[Any]:
    """Compare the model file with the whole tensors, and check the checkpoint (on rank 0)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = {
            name: t.full_tensor() if isinstance(t, DTensor) else t
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }
    if rank:
        return []
    with offload.open_checkpoint(directory) as checkpoint:
        path = Path(checkpoint.path)
        if checkpoint.manifest.layout.shard is not None:  # columns are joined by an export
            path = directory.parent / "joined"
            offload.export_checkpoint(checkpoint, path, "hf")
    file = load_file(path / "model.safetensors")
    plain = {_plain(name): tensor for name, tensor in live.items()}
    different = [["file", name] for name in sorted(file.keys() ^ plain.keys())]
    different += [
        ["file", name]
        for name in file.keys() & plain.keys()
        if not torch.equal(bits(file[name]), bits(plain[name]))
    ]
    with offload.open_checkpoint(directory) as checkpoint:
        if not checkpoint.verify().ok:
            different.append(["verify"])
    return different


def _plain(name: str) -> str:
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def compare_here(calls: Calls, name: str, **how: Any) -> list[Any]:
    """Compare a training, ``module:class``, on this rank; see `compare`."""
    module, _, found = name.partition(":")
    training = getattr(importlib.import_module(f"tests.ranks_training.{module}"), found)
    return compare(training(calls.rank, calls.size), calls.directory.parent, **how)
