"""Ranks whose steps run beside the forward, compared with the same training in memory.

`tests.ranks_training.rank_server` runs the functions of `CALLS` on every rank. Each of them trains
twice in the same process: plain, and with an optimizer of this package. Nothing reads a parameter
between a step and the forward after it, because whoever reads one waits for the step.
"""

from __future__ import annotations

import errno
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offload
from gds import File, PosixBackend, StorageError, WrapperBackend
from offload import DriveTuning, Options, SealError
from offload.distributed import ownership
from offload.overlap.background_pass import RunningPass
from offload.overlap.forward import BesideForward
from offload.overlap.forward_hooks import _Before
from tests.eventually import eventually
from tests.limits import AGREEMENT_S
from tests.numerics.delays import Held, HeldFile
from tests.numerics.reference import bits
from tests.numerics.test_overlap_forward_waits import when_waiting
from tests.ranks_training import calls
from tests.ranks_training.program import Masters, local

WIDTH = 12


@dataclass
class Case:
    """What a run does."""

    wrap: str = "block"
    """``block``, ``layer``, ``root`` or ``pair`` for FSDP2; ``hsdp`` for blocks that two halves of
    the ranks replicate; ``ddp``."""

    optimizer: str = "AdamW"
    last: int = 4
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    hidden: int = 17
    reshard: bool | None = None
    prefetch: int = 0
    """Number of modules that each one gathers ahead."""

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

    span: int | None = None
    """Elements of each span for each rank, if parameters are dealt; None for those of users."""

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
    """Holds back reads of state in real files until they are released; may fail model files."""

    def __init__(self) -> None:
        super().__init__()
        WrapperBackend.__init__(self, PosixBackend())
        self.fails = False
        """Whether writes to model files fail."""
        self.fails_opening = False
        """Whether model files cannot be opened."""

    def wrap_file(self, file: File) -> File:
        return GateFile(file, self)

    def open(self, path: str, *, writable: bool = False) -> File:
        if self.fails_opening and path.endswith("model.safetensors"):
            raise StorageError(errno.EIO, "injected", path)
        return super().open(path, writable=writable)


class GateFile(HeldFile):
    def write_bytes(self, data: bytes, offset: int) -> None:
        assert isinstance(self.backend, Gate)
        if self.backend.fails and self.path.endswith("model.safetensors"):
            raise StorageError(errno.EIO, "injected", self.path)
        super().write_bytes(data, offset)


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
        if case.wrap == "hsdp":
            shape = (2, dist.get_world_size() // 2)
            sharding["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard"))
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
                module.set_modules_to_forward_prefetch(
                    chain[number + 1 : number + 1 + case.prefetch]
                )
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
            "agreement_timeout_s": AGREEMENT_S,
            "chunk_bytes": 4096,
            "drives": DriveTuning(calibrate=False),
            "overlap": "forward",
            **case.options,
            **options,
        }
        spans = case.span or ownership.SPAN_ELEMENTS
        with mock.patch.object(ownership, "SPAN_ELEMENTS", spans):  # for so small a model
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
            if self.rank == 1 or case.wrap == "ddp":  # which has the same gradients everywhere
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
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left gathered parameters
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
    for name, module in live.model.named_modules():
        hooks = module._forward_pre_hooks.values()
        if isinstance(module, FSDPModule) and not isinstance(next(iter(hooks)), _Before):
            found["different"].append(["hooks", name])
    expected_losses = plain.losses[-len(live.losses) :]
    if live.losses != expected_losses:
        found["different"].append(["losses", live.losses, expected_losses])
    found["different"] += differing(live.values(), expected[case.last])
    found["sealed"] = [handle.result().step for handle in handles]
    optimizer.close()
    return found


class TwoTrainings:
    """A plain training and an offloaded one, whose last chunk can be held back in a step."""

    def __init__(self, folder: Path, rank: int, num_steps: int, **changes: Any) -> None:
        self.case = Case(hidden=192, **changes)
        self.gate = Gate()
        self.plain = Training(self.case, None, rank)
        self.live = Training(self.case, folder / "run", rank, backend=self.gate, ring_chunks=2)
        self.optimizer = self.live.optimizer
        for step in range(1, num_steps + 1):
            self.both(step)

    def both(self, step: int) -> None:
        """Take a step."""
        for training in (self.plain, self.live):
            training.step(step)

    @property
    def strategy(self) -> BesideForward:
        """Strategy of the optimizer."""
        strategy = self.optimizer._engine.strategy
        assert isinstance(strategy, BesideForward)
        return strategy

    @property
    def running(self) -> RunningPass:
        """The step that is running."""
        running = self.strategy._running
        assert running is not None
        return running

    def step_held(self, step: int, *, held: bool = True) -> None:
        """Take a step that cannot end before its last chunk is released."""
        self.optimizer.synchronize()
        for training in (self.plain, self.live):
            training.backward(step)
        if held:
            self.gate.hold(self.strategy._hooks.order[-1])
        for training in (self.plain, self.live):
            training.optimizer.step()
            training.model.zero_grad()
        assert not (held and self.running.ended)

    def different(self) -> list[str]:
        """Return what differs from the plain training."""
        found = differing(self.live.values(), self.plain.values())
        return found if self.live.losses == self.plain.losses else [*found, "losses"]


def hidden(folder: Path, rank: int, block: int = 0, **changes: Any) -> dict[str, Any]:
    """Hold back the chunk that is needed last, until a block has run."""
    run = TwoTrainings(folder, rank, 3, **changes)
    # In DDP, the first ranks step the first layers of a span, which the forward needs first.
    is_last = rank == dist.get_world_size() - 1
    run.step_held(4, held=run.case.wrap != "ddp" or run.case.span is not None or is_last)
    seen: dict[str, bool] = {}

    def ran(*_: Any) -> None:
        seen.setdefault("ran while the step went on", not run.running.ended)
        run.gate.release()

    module = run.live.model.module if run.case.wrap == "ddp" else run.live.model
    module.blocks[block].register_forward_hook(ran)
    run.both(5)
    found = {"different": run.different(), **seen}
    run.optimizer.close()
    return found


READERS: dict[str, Callable[[torch.nn.Parameter], torch.Tensor]] = {
    "local part": lambda p: local(p).detach().clone(),
    "whole": lambda p: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone(),
    "operator": lambda p: local(p * 2).detach(),
    "data": lambda p: local(p.data).clone(),
}


def _read_into(
    into: list[torch.Tensor],
    read: Callable[[torch.nn.Parameter], torch.Tensor],
    parameter: torch.nn.Parameter,
) -> None:
    into.append(read(parameter))


def readers(folder: Path, rank: int, **changes: Any) -> dict[str, Any]:
    """Read the parameter that is stepped last in many ways, on another thread as well."""
    run = TwoTrainings(folder, rank, 3, **changes)
    found: dict[str, Any] = {"different": []}
    step = 3
    for name, read in READERS.items():
        for is_other in (False, True):
            step += 1
            run.step_held(step)
            last = run.optimizer._engine.state.table.trainables[-1].spec.name
            when_waiting(run, run.gate.release)  # type: ignore[arg-type]
            seen: list[torch.Tensor] = []
            expected: list[torch.Tensor] = []
            for training, into in ((run.live, seen), (run.plain, expected)):
                named = {n.removeprefix("module."): p for n, p in training.model.named_parameters()}
                reading = partial(_read_into, into, read, named[last])
                if is_other:
                    reader = threading.Thread(target=reading)
                    reader.start()
                    reader.join()
                else:
                    reading()
            if not torch.equal(bits(seen[0]), bits(expected[0])):
                found["different"].append([name, is_other])
            run.gate.release()
    run.both(step + 1)
    found["different"] += run.different()
    run.optimizer.close()
    return found


def sealed_apart(folder: Path, rank: int, *, fails: bool, **changes: Any) -> dict[str, Any]:
    """Seal a step that has ended on all ranks but the first; maybe after a seal that failed."""
    run = TwoTrainings(folder, rank, 3, **changes)
    found: dict[str, Any] = {"errors": []}
    if fails:
        run.gate.fails = rank == 1
        run.optimizer.checkpoint({"step": 3, "rank": rank}).wait()
        run.gate.fails = False
    for training in (run.plain, run.live):
        training.backward(4)
    if rank == 0:
        run.gate.hold(run.strategy._hooks.order[-1])
    run.plain.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a seal that failed
        run.optimizer.step()
    for training in (run.plain, run.live):
        training.model.zero_grad()
    assert rank == 0 or eventually(lambda: run.running.ended)
    if rank == 0 and fails:
        when_waiting(run, run.gate.release)  # type: ignore[arg-type]
    for _ in range(1 + fails):
        try:
            handle = run.optimizer.checkpoint({"step": 4, "rank": rank})
        except SealError as error:
            found["errors"].append(str(error))
    found["held"] = rank == 0 and not fails and not run.running.ended
    run.gate.release()
    found["sealed"] = handle.result().step
    run.both(5)
    found["different"] = run.different()
    run.optimizer.close()
    return found


def torn(
    folder: Path, rank: int, *, failing: int, then: str = "synchronize", **changes: Any
) -> dict[str, Any]:
    """Let a step fail on one rank; all ranks restore the checkpoint before it and go on.

    Args:
        folder: Folder of the run.
        rank: Number of this rank.
        failing: Rank on which the step fails.
        then: Call after the step: ``synchronize``, ``checkpoint``, ``checkpoint amid`` while the
            step still runs on that rank, or ``pin``.
        changes: Changes of the case.
    """
    run = TwoTrainings(folder, rank, 2, **changes)
    run.optimizer.checkpoint({"step": 2, "rank": rank}).result()
    run.live.backward(3)
    if rank == failing:
        run.gate.hold(run.strategy._hooks.order[-1])
    run.optimizer.step()
    run.live.model.zero_grad()
    run.live.losses.pop()
    found: dict[str, Any] = {"error": ""}
    error = StorageError(errno.EIO, "injected", "state")
    try:
        if then == "checkpoint amid":
            handle = run.optimizer.checkpoint({"step": 3, "rank": rank})
            run.gate.release(error)
            handle.result()
        else:
            run.gate.release(error)
            assert eventually(lambda: run.running.ended)
            if then == "checkpoint":
                run.optimizer.checkpoint({"step": 3, "rank": rank}).result()
            elif then == "pin":
                run.optimizer.pin("kept")
            else:
                run.optimizer.synchronize()
    except Exception as raised:  # noqa: BLE001  (the test looks at it)
        found["error"] = f"{type(raised).__name__}: {raised}"
    run.gate.hold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a seal that failed
        found["restored"] = run.optimizer.restore().step
    for step in (3, 4):
        run.both(step)
    found["different"] = run.different()
    found["sealed"] = run.optimizer.checkpoint({"step": 4, "rank": rank}).result().step
    run.optimizer.close()
    return found


def closed(folder: Path, rank: int, **changes: Any) -> dict[str, Any]:
    """Close the optimizer while a checkpoint waits for the end of a step that is held back."""
    run = TwoTrainings(folder, rank, 3, **changes)
    run.step_held(4)
    run.optimizer.checkpoint({"step": 4, "rank": rank})
    when_waiting(run, run.gate.release)  # type: ignore[arg-type]
    run.optimizer.close()
    again = Training(run.case, folder / "run", rank)
    restored = again.optimizer.restore()
    different = differing(again.values(), run.plain.values())
    again.optimizer.close()
    return {"restored": restored.step, "different": different}


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "compare": compare,
    "hidden": hidden,
    "readers": readers,
    "sealed_apart": sealed_apart,
    "torn": torn,
    "closed": closed,
}


def run_calls(
    folder: Path, rank: int, size: int, called: Sequence[Sequence[Any]], setting: dict[str, Any]
) -> None:
    """Make the calls of a rank, and record what came of each; see `calls.run_calls`."""
    del size, setting
    run_functions(CALLS, folder, rank, called)


def run_functions(
    functions: Mapping[str, Callable[..., Any]],
    folder: Path,
    rank: int,
    called: Sequence[Sequence[Any]],
) -> None:
    """Make calls of functions, each with a folder of its own; warnings are errors.

    Args:
        functions: Functions by name. They take the folder, the rank, and the changes of a case.
        folder: Folder of the test.
        rank: This rank.
        called: Name and changes of each call.
    """
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    calls.record_into(folder)
    for number, (name, changes) in enumerate(called):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            try:
                outcome: dict[str, Any] = {"value": functions[name](own, rank, **changes)}
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                traceback.print_exc()
                outcome = {"error": type(error).__name__, "message": str(error)}
        calls.record(name, **outcome)
    dist.destroy_process_group()
