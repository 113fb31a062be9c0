"""A checkpoint has the values of the moment of `checkpoint()`, whatever happens to the model then.

Or it fails, and says which parameter was changed. Here the seal is held up in the middle of the
model file while the model is edited, converted or rebuilt.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload import AdamW, SealError, list_checkpoints, load_parameters
from tests.crash.seal_gates import (
    STORE,
    Kinds,
    Rows,
    Turnstile,
    copies,
    goes_on,
    held_checkpoint,
    is_waiting,
    started,
    turnstile,
)
from tests.eventually import eventually
from tests.stores.training import HYPER, options, same_bits

__all__ = ["turnstile"]


def test_a_step_returns_when_frozen_parameters_have_been_copied_as_well(backend: Turnstile) -> None:
    """After it they may be edited."""
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.randn(2048).to(torch.bfloat16))
    model.frozen = torch.nn.Parameter(torch.randn(8192).to(torch.bfloat16), requires_grad=False)
    settings = {"directory": STORE, "model": model, "options": options(backend), **HYPER}
    optimizer = AdamW([model.trained], **settings)
    model.trained.grad = torch.ones_like(model.trained)
    optimizer.step()
    at_checkpoint = copies(model)
    handle = held_checkpoint(backend, optimizer)
    backend.turns.release(2)  # the trained parameter's block, and the first of the frozen one
    for _ in range(2):
        assert backend.reached.acquire(timeout=60)

    def step_and_edit() -> None:
        optimizer.step()
        with torch.no_grad():
            model.frozen.zero_()

    stepping = is_waiting(step_and_edit)
    assert torch.equal(model.frozen, at_checkpoint["frozen"]), "the step has returned"
    backend.open_for_all()
    assert goes_on(stepping)
    load_parameters(model, handle.result(60).path, backend=backend)
    assert same_bits(model.state_dict(), at_checkpoint)
    optimizer.close()


def test_an_edit_before_the_copy_is_an_error_that_names_the_parameter(backend: Turnstile) -> None:
    model, optimizer = started(backend)
    first = optimizer.checkpoint().result()
    model.fill_gradients(2)
    optimizer.step()
    handle = held_checkpoint(backend, optimizer)
    with torch.no_grad():
        model.rows[6].mul_(0.5)
    backend.open_for_all()
    with pytest.raises(SealError, match=r"'rows\.6' was changed in place") as error:
        handle.result(60)
    assert "call .result() on the handle before editing" in str(error.value)
    assert [info.step for info in list_checkpoints(STORE, backend=backend)] == [1]
    assert first.verify().ok
    with pytest.raises(SealError):
        optimizer.step()
    # Seen and noted: the edit counts, as in plain torch, and the next checkpoint has it.
    edited = model.rows[6].detach().clone()
    sealed = optimizer.checkpoint().result(60)
    loaded = Rows()
    load_parameters(loaded, sealed.path, backend=backend)
    assert torch.equal(loaded.rows[6], edited)
    with torch.no_grad():
        model.rows[6].mul_(0.5)  # after the result nothing reads it
    optimizer.step()
    assert optimizer.checkpoint().result(60).verify().ok
    optimizer.close()


def test_an_edit_that_is_not_over_is_an_error(backend: Turnstile) -> None:
    """The memory changes under the copy, and nothing has been counted yet."""
    model, optimizer = started(backend)
    handle = held_checkpoint(backend, optimizer)
    model.rows[0].data.mul_(0.5)  # as half of an edit is: torch counts only its end
    ended, caller = threading.Event(), threading.get_ident()

    def go_on() -> None:
        eventually(lambda: sys._current_frames()[caller].f_code.co_name == "wait")
        backend.open_for_all()
        handle.wait()
        ended.set()

    other = threading.Thread(target=go_on)
    other.start()
    assert ended.wait(60)  # one call, as an edit is
    other.join()
    with pytest.raises(SealError, match="the model was being changed in place while"):
        handle.result(60)
    optimizer.close()


def _vector(model: torch.nn.Module) -> None:
    rows = [p for p in model.parameters() if p.is_contiguous()]
    vector = torch.nn.utils.parameters_to_vector(rows)
    torch.nn.utils.vector_to_parameters(vector.detach() * 0.5, rows)


def _each(change: Callable[[torch.nn.Parameter], object]) -> Callable[[torch.nn.Module], None]:
    def changed(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return changed


def _assigned(model: torch.nn.Module) -> None:
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _swapped(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros_like(parameter)))


@torch.no_grad()
def _set(parameter: torch.nn.Parameter) -> None:
    parameter.set_(torch.zeros_like(parameter))


REBUILDS: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "meta": lambda model: model.to("meta"),
    "vector": _vector,
    "data": _each(lambda p: setattr(p, "data", torch.zeros_like(p))),
    "nothing": _each(lambda p: setattr(p, "data", torch.empty(0, dtype=p.dtype))),
    "assign": _assigned,
    "swap": _each(_swapped),
    "deleted": lambda model: model._parameters.clear() or model.rows.__init__(),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "set": _each(_set),
    "resize": _each(lambda p: p.requires_grad_(False).resize_(8192)),
    "freed": _each(lambda p: p.untyped_storage().resize_(0)),
}


@pytest.mark.parametrize("rebuild", REBUILDS)
def test_memory_that_the_model_has_no_more_is_sealed(backend: Turnstile, rebuild: str) -> None:
    """The seal has the values of the call, whatever memory the parameters are given then."""
    model, optimizer = started(backend, Kinds)
    at_checkpoint = copies(model)
    handle = held_checkpoint(backend, optimizer)
    REBUILDS[rebuild](model)
    gc.collect()
    junk = [torch.full((2048,), 7, dtype=torch.bfloat16) for _ in range(64)]
    backend.open_for_all()
    sealed = handle.result(60)
    del junk
    loaded = Kinds()
    load_parameters(loaded, sealed.path, backend=backend)
    assert same_bits(loaded.state_dict(), at_checkpoint)
    assert sealed.verify().ok
    optimizer.close()


@pytest.mark.parametrize("rebuild", REFUSED)
def test_memory_that_is_taken_from_the_seal_is_an_error_that_names_the_parameter(
    backend: Turnstile, rebuild: str
) -> None:
    model, optimizer = started(backend, Kinds)
    handle = held_checkpoint(backend, optimizer)
    REFUSED[rebuild](model)
    backend.open_for_all()
    said = r"'(rows\.\d|turned|frozen)' was changed|'rows.\d' was f"
    with pytest.raises(SealError, match=said):
        handle.result(60)
    optimizer.close()
    assert list_checkpoints(STORE, backend=backend) == []
