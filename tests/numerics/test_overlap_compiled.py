"""Compiled code beside a step: its guards look at the class of parameters, and it runs no hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from offload.model.watch import is_watched
from tests.numerics.delays import Held
from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import LAST, Twins, last, when_waiting

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
