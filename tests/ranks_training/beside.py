"""Ranks whose steps run beside the forward, compared with the same training in memory.

`tests.ranks_training.rank_server` runs the functions of `CALLS` on every rank. Each of them trains
twice in the same process: plain, and with an optimizer of this package. Nothing reads a parameter
between a step and the forward after it, because whoever reads one waits for the step.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from gds import PosixBackend, WrapperBackend
from offload import DriveTuning, Options
from offload.overlap.forward import BesideForward
from tests.numerics.delays import Held
from tests.numerics.reference import bits
from tests.ranks_training import calls
from tests.ranks_training.program import Masters, local

WIDTH = 12


@dataclass
class Case:
    """What a run does."""

    wrap: str = "block"
    """``block``, ``layer``, ``root`` or ``pair`` for FSDP2; ``ddp``."""

    optimizer: str = "AdamW"
    last: int = 4
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    hidden: int = 17
    reshard: bool | None = None
    prefetch: bool = False
    mixed: bool = False
    made: str = "after"
    """When the optimizer is made: ``after`` all modules were sharded, or ``between`` them and the
    model, or ``before``."""

    accumulate: int = 1
    clip: float | None = None
    infinite: int = 0
    """Step in which a gradient of rank 1 is infinite, so that a scaler skips it; 0 for none."""

    evaluates: bool = False
    """Whether the model is evaluated after each step, and a parameter read on another thread."""

    seals: bool = False
    """Whether each step is followed by a checkpoint at once."""

    first: int = 1
    """First step of this run; the run continues from the checkpoint before it."""

    options: dict[str, Any] = field(default_factory=dict)


class Block(torch.nn.Module):
    """Layers of uneven sizes, and a parameter that belongs to no layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.norm = torch.nn.LayerNorm(hidden)
        self.down = torch.nn.Linear(hidden, WIDTH, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        hidden = torch.nn.functional.gelu(self.norm(self.up(x)))
        return x + torch.nn.functional.linear(hidden, self.down.weight) * self.gain


class Net(torch.nn.Module):
    """Blocks, a head, a frozen parameter, and a buffer that counts the calls."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(hidden) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 5)
        self.head.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gate(Held):
    """Holds back reads of state in real files until they are released."""

    def __init__(self) -> None:
        super().__init__()
        WrapperBackend.__init__(self, PosixBackend())


class Training:
    """One training of a model by all ranks, as plain torch does it or with this package."""

    def __init__(self, case: Case, directory: Path | None, rank: int, **options: Any) -> None:
        self.case, self.rank = case, rank
        self.losses: list[float] = []
        torch.manual_seed(7)
        self.model: Any = Net(case.hidden)
        if not case.mixed:
            self.model.bfloat16()
        self.optimizer: Any = None
        policy = MixedPrecisionPolicy()
        if case.mixed:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": case.reshard}
        offloaded = directory is not None
        arguments = (directory, options) if offloaded else (None, {})
        if case.made == "before" and offloaded:
            self.make(*arguments)
        if case.wrap == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif case.wrap != "root":
            for modules in self._sharded_alone():
                fully_shard(modules, **sharding)
        if case.made == "between":
            self.make(*arguments)
        if case.wrap != "ddp":
            fully_shard(self.model, **sharding)
        if case.prefetch:
            chain = [self.model, *self.model.blocks, self.model.head]
            for number, module in enumerate(chain[:-1]):
                module.set_modules_to_forward_prefetch(chain[number + 1 : number + 3])
        if self.optimizer is None:
            self.make(*arguments)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=4.0, enabled=offloaded and case.infinite > 0
        )

    def _sharded_alone(self) -> Sequence[Any]:
        """Return what is given to `fully_shard` before the model."""
        blocks, head = [*self.model.blocks], self.model.head
        if self.case.wrap == "layer":
            layers = [layer for block in blocks for layer in (block.up, block.norm)]
            return [*layers, *blocks, head]
        if self.case.wrap == "pair":
            return [blocks[0], [blocks[1], blocks[2]], head]
        return [*blocks, head]

    def make(self, directory: Path | None, options: dict[str, Any]) -> None:
        """Make the optimizer."""
        case = self.case
        if directory is None:
            self.optimizer = Masters(self.model, case)
            return
        settings = {
            "allow_volatile": True,
            "agreement_timeout_s": 20.0,
            "chunk_bytes": 4096,
            "drives": DriveTuning(calibrate=False),
            "overlap": "forward",
            **case.options,
            **options,
        }
        self.optimizer = getattr(offload, case.optimizer)(
            self.model.parameters(),
            directory=directory,
            model=self.model,
            options=Options(**settings),
            **case.hyper,
        )

    def loss(self, step: int, number: int = 0) -> torch.Tensor:
        """Run the forward on data that differ between ranks."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + self.rank)
        x = torch.randn(4, WIDTH, generator=generator)
        x = x if self.case.mixed else x.bfloat16()
        loss: torch.Tensor = self.model(x).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def backward(self, step: int) -> None:
        """Compute the gradients of a step."""
        case = self.case
        for number in range(case.accumulate):
            is_last = number == case.accumulate - 1
            waits = nullcontext()
            if case.wrap != "ddp":
                self.model.set_requires_gradient_sync(is_last)
            elif not is_last:
                waits = self.model.no_sync()
            with waits:
                self.scaler.scale(self.loss(step, number)).backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), case.clip)

    def step(self, step: int) -> None:
        """Take a step."""
        case = self.case
        self.backward(step)
        if step != case.infinite:
            self.scaler.step(self.optimizer)
        elif self.scaler.is_enabled():
            if self.rank == 1:
                gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
                next(g for g in gradients if g.numel()).view(-1)[0] = torch.inf
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.zero_grad()

    def evaluate(self, step: int) -> None:
        """Run the model as a validation does, and note what comes of it."""
        self.model.eval()
        with torch.no_grad():
            self.loss(1000 + step)
        self.model.train()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the bits of this rank's memory, by name."""
        return {name: bits(local(p)).clone() for name, p in self.model.named_parameters()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that differ."""
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def compare(folder: Path, rank: int, **changes: Any) -> dict[str, Any]:
    """Train both ways; return what differs, and what the offloaded training says of itself."""
    case = Case(**changes)
    plain, expected = Training(case, None, rank), {}
    for step in range(1, case.last + 1):
        plain.step(step)
        expected[step] = plain.values()
        if case.evaluates:
            plain.evaluate(step)
    found: dict[str, Any] = {"different": []}
    live = Training(case, folder / "run", rank)
    optimizer = live.optimizer
    if case.first != 1:
        restored = optimizer.restore()
        found["resumed"] = [restored.step, restored.train_state]
        found["different"] += differing(live.values(), expected[case.first - 1])
    handles = []
    for step in range(case.first, case.last + 1):
        live.step(step)
        if case.seals:
            handles.append(optimizer.checkpoint({"step": step, "rank": rank}))
        if case.evaluates:
            live.evaluate(step)
    expected_losses = plain.losses[-len(live.losses) :]
    if live.losses != expected_losses:
        found["different"].append(["losses", live.losses, expected_losses])
    found["different"] += differing(live.values(), expected[case.last])
    found["sealed"] = [handle.result().step for handle in handles]
    optimizer.close()
    return found


def hidden(folder: Path, rank: int, **changes: Any) -> dict[str, Any]:
    """Hold back the chunk that is needed last, and look at what runs before it is released."""
    case = Case(hidden=64, **changes)
    plain = Training(case, None, rank)
    gate = Gate()
    live = Training(case, folder / "run", rank, backend=gate, ring_chunks=2)
    for step in (1, 2, 3):
        for training in (plain, live):
            training.step(step)
    strategy = live.optimizer._engine.strategy
    assert isinstance(strategy, BesideForward)
    live.optimizer.synchronize()
    order = [*strategy._hooks.order]
    for training in (plain, live):
        training.backward(4)
    # The ring has read ahead already; whatever is read from now on, of this chunk, is held.
    gate.hold(order[-1])
    live.optimizer.step()
    plain.optimizer.step()
    seen: dict[str, bool] = {}

    def ran(*_: Any) -> None:
        running = strategy._running
        seen["ran while the step went on"] = running is not None and not running.ended
        gate.release()

    module = live.model.module if case.wrap == "ddp" else live.model
    module.blocks[0].register_forward_hook(ran)
    for training in (plain, live):
        training.model.zero_grad()
        training.step(5)
    gate.release()
    different = differing(live.values(), plain.values())
    if live.losses != plain.losses:
        different.append("losses")
    waited = live.optimizer.stats().wait_update_s
    live.optimizer.close()
    return {"different": different, **seen, "waited": waited}


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (compare, hidden)
}


def run_calls(
    folder: Path, rank: int, size: int, called: Sequence[Sequence[Any]], setting: dict[str, Any]
) -> None:
    """Make the calls of a rank, and record what came of each; see `calls.run_calls`."""
    del size, setting
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    calls.record_into(folder)
    for number, (name, changes) in enumerate(called):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            try:
                outcome: dict[str, Any] = {"value": CALLS[name](own, rank, **changes)}
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                traceback.print_exc()
                outcome = {"error": type(error).__name__, "message": str(error)}
        calls.record(name, **outcome)
    dist.destroy_process_group()
