"""Ctrl-C at each moment of a step, a seal and a restore, on real threads: nothing waits for ever.

Python runs handlers of signals between two steps of its code, also while a lock is being acquired
or released; `tests.fuzz.interrupts` raises at those moments. A lock that an interrupted call has
left locked would stop the threads that move the state, and with them every call that waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gds import PosixBackend
from offload import AdamW, open_checkpoint
from offload.errors import OffloadError
from tests.eventually import TIMEOUT_S
from tests.fuzz.interrupts import interrupted
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    train,
)

STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "211"))
"""One of so many moments is tried; 1 tries all."""


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


def steps_and_seal(model: Model, optimizer: AdamW, first: int, *, seal: bool = True) -> None:
    for step in (first, first + 1):
        backward(model, step)
        optimizer.step()
        if seal and step == first:
            optimizer.checkpoint()
    optimizer.synchronize()


def restores(_: Model, optimizer: AdamW, __: int) -> None:
    optimizer.restore()
    optimizer.synchronize()


def lets_go_of_its_slot(_: Model, optimizer: AdamW, __: int) -> None:
    """As the first part of a restore does."""
    optimizer._engine.state.lifecycle.broken = "something failed"
    optimizer._engine.state.slots.forget()


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
@pytest.mark.parametrize("action", [steps_and_seal, restores, lets_go_of_its_slot])
def test_nothing_waits_for_ever_behind_an_interrupt(
    tmp_path: Path,
    overlap: Any,
    action: Callable[[Model, AdamW, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swallowed: list[BaseException | None] = []  # where a generator is let go of
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: swallowed.append(raised.exc_value))
    num_interrupted = 0
    backend = PosixBackend(direct=False)
    settings = options(backend, overlap=overlap)
    for at in itertools.count(1, 1 if action is lets_go_of_its_slot else STRIDE):
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
            optimizer.close()
            break

        def goes_on(model: Model = model, optimizer: AdamW = optimizer, store: str = store) -> None:
            with contextlib.suppress(OffloadError, KeyboardInterrupt):
                optimizer.synchronize()  # what came beside the model is raised here
            found = optimizer.restore()
            assert found is not None
            steps_and_seal(model, optimizer, found.step + 1)
            optimizer.close()
            with open_checkpoint(f"{store}/step-{found.step + 1:08d}", backend=backend) as sealed:
                after = Reference().after(found.step + 1)
                assert differences(sealed, backend, after) == [], (store, found.step)

        in_time(goes_on)
    assert all(isinstance(error, KeyboardInterrupt) for error in swallowed)
    assert num_interrupted > 5
    backend.close()


@pytest.mark.parametrize("resident", [0, 20_000], ids=["", "resident"])
def test_a_seal_that_was_interrupted_while_it_began_is_begun_or_not(
    tmp_path: Path, resident: int
) -> None:
    """Else the next step would wait for one that nobody makes."""
    num_sealed, backend = 0, PosixBackend(direct=False)
    for at in itertools.count(1):
        store, model = f"{tmp_path}/{at}", Model()
        optimizer = optimizer_for(model, store, options(backend, host_memory=resident), keep=2)
        state = optimizer._engine.state
        begin_seal, has_fired = state.begin_seal, list[int]()

        def begin(
            *given: Any,
            at: int = at,
            begin_seal: Callable[..., Any] = begin_seal,
            has_fired: list[int] = has_fired,
        ) -> Any:
            with interrupted(at) as fired:
                try:
                    return begin_seal(*given)
                finally:
                    has_fired += fired

        backward(model, 1)
        optimizer.step()
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(state, "begin_seal", begin)
            optimizer.checkpoint()

        def goes_on(model: Model = model, optimizer: AdamW = optimizer) -> None:
            train(model, optimizer, 2, 3, seal=False)
            optimizer.checkpoint().result()
            optimizer.close()

        in_time(goes_on)
        num_sealed += Path(f"{store}/step-00000001").exists()
        with open_checkpoint(f"{store}/step-00000003", backend=backend) as sealed:
            assert differences(sealed, backend, Reference().after(3)) == []
        if not has_fired:
            break
    assert 1 <= num_sealed < at - 10
    backend.close()
