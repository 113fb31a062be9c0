"""A fine-tune on a GPU with its state on the drive, beside torch's own optimizer in its memory.

The same model is trained by four optimizers, step by step: by torch's own on FP32 masters in the
GPU's memory; by torch's own once more, which shows whether the model itself computes the same bits
twice; by this library with ``placement="device"``; and with ``placement="host"``. After each step
the parameters are compared with the first ones, bit by bit. Half way, this library's runs are
closed and go on from a checkpoint, with new models.

    python -m bench.gpu_training --directory DIR                # SmolLM2-135M: the demo's packages
    python -m bench.gpu_training --directory DIR --model tiny

With the state on the device, no bit may differ. With the state on the host, the CPU's arithmetic
differs from the GPU's in last bits, and how far that leads is recorded. Nothing is timed: see
`bench.device`.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

import offload
from bench._device import describe_device, needing_libraries, require_device
from bench._harness import BenchError, Parser, Result, require_space, run, say, scratch
from bench._streamed import exact_state_bytes
from offload.demo import SCENARIOS, DemoError, require_modules
from offload.demo.models import build
from offload.demo.train import Batches
from offload.options import Placement

_INTEGERS = {2: torch.int16, 4: torch.int32}
PLACEMENTS: tuple[Placement, ...] = ("device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training, with the functions that depend on the device."""

    make: Callable[[], nn.Module]
    """Function that returns a new model on the device, each time with the same values."""

    backward: Callable[[nn.Module, int], float]
    """Function that computes the gradients of a step, and returns the loss."""

    optimizer_class: type[torch.optim.Optimizer]
    hyper: Mapping[str, Any]
    """Hyper-parameters."""

    chunk_bytes: int
    """Size of one chunk of one state array, in bytes."""


class Run(Protocol):
    """A model in training."""

    model: nn.Module

    def step(self) -> None:
        """Step the parameters, and drop the gradients."""
        ...


class InMemory:
    """torch's optimizer on FP32 masters in the device's memory.

    Args:
        task: The training.
    """

    def __init__(self, task: Task) -> None:
        self.model = task.make()
        self._live = list(self.model.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._live]
        self._inner = task.optimizer_class(self._masters, **task.hyper)

    def step(self) -> None:
        """Step the masters, and round them to the parameters."""
        for live, master in zip(self._live, self._masters, strict=True):
            master.grad = None if live.grad is None else live.grad.float()
            live.grad = None
        self._inner.step()
        with torch.no_grad():
            for live, master in zip(self._live, self._masters, strict=True):
                live.copy_(master)


class OnDrive:
    """This library's optimizer.

    Args:
        task: The training.
        directory: Directory of the store.
        placement: Where chunks are updated.
    """

    def __init__(self, task: Task, directory: str, placement: Placement) -> None:
        self._task = task
        self._directory = directory
        self._options = offload.Options(chunk_bytes=task.chunk_bytes, placement=placement)
        self._open()

    def _open(self) -> None:
        self.model = self._task.make()
        with needing_libraries():
            self.optimizer = offload.OffloadedOptimizer(
                self._task.optimizer_class,
                self.model.named_parameters(),
                directory=self._directory,
                model=self.model,
                keep=1,
                options=self._options,
                **self._task.hyper,
            )

    def step(self) -> None:
        """Step the chunks."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resume(self) -> int:
        """Seal a checkpoint, close, and go on from the checkpoint with a new model.

        Returns:
            Step of the checkpoint.
        """
        self.optimizer.checkpoint().result()
        self.optimizer.close()
        self._open()
        checkpoint = self.optimizer.restore()
        if checkpoint is None:
            raise BenchError(f"{self._directory}: the checkpoint that was just sealed is not found")
        return checkpoint.step


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and write the result."""
    args = _arguments(arguments)
    require_device()
    # Before CUDA begins: matrix products then give the same bits each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with scratch(args.directory) as directory:
        result = Result("gpu_training", args, directory)
        describe_device(result)
        scenario = SCENARIOS[args.model]
        # Two stores of two slots each.
        require_space(directory, 4 * exact_state_bytes(scenario.num_parameters))
        wrong = measure(args, result, directory, _task(args.model))
        result.write()
    if wrong:
        raise BenchError(wrong)


def measure(args: argparse.Namespace, result: Result, directory: str, task: Task) -> str:
    """Train with all optimizers in turn, and add losses and counts to the result.

    Returns:
        What is wrong, for people; empty if all bits are as promised.
    """
    expected = InMemory(task)
    drives: dict[str, OnDrive] = {
        p: OnDrive(task, os.path.join(directory, p), p) for p in PLACEMENTS
    }
    runs: dict[str, Run] = {"again": InMemory(task), **drives}
    losses: dict[str, list[float]] = {name: [] for name in ("torch", *runs)}
    differ: dict[str, list[int]] = {name: [] for name in runs}
    num_elements = sum(parameter.numel() for parameter in expected.model.parameters())
    for step in range(1, args.steps + 1):
        losses["torch"].append(task.backward(expected.model, step))
        expected.step()
        for name, one in runs.items():
            losses[name].append(task.backward(one.model, step))
            one.step()
            differ[name].append(num_different(one.model, expected.model))
        say(
            f"step {step}: "
            + ", ".join(f"{name} {found[-1]:.6f}" for name, found in losses.items())
        )
        if step == args.steps // 2:
            for name, drive in drives.items():
                resumed = drive.resume()
                result.fact(f"{name}_resumed_from_step", resumed)
                result.fact(
                    f"{name}_different_after_resume", num_different(drive.model, expected.model)
                )
    for name, drive in drives.items():
        stats = drive.optimizer.stats()
        for field in ("update_code", "steps", "to_host_bytes", "to_device_bytes", "ring_bytes"):
            result.fact(f"{name}_{field}", getattr(stats, field))
        drive.optimizer.close()
    result.fact("num_parameters", num_elements)
    result.add_samples({f"{name}_loss": found for name, found in losses.items()})
    result.add_samples({f"{name}_different": [float(n) for n in ns] for name, ns in differ.items()})
    for name in runs:
        pairs = zip(losses[name], losses["torch"], strict=True)
        result.fact(f"{name}_largest_difference_of_losses", max(abs(a - b) for a, b in pairs))
    if any(differ["again"]):
        return "the model does not compute the same bits twice here, so the runs cannot be compared"
    if any(differ["device"]):
        return (
            "with the state on the device, parameters have other bits than with torch's optimizer"
        )
    say("with the state on the device, all parameters had torch's bits after every step")
    return ""


def num_different(one: nn.Module, other: nn.Module) -> int:
    """Return how many elements of the parameters of two models have other bits."""
    found = 0
    with torch.no_grad():
        for left, right in zip(one.parameters(), other.parameters(), strict=True):
            dtype = _INTEGERS[left.element_size()]
            found += int((left.detach().view(dtype) != right.detach().view(dtype)).sum())
    return found


def _task(name: str) -> Task:
    scenario = SCENARIOS[name]
    try:
        require_modules(scenario)
        model, encode = build(scenario.name)
    except DemoError as error:
        raise BenchError(str(error)) from error
    batches = Batches(encode, batch=scenario.batch, tokens=scenario.tokens)

    def backward(model: nn.Module, step: int) -> float:
        """Compute the gradients of a batch, with the same dropout for every model."""
        torch.manual_seed(step)
        ids = batches[step].cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return float(loss)

    return Task(
        make=lambda: copy.deepcopy(model).cuda(),
        backward=backward,
        optimizer_class=torch.optim.AdamW,
        hyper={"lr": scenario.lr, "weight_decay": 0.01},
        chunk_bytes=scenario.chunk_bytes,
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("gpu_training", __doc__ or "")
    add = parser.add_argument
    add("--model", choices=sorted(SCENARIOS), default="smollm2", help="default: %(default)s")
    add("--steps", type=int, default=12, help="default: %(default)s")
    args = parser.read(arguments, quick={"model": "tiny", "steps": 4})
    args.what = args.what or f"{args.model}-{args.steps}-steps"
    return args


if __name__ == "__main__":
    run(main)
