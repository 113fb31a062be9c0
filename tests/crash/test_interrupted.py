"""Ctrl-C at any moment of a step, a seal, a restore or a close: nothing waits for ever behind it.

The interrupt is raised at once, by the call that it hits. It is not kept for a later call, which
would blame a drive that has done nothing wrong. `restore()` goes on to the same bits, and `close`
can be called again.

Python runs handlers of signals between two steps of its code, also while a lock is being acquired
or released; `tests.fuzz.interrupts` raises at those moments. One in `STRIDE` of them is tried:
``INTERRUPT_STRIDE=1`` tries all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gds import PosixBackend
from offload import AdamW, OffloadError, open_checkpoint
from tests.campaigns import FULL
from tests.crash.seal_gates import Turnstile, held_checkpoint, started, turnstile, waits
from tests.eventually import TIMEOUT_S, eventually
from tests.fuzz.interrupts import interrupted
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    take_step,
    train,
)

__all__ = ["turnstile"]

STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "211" if FULL else "1501"))


def in_time(action: Callable[[], object]) -> None:
    """Run something that must not hang, and raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        where = traceback.format_stack(sys._current_frames()[thread.ident or 0])
        pytest.fail("it hangs: " + "".join(where))
    for error in errors:
        raise error


def steps_and_seal(model: Model, optimizer: AdamW, first: int) -> None:
    take_step(model, optimizer, first)
    optimizer.checkpoint()
    take_step(model, optimizer, first + 1)
    optimizer.synchronize()


def seals(_: Model, optimizer: AdamW, __: int) -> None:
    optimizer.checkpoint()


def restores(_: Model, optimizer: AdamW, __: int) -> None:
    optimizer.restore()
    optimizer.synchronize()


def closes(_: Model, optimizer: AdamW, __: int) -> None:
    optimizer.close()


@pytest.mark.parametrize(
    ("action", "overlap", "resident"),
    [
        (steps_and_seal, None, 0),
        (steps_and_seal, None, 20_000),
        (steps_and_seal, "forward", 0),
        (steps_and_seal, "backward", 0),
        (seals, None, 20_000),
        (restores, None, 0),
        (restores, "forward", 20_000),
        (closes, None, 0),
        (closes, "forward", 0),
    ],
)
def test_nothing_waits_for_ever_behind_an_interrupt(
    tmp_path: Path,
    overlap: Any,
    resident: int,
    action: Callable[[Model, AdamW, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swallowed: list[BaseException | None] = []  # where a generator is let go of
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: swallowed.append(raised.exc_value))
    num_interrupted = 0
    backend = PosixBackend(direct=False)
    settings = options(backend, overlap=overlap, host_memory=resident)
    stride = max(STRIDE // {steps_and_seal: 1, seals: 15}.get(action, 5), 1)
    for at in itertools.count(1 + stride // 3, stride):
        store = f"{tmp_path}/{at}"
        model = Model()
        optimizer = optimizer_for(model, store, settings, keep=2)
        steps_and_seal(model, optimizer, 1)
        try:
            with interrupted(at) as fired:
                action(model, optimizer, 3)
        except KeyboardInterrupt:
            num_interrupted += 1
        if not fired:
            in_time(optimizer.close)
            break

        def goes_on(model: Model = model, optimizer: AdamW = optimizer, store: str = store) -> None:
            if action is closes:
                with contextlib.suppress(KeyboardInterrupt):
                    optimizer.close()
                optimizer.close()
                with pytest.raises(OffloadError, match="closed"):
                    optimizer.step()
                optimizer = optimizer_for(model, store, settings, keep=2)  # the store is free
            said = ""
            try:
                optimizer.synchronize()  # what came beside the model is raised here
            except (OffloadError, KeyboardInterrupt) as error:
                said = str(error)
            assert "a transfer of state failed" not in said, "no drive has failed"
            if action is seals:  # the next step must not wait for one that nobody makes
                train(model, optimizer, optimizer.num_steps + 1, seal=False)
            found = optimizer.restore()
            assert found is not None
            steps_and_seal(model, optimizer, found.step + 1)
            optimizer.close()
            with open_checkpoint(f"{store}/step-{found.step + 1:08d}", backend=backend) as sealed:
                after = Reference().after(found.step + 1)
                assert differences(sealed, backend, after) == [], (store, found.step)

        in_time(goes_on)
    assert all(isinstance(error, KeyboardInterrupt) for error in swallowed)
    assert num_interrupted > (5 if FULL else 0)
    backend.close()


@pytest.mark.parametrize("call", ["synchronize", "close"])
def test_an_interrupted_wait_leaves_the_seal_in_flight(
    call: str, backend: Turnstile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by a signal, while the call waits."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model, optimizer = started(backend, keep=3)
        handle = held_checkpoint(backend, optimizer)
        main = threading.get_ident()

        def press() -> None:
            assert eventually(lambda: waits(main))
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            getattr(optimizer, call)()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert not handle.done()
    backend.open_for_all()
    assert handle.result(60).step == 1
    if call == "synchronize":
        for number in (2, 3, 4):
            model.fill_gradients(number)
            optimizer.step()
            optimizer.checkpoint().result(60)
    optimizer.close()
    with open_checkpoint("/run", backend=backend) as found:
        assert found.verify().ok
        assert found.step == (4 if call == "synchronize" else 1)
