"""Compiled code beside a step: its guards look at the class of parameters, and it runs no hooks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from offload.model.watch import is_watched
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Held
from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import LAST, Batched, Twins, last, when_waiting

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # torch's tracer causes it
)
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))


class Compiler:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        self.num_graphs += 1
        return graph.forward


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


def released_when_waited_for(run: Twins) -> None:
    when_waiting(run, run.backend.release)


def compiled(model: nn.Module, how: str, **settings: object) -> nn.Module:
    """Compile a model, or what is in it; returns what is to be called."""
    if how == "in place":
        model.compile(**settings)
    for layer in {"layers": model.layers, "last layer": model.layers[-1:]}.get(how, ()):
        layer.compile(**settings)
    return torch.compile(model, **settings) if how in ("compiled", "inner") else model


@pytest.mark.parametrize(
    ("how", "called"),
    [
        ("compiled", "before"),
        ("inner", "after"),
        ("in place", "after"),
        ("layers", "before"),
        ("layers later", "after"),
    ],
)
def test_compiled_models(how, called):
    """What is compiled is given to the optimizer, or the model in it (`inner`)."""
    torch.compiler.reset()
    twins = Twins(Batched)
    twins.optimizer.close()
    twins.live = inner = twins.make()
    if how != "inner":
        twins.live = compiled(inner, how, backend="eager")
    if called == "before":
        with torch.no_grad():
            twins.live(twins.batch(0)), twins.expected(twins.batch(0))  # BatchNorm counts it
    twins.optimizer = twins.offloaded(twins.live, fresh=True)
    if how == "inner":
        twins.live = compiled(inner, how, backend="eager")
    for step in range(6):
        if step == 3 and how == "layers later":
            compiled(inner, "layers", backend="eager")
        twins.step(step)
    twins.live = inner
    twins.assert_same()
    twins.optimizer.close()
    torch.compiler.reset()


def test_a_compiled_function_that_calls_a_part_of_the_model():
    torch.compiler.reset()
    twins = Twins(Batched)
    live, eager = twins.live, twins.loss
    part = torch.compile(lambda x: live.layers(x), backend="eager")
    twins.loss = lambda model, step: eager(part if model is live else model, step)
    for step in range(6):
        twins.step(step)
    twins.assert_same()
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("how", "fullgraph"),
    [
        ("compiled", False),
        ("compiled", True),
        ("inner", False),
        ("in place", False),
        ("last layer", True),
        ("later", False),
    ],
)
def test_steps_in_flight_do_not_make_a_model_compile_again(compiler, how, fullgraph):
    run = Twins(backend=Held(), num_steps=2 if how == "later" else 0)
    inner, settings = run.live, {"backend": compiler, "fullgraph": fullgraph}
    if how in ("compiled", "in place", "last layer"):
        run.optimizer.close()
        run.live, run.backend = compiled(inner, how, **settings), Held()
        run.optimizer = run.offloaded(run.live)
    if how == "inner":
        run.live = compiled(inner, how, **settings)
    counts = []
    for step in range(7):
        if step >= 2:
            run.step_held(step, LAST)
            if step == 2 and how == "later":
                inner.forward = torch.compile(inner.forward, **settings)
            released_when_waited_for(run)
        else:
            run.step(step)
        assert not any(map(is_watched, inner.parameters())) or step < 1 or how == "later"
        assert_same_bits(run.live(X).detach(), run.expected(X).detach(), "output")
        run.backend.release()
        counts.append(compiler.num_graphs)
    assert counts[-1] == counts[4 if how == "later" else 2] > 0
    run.live = inner
    run.assert_same()
    run.optimizer.close()


def test_readers_of_a_compiled_model_are_not_seen_but_synchronize_helps(run, compiler):
    """Its code would be compiled anew for each class of its parameters."""
    run.optimizer.synchronize()
    run.live.compile(backend=compiler)
    run.step(2)
    run.optimizer.synchronize()
    stale = (X @ last(run.live)).detach()
    run.step_held(3, LAST)
    assert_same_bits((X @ last(run.live)).detach(), stale, "it waits")
    assert LAST not in run.backend.ended
    run.backend.release()
    run.assert_same()
    assert_same_bits(X @ last(run.live), X @ last(run.expected), "after synchronize()")


def unable(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True], ids=["", "the compiler fails"])
def test_something_else_is_compiled_while_a_step_runs(run, compiler, fails):
    """Parameters are ordinary meanwhile, and watched again afterwards."""
    run.step_held(2, LAST)
    shift = torch.compile(lambda x: x + 1, backend=unable if fails else compiler)
    if fails:
        with pytest.raises(Exception, match="ZeroDivisionError"):
            shift(torch.ones(2))
    else:
        assert torch.equal(shift(torch.ones(2)), torch.full((2,), 2.0))
        assert compiler.num_graphs == 1
    assert is_watched(last(run.live))
    released_when_waited_for(run)
    assert_same_bits(X @ last(run.live), X @ last(run.expected), "read")
    run.assert_same()


def test_the_bits_of_a_step_during_which_something_is_compiled():
    """torch's optimizers differ in the last bit meanwhile, on all threads."""
    torch.compiler.reset()
    twins = Twins()

    def compile_slowly(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        time.sleep(0.1)
        return graph.forward

    for step in range(4):
        twins.step(step)
        torch.compile(lambda x, step=step: x * step, backend=compile_slowly)(torch.ones(3))
    twins.assert_same_state()
    torch.compiler.reset()


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
def test_compiled_code_that_reads_a_parameter_of_a_model_that_is_not(
    run, compiler, caplog, fullgraph
):
    """It is compiled once more, and from then on `step` waits; after it, everything is right."""

    def total(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sum()

    compiled = torch.compile(total, backend=compiler, fullgraph=fullgraph)
    with caplog.at_level(logging.WARNING, "offload"):
        for step in range(2, 7):
            run.optimizer.synchronize()
            run.step(step)
            found, expected = compiled(X, last(run.live)), total(X, last(run.expected))
            if step > 2:  # before that the compiled code was not known to read it
                assert_same_bits(found.detach(), expected.detach(), f"step {step}")
    assert compiler.num_graphs <= 2
    (said,) = [r.message for r in caplog.records if "compiled code" in r.message]
    assert "step() waits" in said
    run.assert_same()


def test_a_compiled_loss_within_the_model_is_compiled_once(compiler):
    fused = torch.compile(nn.functional.linear, backend=compiler, fullgraph=True)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.more, self.head = (nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fused(self.more(self.body(x)), self.head.weight)

    run = Twins(Fused, num_steps=6)
    assert compiler.num_graphs <= 2
    run.assert_same()
    run.optimizer.close()


def test_compiling_on_another_thread_does_not_wait_for_the_step_which_waits_for_it(run, compiler):
    """What is compiled there reads a parameter: while it is traced only, which needs no values."""
    run.step_held(2, LAST)
    compiled = torch.compile(lambda x, w: x @ w, backend=compiler)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(compiled(X, last(run.live))))
    released_when_waited_for(run)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert_same_bits(found[0].detach(), (X @ last(run.expected)).detach(), "read")
    run.assert_same()
