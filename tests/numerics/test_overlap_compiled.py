"""Compiled code beside a step: its guards look at the class of parameters, and it runs no hooks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from offload.model.watch import is_watched
from tests.eventually import TIMEOUT_S
from tests.numerics.reference import assert_same_bits
from tests.numerics.test_overlap_forward_waits import LAST, Run, run, when_waiting
from tests.numerics.test_overlap_readers import X, check_unseen, evaluate, last

__all__ = ["run"]  # a fixture

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # torch's tracer causes it
)


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


def test_a_model_that_is_compiled_later_is_not_compiled_again_and_again(run, compiler):
    for step in range(2, 5):
        run.step_held(step, LAST)  # its classes are changed
        if step == 2:
            run.live.forward = torch.compile(run.live.forward, backend=compiler)
        when_waiting(run, run.backend.release)
        assert_same_bits(run.live(X).detach(), run.expected(X).detach(), "output")
        run.backend.release()
        graphs = compiler.num_graphs
    for step in range(5, 9):
        run.step(step)
        assert_same_bits(evaluate(run.live), evaluate(run.expected), "evaluation")
    assert compiler.num_graphs <= 2 * graphs  # one more for evaluation
    run.assert_same()


@pytest.mark.parametrize("given", ["compiled", "inner", "in place", "layer"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
def test_steps_in_flight_do_not_make_a_model_compile_again(compiler, given, fullgraph):
    run = Run(num_steps=0)
    inner = run.live
    if fullgraph and given in ("inner", "in place"):
        pytest.skip("needs model= the compiled one, as the message of the compiler says")
    settings = {"backend": compiler, "fullgraph": fullgraph}
    run.optimizer.close()
    if given == "compiled":
        run.live = torch.compile(inner, **settings)
    if given == "in place":
        inner.compile(**settings)
    if given == "layer":
        inner.layers[LAST].compile(**settings)
    run.backend = type(run.backend)()
    run.optimizer = run.offloaded(run.live)
    if given == "inner":
        run.live = torch.compile(inner, **settings)
    counts = []
    for step in range(7):
        if step >= 2:
            run.step_held(step, LAST)
            when_waiting(run, run.backend.release)
        else:
            run.step(step)
        assert not any(map(is_watched, inner.parameters())) or step < 1
        assert_same_bits(run.live(X).detach(), run.expected(X).detach(), "output")
        run.backend.release()
        counts.append(compiler.num_graphs)
    assert counts[-1] == counts[2] > 0
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
    check_unseen(run, lambda: X @ last(run.live), stale)
    assert_same_bits(X @ last(run.live), X @ last(run.expected), "after synchronize()")
    run.assert_same()


def test_something_else_is_compiled_while_a_step_runs(run, compiler):
    """Parameters are ordinary meanwhile, and watched again afterwards."""
    run.step_held(2, LAST)
    shift = torch.compile(lambda x: x + 1, backend=compiler)
    assert torch.equal(shift(torch.ones(2)), torch.full((2,), 2.0))
    assert compiler.num_graphs == 1
    assert is_watched(last(run.live))
    when_waiting(run, run.backend.release)
    assert_same_bits(X @ last(run.live), X @ last(run.expected), "read")
    run.assert_same()


def test_a_compiler_that_fails_leaves_parameters_watched(run, compiler):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    run.step_held(2, LAST)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        torch.compile(lambda x: x + 1, backend=fail)(torch.ones(2))
    assert is_watched(last(run.live))
    when_waiting(run, run.backend.release)
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
        for step in range(2, 9):
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
    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, weight)

    compiled = torch.compile(loss, backend=compiler, fullgraph=True)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(32, 32, bias=False)
            self.more = nn.Linear(32, 32, bias=False)
            self.head = nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compiled(self.more(self.body(x)), self.head.weight)

    run = Run(Fused, num_steps=0)
    for step in range(6):
        run.step(step)
    assert compiler.num_graphs <= 2
    run.assert_same()
    run.optimizer.close()


def test_compiling_on_another_thread_does_not_wait_for_the_step_which_waits_for_it(run, compiler):
    """What is compiled there reads a parameter: while it is traced only, which needs no values."""
    run.step_held(2, LAST)
    compiled = torch.compile(lambda x, w: x @ w, backend=compiler)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(compiled(X, last(run.live))))
    when_waiting(run, run.backend.release)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert_same_bits(found[0].detach(), (X @ last(run.expected)).detach(), "read")
    run.assert_same()


def test_another_thread_that_compiles_does_not_make_a_call_pass_for_compiled(run, compiler):
    """torch says of every thread then that it is compiling."""
    compiling, go_on = threading.Event(), threading.Event()

    def compile_slowly(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiling.set()
        assert go_on.wait(TIMEOUT_S)
        return graph.forward

    run.optimizer.synchronize()
    thread = threading.Thread(
        target=lambda: torch.compile(lambda x: x + 1, backend=compile_slowly)(torch.ones(2))
    )
    thread.start()
    assert compiling.wait(TIMEOUT_S)
    run.live(X)
    go_on.set()
    thread.join(TIMEOUT_S)
    assert not run.optimizer._engine.strategy._hooks.is_partly_compiled
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    assert_same_bits(run.live(X).detach(), run.expected(X).detach(), "output")
    run.assert_same()
