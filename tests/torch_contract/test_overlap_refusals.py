"""What a step that overlaps with the model cannot do: messages name it, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad as clip

from gds import MemoryBackend
from offload import OffloadedOptimizer
from offload.errors import BrokenOptimizerError, OverlapError
from tests.stores.small import make_optimizer

REMEDY = r'use Options\(overlap="forward"\)'


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(20, 60)
        self.last = torch.nn.Linear(60, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def optimizer_for(
    trained: torch.nn.Module, overlap: Any = "backward", **changes: Any
) -> OffloadedOptimizer:
    arguments = {"lr": 0.01, "directory": "/store", **changes}
    return make_optimizer(trained, MemoryBackend(), settings={"overlap": overlap}, **arguments)


class Half:
    """A run that is between backward() and step()."""

    def __init__(self) -> None:
        self.model, self.expected = Model(), Model()
        self.optimizer = optimizer_for(self.model)
        self.plain = torch.optim.AdamW(self.expected.parameters(), lr=0.01)
        self.step(0)
        self.optimizer.checkpoint().result()
        self.backward(1)

    def backward(self, step: int) -> None:
        for model in (self.model, self.expected):
            loss_of(model, step).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.end_step()

    def end_step(self) -> None:
        self.optimizer.step()
        self.plain.step()
        self.plain.zero_grad()

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.model.last.weight

    @property
    def grad(self) -> torch.Tensor:
        grad = self.weight.grad
        assert grad is not None
        return grad

    def assert_same(self) -> None:
        for found, expected in zip(
            self.model.parameters(), self.expected.parameters(), strict=True
        ):
            assert torch.equal(found, expected)


@pytest.fixture
def half() -> Iterator[Half]:
    half = Half()
    yield half
    half.optimizer.close()


@pytest.mark.parametrize(
    ("overlap", "says"),
    [
        ("forward", "overlap='forward' needs model=.*pass the one"),
        ("backward", "overlap='backward' needs model=.*pass the one"),
    ],
)
def test_settings_that_cannot_work(overlap: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        optimizer_for(Model(), overlap, model=None)


USES: dict[str, tuple[str, Callable[[Half], object]]] = {
    "norms": (
        "_foreach_norm",
        lambda half: clip.clip_grad_norm_(half.model.parameters(), 1.0, foreach=True),
    ),
    "each norm": (
        "vector_norm",
        lambda half: clip.clip_grad_norm_(half.model.parameters(), 1.0, foreach=False),
    ),
    "values": ("clamp", lambda half: clip.clip_grad_value_(half.model.parameters(), 1.0)),
    "numpy": ("numpy", lambda half: half.grad.numpy()),
    "an element": ("__getitem__", lambda half: half.grad[0, 0]),
    "in place": ("mul_", lambda half: half.grad.mul_(0.5)),
    "as an operand": ("add_", lambda half: torch.zeros(7, 60).add_(half.grad)),
    "data": ("__get__", lambda half: half.grad.data),
}


def test_using_a_gradient(half: Half) -> None:
    for function, call in USES.values():
        with pytest.raises(
            OverlapError, match=rf"{function}.*\(\) was called on the gradient"
        ) as error:
            call(half)
        assert "'first.weight'" in str(error.value) or "'last.weight'" in str(error.value)
        assert 'overlap="backward"' in str(error.value)
        assert 'use Options(overlap="forward")' in str(error.value)
    # Nothing has been changed: the step can be completed.
    half.end_step()
    half.assert_same()
    half.step(2)
    half.assert_same()


def test_what_a_gradient_still_tells(half: Half) -> None:
    assert half.weight.grad is not None
    assert half.grad.shape == half.weight.shape
    assert (half.grad.dtype, half.grad.device) == (torch.float32, torch.device("cpu"))
    assert repr(half.grad) == "<the gradient of 'last.weight', applied already>"
    half.end_step()
    assert half.weight.grad is None


CALLS: dict[str, Callable[[Half], object]] = {
    "checkpoint()": lambda half: half.optimizer.checkpoint().result(),
    "state_dict()": lambda half: half.optimizer.state_dict(),
    "load_state_dict()": lambda half: half.optimizer.load_state_dict({}),
    "model.state_dict()": lambda half: half.model.last.state_dict(),
    "model.load_state_dict()": lambda half: half.model.load_state_dict(half.expected.state_dict()),
    "synchronize()": lambda half: half.optimizer.synchronize(),
    "add_param_group()": lambda half: half.optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(3))]}
    ),
    "the model's forward()": lambda half: half.model.last(torch.ones(60)),
}


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_calls_between_backward_and_step(half: Half) -> None:
    for name, call in CALLS.items():
        method = "state_dict()" if name == "load_state_dict()" else name
        says = rf"{re.escape(method)} was called between backward.*{REMEDY}"
        with pytest.raises(OverlapError, match=says):
            call(half)
    with pytest.raises(OverlapError, match="between backward"):
        _ = half.optimizer.position
    half.end_step()
    half.assert_same()
    assert half.optimizer.position.step == 2
    for name, call in CALLS.items():
        if name != "load_state_dict()":  # which would find that it is not one
            call(half)


def test_closures(half: Half) -> None:
    half.end_step()
    called = []
    with pytest.raises(OverlapError, match=rf"step\(closure\) is not possible.*{REMEDY}"):
        half.optimizer.step(lambda: called.append(1) or 0.0)
    assert not called


def assert_refused_until_restored(half: Half) -> None:
    for _ in range(2):
        with pytest.raises(BrokenOptimizerError, match=r"call restore\(\) to continue from"):
            half.optimizer.step()
    half.model.zero_grad()
    with pytest.raises(BrokenOptimizerError, match=r"call restore\(\) to continue from"):
        loss_of(half.model).backward()
    with pytest.raises(BrokenOptimizerError, match=r"call restore\(\) to continue from"):
        half.optimizer.checkpoint()
    found = half.optimizer.restore()
    assert found is not None
    assert found.step == 1
    half.expected = Model()
    half.plain = torch.optim.AdamW(half.expected.parameters(), lr=0.01)
    loss_of(half.expected, 0).backward()
    half.plain.step()
    half.plain.zero_grad()
    half.assert_same()
    half.model.zero_grad()
    for step in range(1, 4):
        half.step(step)
        half.assert_same()


AGAIN = (
    r"gradient of '\w+\.\w+' had been applied already.*by a second backward\(\), by another loss "
    r".*use_reentrant=False.*call restore\(\)"
)


def test_a_second_backward(half: Half) -> None:
    """Of the same graph, as a second forward is refused already."""
    half.end_step()
    loss = loss_of(half.model, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(OverlapError, match=rf"{AGAIN}.*{REMEDY}"):
        loss.backward()
    assert_refused_until_restored(half)


@pytest.mark.parametrize(("zero", "then"), [("None", "step"), ("model zeros", "backward")])
def test_clearing_gradients_that_have_been_applied(half: Half, zero: str, then: str) -> None:
    """As after an error between backward() and step()."""
    half.end_step()
    loss = loss_of(half.model, 2)
    loss.backward(retain_graph=True)
    zeroed: Any = half.model if "model" in zero else half.optimizer
    zeroed.zero_grad(set_to_none="None" in zero)
    if then == "backward":
        with pytest.raises(OverlapError, match=rf"{AGAIN}.*{REMEDY}"):
            loss.backward()
    else:
        with pytest.raises(OverlapError, match=r"was cleared or replaced.*call restore\(\)"):
            half.optimizer.step()
    assert_refused_until_restored(half)


def test_replacing_a_gradient(half: Half) -> None:
    half.weight.grad = torch.ones_like(half.weight)
    with pytest.raises(OverlapError, match=r"gradient of 'last.weight' was cleared or replaced"):
        half.optimizer.step()
    assert_refused_until_restored(half)


def test_a_backward_that_failed_half_way(half: Half) -> None:
    half.end_step()
    fail = [True]

    def interrupt(_module: object, _inputs: object, output: torch.Tensor) -> None:
        def stop(_: torch.Tensor) -> None:
            if fail[0]:
                raise ZeroDivisionError

        output.register_hook(stop)

    half.model.first.register_forward_hook(interrupt)
    loss = loss_of(half.model, 2)
    again = loss_of(half.model, 2)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fail[0] = False
    half.optimizer.zero_grad()
    with pytest.raises(OverlapError, match=AGAIN):
        again.backward()
    half.model.first._forward_hooks.popitem()
    assert_refused_until_restored(half)


@pytest.mark.parametrize("how", ["step", "unscale_"])
def test_grad_scalers(how: str) -> None:
    half = Half()
    half.end_step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(half.model, 2)).backward()
    with pytest.raises(OverlapError, match=REMEDY) as error:
        getattr(scaler, how)(half.optimizer)
    assert ("GradScaler" if how == "step" else "unscale") in str(error.value)
    assert "call restore() to continue from" in str(error.value)
    assert_refused_until_restored(half)
    half.optimizer.close()


def test_a_scaler_that_is_switched_off(half: Half) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.unscale_(half.optimizer)
    scaler.step(half.optimizer)
    half.plain.step()
    half.assert_same()


def test_restore_between_backward_and_step(half: Half) -> None:
    found = half.optimizer.restore()
    assert found is not None
    assert all(p.grad is None for p in half.model.parameters())
    half.plain.zero_grad()
    for step in range(1, 4):
        half.step(step)
        half.assert_same()


def test_nothing_to_restore() -> None:
    model = Model()
    with optimizer_for(model) as optimizer:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        with pytest.raises(OverlapError, match="construct model and optimizer again"):
            loss.backward()
        with pytest.raises(BrokenOptimizerError, match="construct model and optimizer again"):
            optimizer.step()
        with pytest.raises(BrokenOptimizerError, match="construct model and optimizer again"):
            optimizer.restore()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_a_scripted_module_is_refused_by_name(overlap: Any) -> None:
    part = torch.jit.script(torch.nn.Linear(2, 2))
    whole = torch.nn.Sequential(part)
    for model, words in ((part, "the model was"), (whole, "the module '0' was")):
        with pytest.raises(OverlapError, match=f"{words} made by torch.jit"):
            optimizer_for(model, overlap)
