"""Calls of the public interface that a rank of a job makes, one after the other.

A call that fails is recorded with its error, and the rank goes on with the next one. So a test can
say what each rank does, and look at what each call did there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import offload
from gds import PosixBackend
from offload import DriveTuning, Options
from offload.distributed import node
from tests.crash.fault_backend import FaultBackend
from tests.hurry import flag, hurry_after
from tests.numerics.reference import bits
from tests.ranks_training.faulty_calls import FaultyCalls
from tests.ranks_training.host_backend import HostBackend
from tests.ranks_training.models import Masters, Model, Setting, local, make_model, set_gradients

__all__ = ["Calls", "Model", "Setting"]

_this_node = node.this_node


class Calls(FaultyCalls):
    """The calls, with what they work on."""

    def __init__(self, folder: Path, rank: int, size: int, setting: Setting) -> None:
        self.folder = folder
        self.rank, self.size, self.job_setting = rank, size, setting
        self.optimizer: Any = None
        self._begin(folder, setting)

    def begin(self, name: str, **changes: Any) -> None:
        """Begin another case when all ranks are here: in a folder of its own, with a new model."""
        self._wait_for_all()
        if self.optimizer is not None:
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.optimizer.close()
            self.optimizer = None
        (self.folder / name).mkdir(exist_ok=True)
        setting = replace(self.job_setting, options=dict(self.job_setting.options))
        self._begin(self.folder / name, replace(setting, **changes))
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        if self.size > 1:
            dist.barrier()

    def _begin(self, folder: Path, setting: Setting) -> None:
        node.this_node = _this_node
        self.directory, self.setting = folder / "run", setting
        self.num_steps = 0
        self.backend = FaultBackend(PosixBackend())
        self.model = make_model(setting, self.size) if setting.kind else None
        self.masters: Masters | None = None
        self.handle: Any = None
        self.call = ""
        """Name of the call that is being made."""
        self.errors: list[Exception] = []
        """Errors that are kept."""

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
            self.masters = Masters("AdamW", [{"params": [*self.model.parameters()]}], setting.hyper)
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

    def encode_anew(self) -> None:
        """Restore 8-bit state into a cut that may divide its blocks."""
        self.optimizer.restore(reencode=True)

    def backward(self) -> None:
        """Compute gradients from data that differ between the ranks."""
        generator = torch.Generator().manual_seed(1000 * (self.num_steps + 1) + self.rank)
        if self.setting.given:
            set_gradients(self.model, self.num_steps + 1)
            return
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(4, self.setting.widths[0], generator=generator).to(dtype)
        self.model(x).float().square().mean().backward()

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
        optimizer.step()
        self.num_steps += 1
        self.model.zero_grad()

    def attempt(self) -> None:
        """Call `step` without any record of it, as it is expected to fail."""
        self.optimizer.step()

    def step(self, times: int = 1) -> str:
        """Take steps; the value is the bits afterwards."""
        for _ in range(times):
            self.backward()
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

    def destroy(self) -> None:
        """Leave the ranks of torch."""
        dist.destroy_process_group()


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

    from offload.distributed import rank_group  # noqa: F401
    from offload.distributed.agreement import torch_channel  # noqa: F401
    from tests.stores.training import Reference

    Reference().after(1)
