"""What child processes of the crash tests do; see `tests.forking`."""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from gds import Buffer, IOFuture, PosixBackend, WrapperBackend
from gds.backends.threads import TransferPool
from gds.backends.wrapper import WrapperFile
from gds.contract import File
from offload import AdamW
from tests.dying import live_on
from tests.forking import serve
from tests.stores.training import ARRAYS, Model, backward, optimizer_for, options, train


class GatedBackend(WrapperBackend):
    """Holds up writes of a seal to ``model.safetensors`` until `gate` is set."""

    def __init__(self) -> None:
        super().__init__(PosixBackend())
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.on_write: Callable[[], object] = lambda: None
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
            self._backend.on_write()
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


def hold_the_store(directory: str) -> None:
    """Open the store, say so, and wait to be killed."""
    _, optimizer = trained(directory)
    optimizer.checkpoint().result()
    _announce(directory, "held")
    signal.pause()


def hold_the_store_and_fork(directory: str) -> None:
    """The same, with a worker as a data loader has: it lives on and must not keep the lock."""
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


def collected_on_the_seals_thread(directory: str) -> None:
    """An optimizer in a reference cycle is collected by whichever thread allocates next."""
    backend = GatedBackend()
    backend.gate.set()
    dropped = threading.Event()
    backend.on_write = lambda: (dropped.wait(), gc.collect())
    model, optimizer = trained(directory, backend)
    gc.collect()
    gc.disable()  # only there, and only then
    handle = optimizer.checkpoint({"step": 2})
    holder = {"optimizer": optimizer}
    holder["holder"] = holder  # type: ignore[assignment]
    del model, optimizer, holder
    dropped.set()
    print(handle.result().step)


def end_while_stepping(directory: str) -> None:
    """End with a step beside the model in progress, and a checkpoint behind it."""
    _held_amid_a_step(directory).set()


def killed_while_stepping(directory: str) -> None:
    """Be killed there."""
    _held_amid_a_step(directory)
    os.kill(os.getpid(), signal.SIGKILL)


def fork_while_stepping(directory: str) -> None:
    """Use the model in a forked child, for which the step never ends."""
    let_go = _held_amid_a_step(directory)
    pid = os.fork()
    if pid == 0:
        try:
            _kept[0].state_dict()
        except Exception as error:  # noqa: BLE001  (any is the answer)
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    let_go.set()


_kept: list[Model] = []


def _held_amid_a_step(directory: str) -> threading.Event:
    backend = GatedBackend()
    backend.gate.set()
    model, optimizer = trained(directory, backend, overlap="forward")
    optimizer.checkpoint({"step": 2}).result()
    let_go, stepping = threading.Event(), threading.Event()

    def hold() -> None:
        stepping.set()
        let_go.wait()

    backend.on_state_write = hold
    backward(model, 3)
    optimizer.step()
    handle = optimizer.checkpoint({"step": 3})
    stepping.wait()
    assert not handle.done()
    _kept.append(model)
    atexit.register(lambda: optimizer)  # it lives as long as the program
    return let_go


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


def close_with_one_thread_for_all_transfers(directory: str) -> None:
    """Close while the thread of all transfers, in the callback of a write, has a read behind it."""
    backend = OneThreadBackend()
    model = Model()
    optimizer = optimizer_for(model, f"{directory}/run", options(backend))
    train(model, optimizer, 1, 2, seal=False)
    optimizer.synchronize()
    backward(model, 3)
    # The last write of the step waits until it is being closed, and so do the reads behind it.
    backend.hold_write = backend.num_writes + 2 * len(ARRAYS)
    optimizer.step()
    backend.held.wait()
    threading.Timer(0.2, backend.gate.set).start()
    optimizer.close()
    print("closed")


class OneThreadBackend(WrapperBackend):
    """Does one transfer after the other, whether it reads or writes."""

    def __init__(self) -> None:
        super().__init__(PosixBackend())
        self.pool = TransferPool("one", 1)
        self.num_writes = 0
        self.hold_write = -1
        self.held = threading.Event()
        self.gate = threading.Event()

    def wrap_file(self, file: File) -> File:
        return _OneThreadFile(file, self)

    def transfer(self, start: Callable[[], IOFuture], *, hold: bool = False) -> IOFuture:
        def run() -> int:
            if hold:
                self.held.set()
                self.gate.wait()
            return start().result()

        return self.pool.submit(run)


class _OneThreadFile(WrapperFile):
    def __init__(self, inner: File, backend: OneThreadBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self._backend.transfer(lambda: self.inner.read(into, offset))

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self._backend.num_writes += 1
        hold = self._backend.num_writes == self._backend.hold_write
        return self._backend.transfer(lambda: self.inner.write(source, offset), hold=hold)


def _announce(directory: str, text: str) -> None:
    Path(f"{directory}/announcements").write_text(text)  # a fifo: waits for its reader


if __name__ == "__main__":
    serve(globals())
