"""One rank of a training whose bits are compared with the same training in memory.

python -m tests.ranks_training.program DIRECTORY CASE    # on every rank; CASE is a JSON object

The plain training steps FP32 masters in memory, from the first step to the last. It prepares a
model in the same way, so that reductions over the ranks are the same. The offloaded training may be
stopped and resumed.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offload
from gds import File, PosixBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload import DriveTuning, Options, SealError, SealHandle
from tests.limits import AGREEMENT_S
from tests.numerics.reference import bits


@dataclass
class Case:
    """What a run does."""

    kind: str = "ddp"
    """``ddp``, ``fsdp2``, or ``fsdp2-mixed`` with FP32 shards and a mixed-precision policy."""

    optimizer: str = "AdamW"
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    first: int = 1
    """First step of this run; if it is not 1, the run continues from the checkpoint before it. With
    0 it continues from the newest checkpoint, if there is one."""

    last: int = 6
    seals: list[int] = field(default_factory=lambda: [3, 6])
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    acknowledge: str = ""
    """Path of a file to which each step is written when its checkpoint is durable."""

    infinite: int = 0
    """Step in which a gradient of rank 1 is infinite, so that a scaler skips it on all ranks; 0 for
    training without a scaler."""

    fails: list[int] = field(default_factory=list)
    """Rank, and step of a seal that cannot write the rank's share of the model."""

    collects: bool = False
    """Whether the error of a seal is raised before the next step."""

    slow_seals: bool = False
    """Whether seals take longer than steps, as they do with larger models."""

    timeout_s: float = AGREEMENT_S
    values: bool = False
    """Whether the rank says the values of its memory at the end."""

    accumulate: int = 1
    """Backwards for one step; all but the last without reduction."""


class Model(torch.nn.Module):
    """Small layers of uneven sizes, a frozen parameter, an unused one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 17)
        self.norm = torch.nn.LayerNorm(17)
        self.second = torch.nn.Linear(17, 3, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, and count the calls."""
        self.seen += 1
        return self.second(torch.nn.functional.gelu(self.norm(self.first(x)))) * self.scale


class SlowModelFiles(WrapperBackend):
    """Writes to model files take a while."""

    def wrap_file(self, file: File) -> File:
        return SlowFile(file) if file.path.endswith("model.safetensors") else file


class SlowFile(WrapperFile):
    fails = False

    def write_bytes(self, data: bytes, offset: int) -> None:
        time.sleep(0.3)
        if SlowFile.fails:
            raise StorageError(errno.EIO, "injected", self.path)
        super().write_bytes(data, offset)


class Masters:
    """The optimizer in memory: FP32 masters of the local memory of each parameter."""

    def __init__(self, model: torch.nn.Module, case: Case) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [local(p).detach().float() for p in self._parameters]
        optimizer = getattr(torch.optim, case.optimizer)
        self.inner = optimizer(
            [m for m in self._masters if m.numel()] or [torch.zeros(1)], **case.hyper
        )

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            gradient = parameter.grad
            master.grad = None if gradient is None else local(gradient).detach().float()
        self.inner.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master.grad is not None:
                    local(parameter).copy_(master)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def prepare(case: Case) -> torch.nn.Module:
    """Return a model with the same values on all ranks, ready for several ranks."""
    torch.manual_seed(7)
    model = Model()
    if case.kind == "ddp":
        return DistributedDataParallel(model.bfloat16())
    if case.kind == "fsdp2":
        model.bfloat16()
        policy = MixedPrecisionPolicy()
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model.first, model.second):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def backward(
    model: torch.nn.Module,
    case: Case,
    step: int,
    rank: int,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Compute the gradients of a step from data that differ between the ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = torch.bfloat16 if case.kind != "fsdp2-mixed" else torch.float32
    for number in range(case.accumulate):
        is_last = number == case.accumulate - 1
        x = torch.randn(4, 12, generator=generator).to(dtype)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last
        else:
            model.set_requires_gradient_sync(is_last)
        loss = model(x).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
    if case.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the bits of this rank's memory, by name."""
    return {name: bits(local(p)).clone() for name, p in model.named_parameters()}


def outcome(handle: SealHandle) -> str:
    """Return the error of a seal; empty if it succeeded."""
    try:
        handle.result()
    except SealError as error:
        return str(error)
    return ""


def main(directory: Path, case: Case) -> dict[str, Any]:
    """Train; return what the test looks at."""
    rank = dist.get_rank()
    plain, expected = prepare(case), {}
    masters = Masters(plain, case)
    for step in range(1, case.last + 1):
        if step == case.first and isinstance(plain, DistributedDataParallel):
            # A new process divides gradients into buckets anew, and with three ranks or more the
            # order of a sum depends on that.
            plain = DistributedDataParallel(plain.module)
        plain.zero_grad()
        backward(plain, case, step, rank)
        if step != case.infinite:
            masters.step()
        expected[step] = values(plain)

    backend = SlowModelFiles(PosixBackend()) if case.slow_seals or case.fails else None
    model = prepare(case)
    optimizer = getattr(offload, case.optimizer)(
        model.parameters(),
        directory=directory,
        model=model,
        options=Options(
            allow_volatile=True,
            agreement_timeout_s=case.timeout_s,
            chunk_bytes=4096,
            drives=DriveTuning(calibrate=False),
            backend=backend,
            **case.options,
        ),
        **case.hyper,
    )
    found: dict[str, Any] = {"different": [], "parts": 0}
    if case.first != 1:
        checkpoint = optimizer.restore()
        found["resumed"] = [checkpoint.step, checkpoint.train_state] if checkpoint else None
        if case.first == 0:
            case.first = checkpoint.step + 1 if checkpoint else 1
        restored = expected.get(case.first - 1, values(model))
        if any(not torch.equal(v, restored[n]) for n, v in values(model).items()):
            found["different"].append("restored")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=case.infinite > 0)
    for step in range(case.first, case.last + 1):
        optimizer.zero_grad()
        backward(model, case, step, rank, scaler)
        if step == case.infinite and rank == 1:
            local(model.first.weight.grad).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        for name, value in values(model).items():
            if not torch.equal(value, expected[step][name]):
                found["different"].append([step, name])
        if backend is not None:
            SlowFile.fails = case.fails == [rank, step]
        if step in case.seals:
            with suppress(SealError if case.fails else ()):  # of the seal before
                optimizer.synchronize()
            handle = optimizer.checkpoint(train_state={"step": step, "rank": rank})
            if case.fails:
                found.setdefault("errors", []).append(outcome(handle))
                with suppress(SealError if case.collects else ()):
                    if case.collects:
                        optimizer.synchronize()  # so that the state is in its slot again at once
            if case.acknowledge:
                handle.result()
                with Path(case.acknowledge).open("a") as file:
                    file.write(f"{step}\n")
    if case.seals and case.first <= case.last:
        found["sealed"] = handle.result().step
    if case.values:
        found["values"] = {
            name: value.view(torch.uint8).numpy().tobytes().hex()
            for name, value in values(model).items()
        }
    optimizer.close()
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(mode=True)
    print(json.dumps(main(Path(sys.argv[1]), Case(**json.loads(sys.argv[2])))), flush=True)
    dist.destroy_process_group()
