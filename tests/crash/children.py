"""What child processes of the crash tests do; see `tests.forking`."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from gds import Buffer, IOFuture, PosixBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File
from offload import AdamW, DriveTuning
from tests.dying import live_on
from tests.forking import serve
from tests.stores.training import ARRAYS, Model, backward, optimizer_for, options, train

PLAN = "beside.json"
"""What is to be done: ``keep`` and ``drives``."""

STOP = "stop"
"""The name of a file: as soon as it is there the child ends."""

STARTED = "started"
"""The name of a file: there are checkpoints to look at."""


class GatedBackend(WrapperBackend):
    """Holds up writes of a seal to ``model.safetensors`` until `gate` is set."""

    def __init__(self) -> None:
        super().__init__(PosixBackend())
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.on_state_write: Callable[[], int | None] = lambda: None
        """Returns the number of a process to send SIGUSR1 to, once."""

    def wrap_file(self, file: File) -> File:
        return _GatedFile(file, self)


class _GatedFile(WrapperFile):
    def __init__(self, inner: File, backend: GatedBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self.path.endswith("model.safetensors"):
            self._backend.reached.set()
            self._backend.gate.wait()
        elif pid := self._backend.on_state_write():
            self._backend.on_state_write = lambda: None
            os.kill(pid, signal.SIGUSR1)
        return super().write(source, offset)


def trained(
    directory: str, backend: GatedBackend | None = None, **changes: object
) -> tuple[Model, AdamW]:
    """Take two steps."""
    model = Model()
    settings = options(backend, **changes)
    optimizer = optimizer_for(model, f"{directory}/run", settings)
    train(model, optimizer, 1, 2, seal=False)
    return model, optimizer


def refused(directory: str) -> None:
    """Print the error that opening the store gives, if any."""
    try:
        optimizer_for(Model(), f"{directory}/run", options())
    except Exception as error:  # noqa: BLE001  (any is the answer)
        print(f"{type(error).__name__}: {error}")
    else:
        print("opened")


def hold_the_store_and_fork(directory: str) -> None:
    """Open the store, say so by a worker as a data loader has, and wait to be killed.

    The worker lives on, and must not keep the lock.
    """
    _, optimizer = trained(directory)
    optimizer.checkpoint().result()
    ready, told = os.pipe()
    server = os.pidfd_open(os.getppid())
    if os.fork() == 0:
        live_on()
        _announce(directory, str(os.getpid()))
        os.write(told, b".")
        select.select([server], [], [])  # it may outlive its parent, but not the tests
        return
    os.read(ready, 1)
    signal.pause()


def checkpoint_in_an_exit_handler(directory: str) -> None:
    """Save when the program ends, as many scripts do."""
    _, optimizer = trained(directory)

    def save() -> None:
        try:
            print(optimizer.checkpoint({"step": 2}).result().step)
        except Exception as error:  # noqa: BLE001  (any is the answer)
            print(f"{type(error).__name__}: {error}")

    atexit.register(save)


def end_amid_a_backward(directory: str) -> None:
    """End by an error in a backward that has stepped half of the state."""
    model, _optimizer = trained(directory, overlap="backward")
    _optimizer.checkpoint({"step": 2}).result()

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("the training script has a bug")

    model.norm.weight.register_hook(fail)
    backward(model, 3)


def called_within_a_step(directory: str) -> None:
    """Save, when told that the machine is wanted back: between two chunks of a step."""
    backend = GatedBackend()
    backend.gate.set()
    model, optimizer = trained(directory, backend)
    optimizer.checkpoint().result()

    def handler(*_: object) -> None:
        for call in (optimizer.checkpoint, optimizer.restore, optimizer.step, optimizer.close):
            try:
                print(f"{call.__name__}: {call()}")
            except Exception as error:  # noqa: BLE001  (any is the answer)
                print(f"{call.__name__}: {type(error).__name__}: {error}")

    signal.signal(signal.SIGUSR1, handler)
    backward(model, 3)
    optimizer.step()
    backward(model, 4)
    writes = iter([None] * len(ARRAYS))  # those of the first chunk
    backend.on_state_write = lambda: next(writes, os.getpid())
    optimizer.step()
    backend.on_state_write = lambda: None
    optimizer.checkpoint().result()
    optimizer.close()


def store_of(directory: str, drives: int) -> list[str]:
    """Return the directories of the store."""
    return [f"{directory}/run{number}" for number in range(drives)]


def train_until_told(directory: str) -> None:
    """Seal each step; the first one is pinned, and stays."""
    plan = json.loads(Path(directory, PLAN).read_text())
    model = Model()
    drives = plan["drives"]
    tuning = DriveTuning(shares=(1,) * drives, direct=False, calibrate=False)
    settings = options(None, drives=tuning, reader_timeout_s=60.0)
    with optimizer_for(
        model, store_of(directory, drives), settings, keep=plan["keep"]
    ) as optimizer:
        for step in itertools.count(1):
            backward(model, step)
            optimizer.step()
            optimizer.checkpoint({"step": step}).result()
            if step == 1:
                optimizer.pin("first")
            if step == 3:
                Path(directory, STARTED).touch()
            if os.path.exists(f"{directory}/{STOP}"):
                break
    print(json.dumps({"steps": step}))


def _announce(directory: str, text: str) -> None:
    Path(f"{directory}/announcements").write_text(text)  # a fifo: waits for its reader


if __name__ == "__main__":
    serve(globals())
