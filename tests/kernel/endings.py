"""Programs that end, or fork, in every way that a training script might.

    python -m tests.kernel.endings      # serves children, as tests.forking says

A child reads ``overlap`` in its directory: what its optimizer's `Options(overlap=...)` is to be.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from offload import AdamW, SealHandle
from tests.crash.children import GatedBackend
from tests.forking import serve
from tests.stores.training import Model, backward, optimizer_for, options, train

ALIVE_S = 0.05
"""Seconds for which a gate stays closed: not measured, only long enough to be in the way."""


def ends_at_once(directory: str) -> None:
    """End after `checkpoint`, with nobody who waits."""
    _asked(directory)


def ends_by_an_error(directory: str) -> None:
    """The same, by an error that nobody catches."""
    _asked(directory)
    raise RuntimeError("the training script has a bug")


def trains_on_a_thread_that_exits(directory: str) -> None:
    """The same, on a thread that calls `sys.exit`: only the thread ends by that."""

    def work() -> None:
        _asked(directory)
        sys.exit(3)

    threading.Thread(target=work).start()


def trains_on_a_daemon_thread(directory: str) -> None:
    """End while a daemon thread is training and sealing."""
    model, optimizer = _trained(directory)
    optimizer.checkpoint({"step": 2}).result()
    stepping = threading.Event()

    def work() -> None:
        step = 2
        while True:
            step += 1
            backward(model, step)
            optimizer.step()
            optimizer.checkpoint({"step": step})
            stepping.set()

    threading.Thread(target=work, daemon=True).start()
    stepping.wait()


def interrupted_while_sealing(directory: str) -> None:
    """Ctrl-C in `result`, which nobody catches."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    backend = _gated(directory)
    _, _, handle = _asked(directory, backend)

    def interrupt() -> None:
        backend.reached.wait()
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(ALIVE_S, backend.gate.set).start()

    threading.Thread(target=interrupt).start()
    handle.result()


def interrupted_and_closed(directory: str) -> None:
    """Ctrl-C in `result`, which the program catches in order to close."""
    try:
        interrupted_while_sealing(directory)
    except KeyboardInterrupt:
        print("interrupted")
    _kept[-1].close()
    print("closed")


def closed_in_an_exit_handler(directory: str) -> None:
    """Close when the program ends, as many scripts do; the handler is older than the optimizer."""
    made: list[AdamW] = []
    atexit.register(lambda: [one.close() for one in made] and print("closed"))
    _, optimizer, _ = _asked(directory)
    made.append(optimizer)


def dropped(directory: str) -> None:
    """Drop everything with a seal in flight, and open the store again."""
    gc.disable()  # else another thread may be the one that finds it, and lets go a little later
    _, optimizer, handle = _asked(directory)
    _kept.clear()
    del optimizer, handle
    gc.collect()
    _print_what_is_there(directory)


def garbage_when_the_interpreter_ends(directory: str) -> None:
    """Leave the optimizer in a cycle, for the last collection of all."""
    gc.disable()
    _, optimizer, _ = _asked(directory)
    _kept.clear()
    cycle: dict[str, Any] = {"optimizer": optimizer}
    cycle["cycle"] = cycle


def workers_that_end(directory: str) -> None:
    """Fork workers while a seal, and a step, may be in progress; each ends in another way."""
    model, optimizer, handle = _asked(directory)
    backward(model, 3)
    optimizer.step()
    later = optimizer.checkpoint({"step": 3})
    pids = []
    for end in (sys.exit, lambda: os._exit(0), gc.collect, optimizer.close, _close_all):
        if (pid := os.fork()) == 0:
            signal.alarm(150)  # hanging would be the end of it
            end()
            del model, optimizer, handle, later
            sys.exit()
        pids.append(pid)
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        print(f"worker: {os.waitstatus_to_exitcode(status)}")
    print(later.result().step)
    _go_on(model, optimizer, 4)


def a_forked_process_steps(directory: str) -> None:
    """Call `step` in a process of `multiprocessing`, which inherits the optimizer."""
    model, optimizer, handle = _asked(directory)
    handle.result()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_try_everything, args=(model, optimizer, answers))
    process.start()
    process.join()
    print(f"worker: {process.exitcode}")
    while not answers.empty():
        print(answers.get())
    _go_on(model, optimizer, 3)


def data_loaders_with_workers(directory: str) -> None:
    """Feed training by forked workers, new ones in each epoch."""
    warnings.simplefilter("ignore")
    model, optimizer, _ = _asked(directory)
    step = 2
    for _ in range(2):
        loader = DataLoader(
            _Numbers(),
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=False,
            timeout=120,
        )
        for _ in loader:
            step += 1
            backward(model, step)
            optimizer.step()
            optimizer.checkpoint({"step": step})
    _go_on(model, optimizer, step + 1)


def pickled(directory: str) -> None:
    """Send an optimizer, and what belongs to it, to a new process."""
    model, optimizer, handle = _asked(directory)
    handle.result()
    context = multiprocessing.get_context("spawn")
    for name, thing in (("optimizer", optimizer), ("handle", handle)):
        try:
            context.Process(target=print, args=(thing,)).start()
        except Exception as error:  # noqa: BLE001  (any is the answer)
            print(f"{name}: {type(error).__name__}: {error}")
    _go_on(model, optimizer, 3)


_kept: list[AdamW] = []
"""Keeps optimizers alive to the end, as the globals of a script do."""


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def _overlap(directory: str) -> Literal["forward"] | None:
    return json.loads(Path(directory, "overlap").read_text())


def _gated(directory: str) -> GatedBackend:
    return GatedBackend()


def _trained(directory: str, backend: GatedBackend | None = None) -> tuple[Model, AdamW]:
    """Take two steps."""
    model = Model()
    settings = options(backend, overlap=_overlap(directory))
    optimizer = optimizer_for(model, f"{directory}/run", settings)
    _kept.append(optimizer)
    train(model, optimizer, 1, 2, seal=False)
    return model, optimizer


def _asked(directory: str, backend: GatedBackend | None = None) -> tuple[Model, AdamW, SealHandle]:
    """Take two steps, and ask for a checkpoint."""
    model, optimizer = _trained(directory, backend)
    return model, optimizer, optimizer.checkpoint({"step": 2})


def _go_on(model: Model, optimizer: AdamW, step: int) -> None:
    backward(model, step)
    optimizer.step()
    print(f"went on to {optimizer.checkpoint({'step': step}).result().step}")
    optimizer.close()


def _close_all() -> None:
    for optimizer in _kept:
        optimizer.close()


def _try_everything(model: Model, optimizer: AdamW, answers: Any) -> None:
    calls: tuple[Callable[[], object], ...] = (
        optimizer.step,
        optimizer.checkpoint,
        optimizer.restore,
        optimizer.synchronize,
    )
    backward(model, 3)
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001  (any is the answer)
            answers.put(f"{call.__name__}: {type(error).__name__}: {error}")


def _print_what_is_there(directory: str) -> None:
    settings = options(overlap=_overlap(directory))
    with optimizer_for(Model(), f"{directory}/run", settings) as optimizer:
        found = optimizer.restore()
        print(found.step if found else None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(globals())
