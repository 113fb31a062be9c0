"""The two sides of a comparison: one trains with this library, the other with plain torch.

Both build the same model and run the same user's code; they differ in how they make an optimizer,
seal a checkpoint and go back to one.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import offload
from tests.fuzz.models import Network
from tests.fuzz.plain import Masters
from tests.fuzz.program import Program

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, _ramp),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def _ramp(epoch: int) -> float:
    return 1 / (1 + epoch % 4)


def hyper_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return constructor arguments; a learning rate that is to be a tensor becomes one."""
    hyper = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    if hyper.pop("tensor_lr", False):
        hyper["lr"] = torch.tensor(hyper["lr"])
    return hyper


def _by_value(value: Any) -> Any:
    if isinstance(value, Tensor) or type(value) is int:
        return float(value)
    return value


class Side:
    """What one side has: a model, its optimizers, and what a training loop carries along."""

    ours = False

    def __init__(self, program: Program, root: Path) -> None:
        self.program = program
        self.config = program.config
        self.root = root
        self.log: list[Any] = []
        self.overlap: str | None = self.config["options"].get("overlap")
        self.late = [False for _ in self.config["optimizers"]]
        self.lives = 0
        self.frozen: list[str] = self.config["frozen"]
        self.build()

    def build(self) -> None:
        """Make model, optimizers, schedulers, scaler and hooks, as a new process would."""
        self.model = Network(self.config["shape"], self.config["seed"] + self.lives)
        self.lives += 1
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        self.optimizers = [self.optimizer(i) for i in range(len(self.config["optimizers"]))]
        for i, optimizer in enumerate(self.optimizers):
            if self.late[i]:
                optimizer.add_param_group(self.late_group())
        kind = self.config["scheduler"]
        self.schedulers = [SCHEDULERS[kind](o) for o in self.optimizers] if kind else []
        self.scaler: Any = self.make_scaler() if self.config["scaler"] else None
        self.hooks()

    def groups(self, i: int) -> list[dict[str, Any]]:
        """Return the parameter groups of optimizer `i`, without the late layer."""
        spec = self.config["optimizers"][i]
        named = dict(self.model.named_parameters())
        return [
            {"params": [named[name] for name in group["names"]], **hyper_of(group["hyper"])}
            for group in spec["groups"]
        ]

    def late_group(self) -> dict[str, Any]:
        """Return the group of the layer that joins in the middle of training."""
        return {"params": list(self.model.late.parameters()), "weight_decay": 0.03}

    def optimizer(self, i: int) -> Any:
        """Make optimizer `i`."""
        raise NotImplementedError

    def make_scaler(self) -> Any:
        """Make the gradient scaler."""
        raise NotImplementedError

    def hooks(self) -> None:
        """Register what the program wants hooks for."""
        wanted = self.config["hooks"]
        for optimizer in self.optimizers if "step" in wanted else ():
            if self.overlap != "backward":  # there the step has begun in backward
                optimizer.register_step_pre_hook(lambda *_: self.note("pre"))
            if self.overlap != "backward" or len(self.optimizers) == 1:
                optimizer.register_step_post_hook(lambda *_: self.note("post"))
        if "forward" in wanted:
            self.model.blocks[0].register_forward_hook(lambda *_: self.note("forward"))
        if "forward_pre" in wanted:
            self.model.blocks[-1].register_forward_pre_hook(lambda *_: self.note("forward_pre"))
        if "gradient" in wanted and self.model.head.weight.requires_grad:
            self.model.head.weight.register_hook(lambda g: g * 0.5)
        trained = self.model.late.bias.requires_grad and self.overlap != "backward"
        if "accumulated" in wanted and trained:
            self.model.late.bias.register_post_accumulate_grad_hook(lambda _: self.note("grad"))

    @torch.no_grad()
    def note(self, what: str) -> None:
        """Write down a number that depends on every parameter that an optimizer has."""
        total = [
            p.float().sum() for o in self.optimizers for g in o.param_groups for p in g["params"]
        ]
        self.log.append((what, torch.stack(total)))

    def parameters(self, i: int) -> list[Tensor]:
        """Return the parameters of optimizer `i`."""
        return [p for group in self.optimizers[i].param_groups for p in group["params"]]

    def look(self) -> dict[str, Tensor]:
        """Return a copy of every parameter and buffer."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: value.detach().clone() for name, value in named.items()}

    def hyper(self) -> list[Any]:
        """Return hyper-parameters of all groups, by value."""
        return [
            {k: _by_value(v) for k, v in group.items() if k != "params"}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def extra(self) -> dict[str, Any]:
        """Return what a training loop puts into a checkpoint beside the optimizer's state."""
        return {
            "schedulers": [s.state_dict() for s in self.schedulers],
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }

    def load_extra(self, extra: dict[str, Any]) -> None:
        """Take back what `extra` has given."""
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.scaler:
            self.scaler.load_state_dict(extra["scaler"])

    def settle(self) -> None:
        """Wait until checkpoints that were asked for are durable: before parameters are edited."""

    def synchronize(self) -> None:
        """Wait for a step that runs beside the model, before a fork or what torch cannot see."""

    def after_step(self, i: int) -> None:
        """Do to gradients what ``step()`` is documented to do to them."""

    def checkpoint(self, i: int, metrics: dict[str, float] | None, wait: bool) -> Any:
        """Seal a checkpoint of optimizer `i`."""
        raise NotImplementedError

    def restore(self, i: int, step: int | None) -> Any:
        """Go back to a checkpoint of optimizer `i`: None for the newest."""
        raise NotImplementedError

    def state(self, i: int) -> dict[str, Any]:
        """Return the state of optimizer `i`: ``state`` and ``master`` by numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""


class Plain(Side):
    """The side of plain torch."""

    def __init__(self, program: Program, root: Path) -> None:
        count = len(program.config["optimizers"])
        self.steps = [0] * count
        self.snapshots: list[dict[int, Any]] = [{} for _ in range(count)]
        self.newest: list[int | None] = [None] * count
        self.pins: list[dict[str, int]] = [{} for _ in range(count)]
        self.alive: list[set[int]] = [set() for _ in range(count)]  # what `keep` has to keep
        super().__init__(program, root)

    def optimizer(self, i: int) -> Any:
        spec = self.config["optimizers"][i]
        split = self.config["options"].get("master") == "split"
        made = Masters(getattr(torch.optim, spec["class"]), self.groups(i), split=split)
        self.steps[i] = 0
        return made

    def make_scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=self.config["scaler"], growth_interval=4)

    def after_step(self, i: int) -> None:
        if self.overlap is not None:
            for parameter in self.parameters(i):
                parameter.grad = None

    def checkpoint(self, i: int, metrics: dict[str, float] | None, wait: bool) -> Any:
        step = self.steps[i]
        self.snapshots[i][step] = {
            "optimizer": self.optimizers[i].snapshot(),
            "model": {k: v.detach().clone() for k, v in self.model.state_dict().items()},
            "extra": copy.deepcopy(self.extra()),
            "late": self.late[i],
            "frozen": [n for n, p in self.model.named_parameters() if not p.requires_grad],
            "metrics": metrics,
        }
        self.newest[i] = step
        kept = sorted({*self.alive[i], step})[-self.config["keep"]["last"] :]
        self.alive[i] = {*kept, *self.pins[i].values()}
        return step if wait else None

    @torch.no_grad()
    def restore(self, i: int, step: int | None) -> Any:
        step = self.newest[i] if step is None else step
        if step is None:
            return None
        for newer in [s for s in self.snapshots[i] if s > step]:
            del self.snapshots[i][newer]
        self.alive[i] = {s for s in self.alive[i] if s <= step}
        self.newest[i] = step
        found = self.snapshots[i][step]
        if self.config["model"]:
            own = set(self.parameters(i))
            for name, value in self.model.state_dict(keep_vars=True).items():
                if value not in own:
                    value.copy_(found["model"][name])
        self.optimizers[i].load_snapshot(found["optimizer"])
        self.steps[i] = step
        self.load_extra(found["extra"])
        return step

    def state(self, i: int) -> dict[str, Any]:
        optimizer = self.optimizers[i]
        masters = dict(enumerate(optimizer.effective()))
        return {"state": optimizer.inner.state_dict()["state"], "master": masters}


class Ours(Side):
    """The side of this library."""

    ours = True

    def __init__(self, program: Program, root: Path) -> None:
        self.options = dict(program.config["options"])
        self.handles: list[Any] = [None] * len(program.config["optimizers"])
        super().__init__(program, root)

    def directories(self, i: int) -> list[Path]:
        """Return the directories of store `i`; the first is the store."""
        count = self.config["directories"]
        return [self.root / f"drive{n}" / f"store{i}" for n in range(count)]

    def optimizer(self, i: int) -> Any:
        spec = self.config["optimizers"][i]
        directories = self.directories(i)
        for directory in directories:
            directory.parent.mkdir(parents=True, exist_ok=True)
        keep = self.config["keep"]
        kept: Any = keep["last"]
        if keep["every"]:
            kept = offload.LastK(keep["last"]) | offload.EverySteps(keep["every"])
        options = dict(self.options)
        drives = offload.DriveTuning(
            threads=options.pop("threads", None),
            direct=None if self.config["disk"] else False,
            shares=(2, 1, 1)[: len(directories)] if len(directories) > 1 else None,
        )
        return offload.OffloadedOptimizer(
            getattr(torch.optim, spec["class"]),
            self.groups(i),
            directory=directories if len(directories) > 1 else directories[0],
            model=self.model if self.config["model"] else None,
            keep=kept,
            options=offload.Options(**options, allow_volatile=True, drives=drives),
        )

    def make_scaler(self) -> Any:
        return offload.GradScaler("cpu", init_scale=self.config["scaler"], growth_interval=4)

    def settle(self) -> None:
        for handle in self.handles:
            if handle is not None:
                handle.result(60)

    def synchronize(self) -> None:
        if self.overlap == "forward":
            for optimizer in self.optimizers:
                optimizer.synchronize()

    def checkpoint(self, i: int, metrics: dict[str, float] | None, wait: bool) -> Any:
        handle = self.optimizers[i].checkpoint(self.extra(), metrics=metrics)
        self.handles[i] = handle
        return handle.result(60).step if wait else None

    def restore(self, i: int, step: int | None) -> Any:
        if step is None:
            found = self.optimizers[i].restore()
        else:
            found = self.optimizers[i].restore(step, discard_newer=True)
        if found is None:
            return None
        self.load_extra(found.train_state)
        return found.step

    def state(self, i: int) -> dict[str, Any]:
        full = self.optimizers[i].full_state_dict()
        live = self.parameters(i)
        masters = {n: full["master"].get(n, p.detach().float()) for n, p in enumerate(live)}
        return {"state": full["state"], "master": masters}

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


@contextlib.contextmanager
def ambient(mode: str | None) -> Iterator[None]:
    """Hold one of torch's ambient modes; the names are those in `program.AMBIENT`."""
    with contextlib.ExitStack() as stack:
        if mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif mode == "enable_grad":
            stack.enter_context(torch.enable_grad())
        elif mode == "meta":
            stack.enter_context(torch.device("meta"))
        elif mode == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif mode == "anomaly":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
        elif mode == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        elif mode == "float64":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, torch.float32)
        elif mode == "function_mode":
            stack.enter_context(torch.overrides.BaseTorchFunctionMode())
        yield


__all__ = ["SCHEDULERS", "Ours", "Plain", "Side", "ambient"]
