"""Calls of the public interface that a rank of a job makes, one after the other.

A call that fails is recorded with its error, and the rank goes on with the next one. So a test can
say what each rank does, and look at what each call did there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import offload
from gds import PosixBackend
from offload import DriveTuning, Options
from offload.distributed import node
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_open_files import open_below
from tests.hurry import flag, hurry_after
from tests.limits import AGREEMENT_S
from tests.numerics.reference import bits
from tests.process_memory import reset_peak, resident_bytes
from tests.ranks_training.host_backend import HostBackend
from tests.ranks_training.program import Case, Masters, local
from tests.ranks_training.protocol_steps import ProtocolSteps, kill


@dataclass
class Setting:
    """What all calls of a rank have in common."""

    kind: str = "ddp"
    """``ddp``, ``fsdp2``, ``mixed`` for FP32 shards with a mixed-precision policy, ``hybrid`` for
    shards that are replicated once, ``tp`` for layers that are divided in either dimension,
    ``grid`` for such layers that are sharded as well, or ``one`` for a model that is not
    wrapped."""

    dtype: str = "bfloat16"
    widths: Sequence[int] = (5, 7, 3)
    frozen_elements: int = 5
    find_unused: bool = False
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = AGREEMENT_S
    given: bool = False
    """Whether gradients are given, so that they do not depend on the number of ranks."""
    group_timeout_s: float = 1800.0
    """Seconds for which torch itself waits for a rank; torchrun would end the others at once."""

    is_plain: bool = False
    """Whether steps are taken in memory; nothing is stored."""

    store_port: int = 0
    """Port of a key-value store that outlives the ranks, as torchrun has one; 0 for one of rank
    0."""


class Model(torch.nn.Module):
    """Layers of a few odd sizes, a frozen parameter, and a buffer that counts forwards."""

    def __init__(self, widths: Sequence[int], frozen_elements: int = 5) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in pairs])
        self.maybe = torch.nn.Linear(widths[-1], widths[-1], bias=False)
        self.frozen = torch.nn.Parameter(torch.randn(frozen_elements), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        """Return the output."""
        self.seen += 1
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.maybe(x) if uses_all else x


class Calls:
    """The calls, with what they work on."""

    def __init__(self, folder: Path, rank: int, size: int, setting: Setting) -> None:
        self.directory = folder / "run"
        self.rank, self.size, self.setting = rank, size, setting
        self.num_steps = 0
        self.before_bytes = 0
        self.backend = FaultBackend(PosixBackend())
        self.model = self._wrapped() if setting.kind else None
        self.optimizer: Any = None
        self.masters: Masters | None = None
        self.handle: Any = None
        self.scaler: Any = None
        self.call = ""
        """Name of the call that is being made."""
        self.errors: list[Exception] = []
        """Errors that are kept."""
        self._steps: ProtocolSteps | None = None

    def _wrapped(self) -> Any:
        torch.manual_seed(7)
        setting = self.setting
        model = Model(setting.widths, setting.frozen_elements).to(getattr(torch, setting.dtype))
        if setting.kind == "one":
            return model
        if setting.kind == "ddp":
            return DistributedDataParallel(model, find_unused_parameters=setting.find_unused)
        if setting.kind in ("tp", "grid"):
            shape = (self.size,) if setting.kind == "tp" else (self.size // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
            styles = (ColwiseParallel(), RowwiseParallel())
            for number, layer in enumerate(model.layers):
                parallelize_module(layer, mesh["tp"], styles[number % 2])
            if setting.kind == "grid":
                for layer in (*model.layers, model):
                    fully_shard(layer, mesh=mesh["dp"])
            return model
        policy = MixedPrecisionPolicy()
        if setting.kind == "mixed":
            model.float()
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
        if setting.kind == "hybrid":
            mesh = init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("hosts", "ranks"))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def host(self, name: str) -> None:
        """Be on a host of this name from now on, as far as the ranks can tell.

        It has the directories beside the store whose names begin with its own. The others are
        missing.
        """
        node.this_node = lambda: node.Node(name, f"boot of {name}")
        self.backend = FaultBackend(HostBackend(self.directory.parent, name))

    def open(self, **changes: Any) -> None:
        """Make the optimizer."""
        setting = self.setting
        if setting.is_plain:
            self.masters = Masters(self.model, Case(hyper=setting.hyper))
            return
        options = {
            "allow_volatile": True,
            "agreement_timeout_s": setting.timeout_s,
            "chunk_bytes": 4096,
            "drives": DriveTuning(calibrate=False),
            "backend": self.backend,
            **setting.options,
        }
        arguments = {"model": self.model, **setting.hyper, **changes}
        optimizer_class = arguments.pop("optimizer_class", offload.AdamW)
        parameters = arguments.pop("params", None) or self.model.parameters()
        directory = arguments.pop("directory", self.directory)
        if isinstance(directory, list):  # names of directories beside each other
            directory = [self.directory.parent / name for name in directory]
        self.optimizer = optimizer_class(
            parameters,
            directory=directory,
            options=Options(**options),
            **arguments,
        )

    def do(self, where: str, *arguments: Any, **keywords: Any) -> Any:
        """Call ``module:function`` of the tests with this object and the arguments."""
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)(self, *arguments, **keywords)

    def restore(self, *which: int, **how: Any) -> Any:
        """Restore; the value is the step and this rank's train state."""
        found = self.optimizer.restore(*which, **how)
        self.num_steps = found.step if found else 0
        return found and [found.step, found.train_state]

    def backward(self, uses_all: bool = True, synced: bool = True) -> None:
        """Compute gradients from data that differ between the ranks."""
        generator = torch.Generator().manual_seed(1000 * (self.num_steps + 1) + self.rank)
        if self.setting.given:
            self._give_gradients()
            return
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(4, self.setting.widths[0], generator=generator).to(dtype)
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = synced
        elif self.setting.kind != "one":
            self.model.set_requires_gradient_sync(synced)
        loss = self.model(x, uses_all=uses_all).float().square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _give_gradients(self) -> None:
        """Set gradients that are the same for any number of ranks and any sharding."""
        generator = torch.Generator().manual_seed(self.num_steps + 1)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                else:
                    parameter.grad = whole

    def at(self, step: int) -> None:
        """Count as if so many steps had been taken, for the gradients that are given."""
        self.num_steps = step

    def reset_peak(self) -> None:
        """Begin to measure how much memory is needed."""
        self.before_bytes = resident_bytes("VmRSS")
        if not reset_peak():
            raise RuntimeError("the kernel does not reset the peak of memory")

    def grown(self) -> int:
        """Return by how many bytes memory has grown at most since `reset_peak`."""
        return resident_bytes("VmHWM") - self.before_bytes

    def fill_drive(self, free_bytes: int) -> None:
        """Let the drive have so little free space from now on."""

        def free(directory: str) -> int:
            del directory
            return free_bytes

        self.backend.free_bytes = free  # type: ignore[method-assign]

    def whole(self) -> dict[str, str]:
        """Return a digest of each parameter as a whole; with shards, all ranks call this."""
        found = {}
        for name, tensor in self.model.named_parameters():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            data = bits(whole.detach()).contiguous().numpy().tobytes()
            found[name.removeprefix("module.")] = hashlib.sha256(data).hexdigest()[:16]
        return found

    def update(self) -> None:
        """Call `step` with the gradients that there are."""
        optimizer = self.optimizer or self.masters
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        self.num_steps += 1
        self.model.zero_grad()

    def attempt(self) -> None:
        """Call `step` without any record of it, as it is expected to fail."""
        self.optimizer.step()

    def step(self, times: int = 1, **how: Any) -> str:
        """Take steps; the value is the bits afterwards."""
        for _ in range(times):
            self.backward(**how)
            self.update()
        return self.bits()

    def bits(self) -> str:
        """Return a digest of this rank's memory of all parameters."""
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(bits(local(parameter)).contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def checkpoint(self, **how: Any) -> None:
        """Begin a checkpoint, which has the step and the rank as its train state."""
        self.handle = self.optimizer.checkpoint(
            **{"train_state": {"step": self.num_steps, "rank": self.rank}, **how}
        )

    def bad_checkpoint(self, content: str = "object") -> None:
        """Ask for a checkpoint of which some content cannot be stored."""
        how: dict[str, Any] = {
            "object": {"train_state": {"what": object()}},
            "path": {"train_state": "a path"},
            "metric": {"metrics": {"loss": "a text"}},
            "warning": {"metrics": {"loss": float("nan")}},
        }[content]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.optimizer.checkpoint(**how)

    def settle(self) -> str:
        """Wait for everything in flight; the value is the error of the last seal."""
        try:
            self.optimizer.synchronize()
        except offload.SealError as error:
            return str(error)
        return ""

    def verify(self) -> list[str]:
        """Verify the newest checkpoint; the value is what is wrong with it."""
        with offload.open_checkpoint(self.directory) as checkpoint:
            return [str(problem) for problem in checkpoint.verify().problems]

    def sparse_gradient(self) -> None:
        """Give the parameters of this rank gradients that no step can apply."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse()

    def zero(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad()

    def load(self, kind: str) -> None:
        """Load a state dict: a ``reference`` to the present state, or one of ``torch``."""
        found = self.optimizer.state_dict()
        if kind == "torch":
            found = {"state": {}, "param_groups": found["param_groups"]}
        self.optimizer.load_state_dict(found)

    def result(self) -> int:
        """Wait for the checkpoint; the value is its step."""
        return int(self.handle.result().step)

    def train(self, last: int, every: int) -> None:
        """Train to a step, with checkpoints behind training, and note each that is durable."""
        while self.num_steps < last:
            self.step()
            self._note_sealed()
            if self.num_steps % every == 0:
                if self.handle is not None:
                    self.handle.wait()
                    self._note_sealed()
                self.checkpoint()

    def _note_sealed(self) -> None:
        if self.handle is not None and self.handle.done():
            record("sealed", value=self.handle.result().step)
            self.handle = None

    def fail(self, kind: str, text: str, number: int | None = None) -> None:
        """Let the next operation of a kind fail whose path contains a text."""
        self.backend.fail_if(lambda one, path: one == kind and text in path, number)

    def keep_error(self, name: str, *arguments: Any) -> str:
        """Make a call that fails; return the name of its error, and keep all that it refers to."""
        try:
            getattr(self, name)(*arguments)
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            self.errors.append(error)
            return type(error).__name__
        return ""

    def strict(self, name: str, *arguments: Any) -> Any:
        """Make a call in which each warning is an error, as with Python's ``-W error``."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return getattr(self, name)(*arguments)

    def open_files(self, text: str) -> list[str]:
        """Return the paths of the store's files that this process has open, if they have a text."""
        return [path for path in open_below(self.directory) if text in path]

    def num_failed(self) -> int:
        """Return how many operations have failed."""
        return self.backend.num_failed

    def kill_at(self, kind: str, text: str, nth: int = 1) -> None:
        """Kill this rank before the n-th operation of a kind whose path contains a text."""
        seen = 0

        def chosen(one: str, path: str) -> bool:
            nonlocal seen
            seen += one == kind and text in path
            if seen == nth:
                self.hurry()
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        self.backend.fail_if(chosen)

    def hurry(self) -> None:
        """Say that from now on ranks only wait for one that does not come."""
        flag(self.directory.parent).touch()

    def say_pid(self) -> None:
        """Tell the other ranks the process of this one, and wait until all have done so."""
        folder = self.directory.parent
        (folder / f"pid-{self.rank}").write_text(str(os.getpid()))
        dist.barrier()

    def at_step(self, label: str, action: str, victims: Sequence[int] = ()) -> None:
        """Kill ranks, or stop this one, before a step of the protocol that this rank takes.

        Args:
            label: Label of the step, see `ProtocolSteps`; empty to do nothing.
            action: ``kill`` or ``stop``.
            victims: Ranks to kill, which have called `say_pid`.
        """
        folder = self.directory.parent
        self._steps = ProtocolSteps(self.backend, folder, lambda: self.call)

        def act() -> None:
            self.hurry()
            if action == "kill":
                kill(folder, victims)
            else:
                # To this thread: a signal for the process may come after the step.
                signal.pthread_kill(get_ident(), signal.SIGSTOP)

        self._steps.before(label, act)

    def steps_seen(self) -> list[str]:
        """Return the labels of the steps of the protocol since `at_step`."""
        assert self._steps is not None
        return self._steps.seen

    def write_values(self, name: str) -> None:
        """Write the model's present values with the safetensors library, on rank 0."""
        values = {}
        with torch.no_grad():
            for key, value in self.model.state_dict().items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                values[key.removeprefix("module.")] = full.detach().contiguous().clone()
        if self.rank == 0:
            save_file(values, self.directory.parent / name)

    def pin(self, *arguments: Any) -> None:
        """Pin a checkpoint."""
        self.optimizer.pin(*arguments)

    def unpin(self, name: str) -> None:
        """Remove a pin."""
        self.optimizer.unpin(name)

    def set(self, **hyper: Any) -> None:
        """Change hyper-parameters."""
        for group in self.optimizer.param_groups:
            group.update(hyper)

    def scale(self, ours: bool) -> None:
        """Use a gradient scaler from now on: torch's, or offload's own."""
        made = offload.GradScaler if ours else torch.amp.GradScaler
        self.scaler = made("cpu", init_scale=2.0**8, growth_interval=100)

    def infinite(self) -> None:
        """Make one gradient of this rank's memory infinite."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        next(local(g) for g in gradients if local(g).numel()).view(-1)[0] = float("inf")

    def freeze(self) -> None:
        """Train the first layer no more."""
        for parameter in self.model.module.layers[0].parameters():
            parameter.requires_grad_(False)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def await_file(self, name: str) -> None:
        """Wait until a file is beside the store."""
        while not (self.directory.parent / name).exists():
            time.sleep(0.01)

    def touch(self, name: str) -> None:
        """Make a file beside the store."""
        (self.directory.parent / name).touch()

    def synchronize(self) -> None:
        """Wait for everything in flight."""
        self.optimizer.synchronize()

    def close(self) -> None:
        """Close the optimizer."""
        self.optimizer.close()

    def compare(self, training: str) -> list[Any]:
        """Do a training in memory and with its state on storage; the value is the differences."""
        from tests.ranks_training.trainings import compare_here

        return compare_here(training, self.directory.parent)

    def scene(self, name: str) -> None:
        """Play a scene."""
        from tests.ranks_training import scenes

        getattr(scenes, name)(self.directory.parent, name)

    def destroy(self) -> None:
        """Leave the ranks of torch."""
        dist.destroy_process_group()

    def kill(self) -> None:
        """End by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """End with an exception."""
        raise SystemExit("this rank was told to fail")


_record: Callable[[dict[str, Any]], None]


def record(call: str, *, value: Any = None, **more: Any) -> None:
    """Append an outcome to this rank's file."""
    _record({"call": call, "value": value, "error": "", "message": "", **more})


def record_into(folder: Path) -> None:
    """Record the outcomes of this rank in a file of its own."""
    global _record
    file = os.open(f"{folder}/outcomes-{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    _record = lambda outcome: os.write(file, (json.dumps(outcome) + "\n").encode())  # noqa: E731


def run_calls(
    folder: Path, rank: int, size: int, calls: Sequence[Sequence[Any]], setting: dict[str, Any]
) -> None:
    """Make the calls of a rank, and record what came of each."""
    record_into(folder)
    torch.use_deterministic_algorithms(mode=True)
    made_setting = Setting(**setting)
    if made_setting.store_port:
        port = str(made_setting.store_port)
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    if size > 1:
        limit = timedelta(seconds=made_setting.group_timeout_s)
        dist.init_process_group("gloo", timeout=limit)
    hurry_after(flag(folder), made_setting.timeout_s)
    made = Calls(folder, rank, size, made_setting)
    for name, *arguments in calls:
        keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        made.call = name
        started = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = getattr(made, name)(*arguments, **keywords)
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                outcome = {"error": type(error).__name__, "message": str(error)}
            else:
                outcome = {"value": found}
        said = [str(one.message) for one in caught]
        seconds = time.monotonic() - started
        record(name, **outcome, warnings=said, seconds=seconds)


def warm_up() -> None:
    """Import what ranks need, before they are forked."""
    import torch.distributed.tensor  # noqa: F401

    from offload.distributed import launch  # noqa: F401
    from offload.distributed.agreement import torch_channel  # noqa: F401
    from tests.stores.training import Reference

    Reference().after(1)
