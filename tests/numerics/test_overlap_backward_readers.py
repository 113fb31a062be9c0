"""Who needs the value of a parameter that backward has stepped gets torch's bits, or an error.

Where it can be foreseen that the value is needed again, the backward is held and the bits are the
same. Elsewhere the use is refused by name, whether its chunk has been stepped by then or not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute

from offload.errors import BrokenOptimizerError, OverlapError
from tests.numerics.loops import (
    STEPS,
    Loop,
    Net,
    assert_hidden,
    batch,
    check,
    copies,
    optimizer_for,
    training,
)
from tests.numerics.twins import is_open

REMEDY = r'use Options\(overlap="forward"\)'


class Deep(nn.Module):
    """The head's gradient is the first that is final; `how` names what else needs its weight."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.head = nn.Linear(24, 24, bias=False)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how:
            x = EARLY[self.how](self, x)
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def recomputed(change: Callable[..., torch.Tensor]) -> Any:
    return lambda model, x: recompute(partial(change, model), x, use_reentrant=False)


def times_constant(model: Deep, x: torch.Tensor) -> torch.Tensor:
    return (model.inner(x) * model.head.weight.detach().norm()).tanh()


def compared_with_target(model: Deep, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.head(x).softmax(-1)
    return target * model.inner(x).log_softmax(-1)


def times_norm(model: Deep, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        norm = model.head.weight.norm()
    return (model.inner(x) * norm).sin()


EARLY: dict[str, Callable[[Deep, torch.Tensor], torch.Tensor]] = {
    "detach in recomputation": recomputed(times_constant),
    "module without gradients in recomputation": recomputed(compared_with_target),
    "no_grad in recomputation": recomputed(times_norm),
    "data": lambda model, x: functional.linear(model.inner(x), model.head.weight.data),
    "detach": lambda model, x: functional.linear(model.inner(x), model.head.weight.detach()),
}


@pytest.mark.parametrize("how", EARLY)
def test_a_value_that_is_a_constant_of_the_graph_too(how: str) -> None:
    check(training(hidden=False), lambda: [Deep(how)])


def scale_by_norm(module: nn.Module, inputs: Any, _outputs: Any) -> Any:
    weight: Any = module.weight
    return (inputs[0] * weight.detach().norm(),)


def hooked(kind: str) -> Loop:
    """Backward hooks of modules scale the gradient by the norm of a weight."""

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        net = nets[0]
        if kind == "pre":
            handles = [
                net.inner.register_full_backward_pre_hook(
                    lambda _, gradients: (gradients[0] * net.head.weight.detach().norm(),)
                )
            ]
        else:
            handles = [
                nn.modules.module.register_module_full_backward_hook(  # type: ignore[no-untyped-call]
                    lambda module, *args: (
                        scale_by_norm(module, *args) if module in net.layers else None
                    )
                )
            ]
        try:
            yield from training(hidden=False)(nets, optimizers)
        finally:
            for handle in handles:
                handle.remove()
        net(batch(9)).square().mean().backward()
        assert_hidden(optimizers[0])
        optimizers[0].step()

    return loop


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("kind", ["pre", "global"])
def test_backward_hooks_of_modules_that_read_weights(kind: str) -> None:
    check(hooked(kind), lambda: [Deep()])


def test_uses_that_are_harmless_do_not_hold() -> None:
    """Values that are computed without a graph in an ordinary forward are not needed again."""

    class Harmless(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.head.weight.norm() + self.head(x).mean()
            assert self.head.weight.dim() == 2
            x = recompute(self.inner, x, use_reentrant=False)
            x = functional.linear(x * scale, self.inner.weight, self.inner.bias)
            return super().forward(x)

    check(training(hidden=True), lambda: [Harmless()])


def hooks_on_parameters(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Hooks that look at a parameter and its gradient when that has been accumulated."""
    (net,), (optimizer,) = nets, optimizers
    seen: list[torch.Tensor] = []

    def look(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.detach().norm() + parameter.grad.norm())
        if len(seen) % 2:
            parameter.grad.mul_(0.5)

    handles = []
    for step in range(STEPS):
        if step % 3 == 0:
            handles = [p.register_post_accumulate_grad_hook(look) for p in net.parameters()]
        loss = net(batch(step)).square().mean()
        loss.backward()
        assert_hidden(optimizer, step % 3 != 0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            for handle in handles:
                handle.remove()
        yield loss
        yield torch.stack(seen)


def test_hooks_on_parameters_run_before_their_gradient_is_taken() -> None:
    check(hooks_on_parameters, lambda: [Deep()])


LATE: dict[str, Callable[[Deep], Callable[[torch.Tensor], torch.Tensor | None]]] = {
    "reads": lambda model: lambda gradient: gradient * model.head.weight.detach().norm(),
    "edits": lambda model: lambda _: (model.head.weight.data.mul_(0.9), None)[1],
}


@pytest.mark.parametrize("how", LATE)
def test_a_hook_on_an_activation_that_uses_a_weight_is_refused_and_held_after_restore(
    how: str,
) -> None:
    torch.manual_seed(3)
    net = Deep()
    plain = copy.deepcopy(net)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    with optimizer_for(net) as optimizer:

        def step(number: int) -> None:
            net(batch(number)).square().mean().backward()
            optimizer.step()
            plain(batch(number)).square().mean().backward()
            reference.step()
            reference.zero_grad()

        def compare() -> None:
            assert all(map(torch.equal, net.parameters(), plain.parameters()))

        step(0)
        optimizer.checkpoint().result()
        for model in (net, plain):
            model.inner.register_forward_hook(
                lambda _module, _inputs, output, model=model: (
                    output.register_hook(LATE[how](model)) and None
                )
            )
        with pytest.raises(
            OverlapError,
            match=rf"'head.weight' was used within backward\(\).*call restore\(\).*{REMEDY}",
        ):
            net(batch(1)).square().mean().backward()
        with pytest.raises(BrokenOptimizerError, match=r"call restore\(\)"):
            optimizer.step()
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 1
        net.zero_grad()
        compare()
        for number in range(1, 4):
            step(number)
            compare()


def test_what_appears_in_a_later_step_only_is_refused() -> None:
    net = Deep()
    with optimizer_for(net) as optimizer:
        net(batch(0)).square().mean().backward()
        assert is_open(optimizer)
        optimizer.step()
        optimizer.checkpoint().result()
        net.how = "no_grad in recomputation"
        with pytest.raises(OverlapError, match=r"'head.weight' was used within backward\(\)"):
            net(batch(1)).square().mean().backward()
        optimizer.restore()
        net.zero_grad()
        net(batch(1)).square().mean().backward()
        assert not is_open(optimizer)
        optimizer.step()
        optimizer.checkpoint().result()


@pytest.mark.parametrize("after", ["a parameter that joins", "a module that is new"])
def test_the_forward_is_looked_at_again(after: str) -> None:
    torch.manual_seed(3)
    net: Any = Deep()
    net.extra = nn.Linear(2, 2).requires_grad_(False)
    with optimizer_for(net) as optimizer:
        net(batch(0)).square().mean().backward()
        if "joins" in after:
            net.extra.requires_grad_(True)
        optimizer.step()
        optimizer.checkpoint().result()
        net.how = "detach" if "joins" in after else "module without gradients in recomputation"
        plain = copy.deepcopy(net)
        net(batch(1)).square().mean().backward()
        assert not is_open(optimizer)
        plain(batch(1)).square().mean().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert mine.grad is other.grad is None or torch.equal(mine.grad, other.grad)
        optimizer.step()
        optimizer.checkpoint().result()


@pytest.mark.parametrize("other_first", [False, True])
def test_a_parameter_that_another_optimizer_trains_now_keeps_its_gradient(
    other_first: bool,
) -> None:
    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        head = set(net.last.parameters())
        other = torch.optim.SGD(net.last.parameters(), lr=0.1)
        for step in range(STEPS):
            taking = [optimizer]
            if step >= 2:
                group = optimizer.param_groups[0]
                group["params"] = [p for p in group["params"] if p not in head]
                taking = [other, optimizer] if other_first else [optimizer, other]
            x = batch(step).requires_grad_(step == 3)  # one that is held
            loss = net(x).square().mean()
            loss.backward()
            for each in taking:
                each.step()
            net.zero_grad()
            yield loss
            yield from copies(net)

    check(loop, lambda: [Net()])
