"""Steps of which no checkpoint was made are reported when an optimizer is closed.

They are not refused, as there are runs without checkpoints, but said.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from gds import MemoryBackend
from tests.eventually import eventually, is_freed
from tests.stores.small import make_model, make_optimizer, memory_store, step
from tests.threads import one_thread

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

STORE = "/run-that-is-closed"
"""Optimizers that other tests have dropped may be collected now, and say the same of theirs."""

NEWEST = f"the newest checkpoint is {STORE}/step-00000002"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if STORE in message]


@pytest.mark.parametrize(
    ("how", "overlap"),
    [("close", None), ("with", None), ("drop", None), ("close", "forward"), ("drop", "backward")],
)
def test_without_any_checkpoint(how: str, overlap: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, settings = make_model(), {"overlap": overlap}
    optimizer = make_optimizer(model, MemoryBackend(), directory=STORE, settings=settings)
    for _ in range(2):
        model(torch.zeros(1, 30, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    if how == "close":
        optimizer.close()
        optimizer.close()
    elif how == "with":
        with optimizer:
            pass
    else:
        gone = weakref.ref(optimizer)
        del optimizer
        assert is_freed(gone)
        eventually(lambda: said(caplog))  # on another thread, if that has collected it
    lost = "2 optimizer steps are lost: no checkpoint() was made after them; the store has none"
    assert said(caplog) == [f"{STORE}: {lost}"]


@pytest.mark.parametrize(
    ("num_later", "overlap"), [(0, None), (1, "forward"), (2, None), (2, "backward")]
)
def test_after_a_checkpoint(num_later: int, overlap: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, settings = make_model(), {"overlap": overlap}
    with make_optimizer(model, MemoryBackend(), directory=STORE, settings=settings) as optimizer:
        for number in range(2 + num_later):
            model(torch.zeros(1, 30, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            if number < 2:
                optimizer.checkpoint()  # without later steps it ends within close()
    steps, them = ("step is", "it") if num_later == 1 else ("steps are", "them")
    lost = f"{num_later} optimizer {steps} lost: no checkpoint() was made after {them}; {NEWEST}"
    assert said(caplog) == ([f"{STORE}: {lost}"] if num_later else [])


def test_after_a_restore(caplog: pytest.LogCaptureFixture) -> None:
    model, backend = make_model(), memory_store(2, directory=STORE)
    with make_optimizer(model, backend, directory=STORE) as optimizer:
        optimizer.restore()
        step(optimizer)
        optimizer.restore()
    assert not said(caplog), "there was no step, but one that restore() has given up"
    with make_optimizer(model, backend, directory=STORE) as optimizer:
        optimizer.restore()
        step(optimizer)
    (lost,) = said(caplog)
    assert "1 optimizer step is lost" in lost
    assert lost.endswith(NEWEST)
