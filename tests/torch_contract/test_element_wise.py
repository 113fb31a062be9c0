"""Classes of one's own that use functions of torch: either they give torch's bits or are refused.

A step runs on blocks that begin and end in the middle of parameters. Many of torch's kernels
compute the last elements of a tensor in another way than the rest, so that a block has other bits
at its end than the whole parameter has there. The processor decides for which functions that is so.
So each test looks first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import offload
from gds import MemoryBackend
from offload.errors import UnsupportedOptimizerError
from tests.stores.small import make_optimizer

Function = Callable[[torch.Tensor], torch.Tensor]

OF_TORCH = (
    "erf", "exp", "floor", "log", "logit", "reciprocal", "rsqrt", "sigmoid", "sin", "sqrt", "tanh",
)  # fmt: skip
FUNCTIONS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in OF_TORCH},
    **{name: getattr(functional, name) for name in ("gelu", "relu6")},
    **{f"power {power}": lambda x, power=power: x.abs().pow(power) for power in (0.3, 2.0, 3.0)},
    "power of a number": lambda x: torch.pow(0.9, x),
    "power of a tensor": lambda x: x.abs().pow(x),
    "hypot": lambda x: x.hypot(x + 1),
    "lerp": lambda x: x.lerp(x * x, 0.3),
    "addcdiv": lambda x: x.addcdiv(x + 1, x.abs() + 2, value=0.3),
    "float64": lambda x: x.double().exp().float(),
    "power in float64": lambda x: x.double().abs().pow(0.3).float(),
}
ALWAYS_EXACT = {"sqrt", "reciprocal", "floor", "lerp", "addcdiv", "power 2.0", "relu6"}
"""A class that uses these is never refused."""


class Shaped(torch.optim.Optimizer):
    """Momentum, of which the update is a function."""

    def __init__(
        self, params: Any, lr: float = 0.01, function: Function = torch.sqrt, power: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "power": power})
        self.function = function

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"].mul_(0.9).add_(p.grad)
                power = group["power"]
                update = mean.abs().pow(power) if power else self.function(mean)
                p.sub_(update.nan_to_num_(0.0, 1.0, -1.0).clamp_(-100, 100), alpha=group["lr"])


def make_parameters() -> list[torch.nn.Parameter]:
    """Return sizes that leave all kinds of ends; some parameters are not contiguous."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(37, 41), (1,), (41,), (3, 41), (3,), (1,), (129, 7), (6000,)]
    tensors = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
    tensors += [torch.randn(33, 70, generator=generator).mul(1e-3).t()]
    tensors += [torch.randn(33, 70, generator=generator).mul(1e-3)[:, ::2]]
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def give(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        scale = torch.empty(p.shape).uniform_(-14, 3, generator=generator).exp()
        p.grad = torch.randn(p.shape, generator=generator) * scale


def offloaded(
    cls: type[torch.optim.Optimizer], params: Any, **hyper: Any
) -> offload.OffloadedOptimizer:
    made = partial(offload.OffloadedOptimizer, cls)
    return make_optimizer(
        torch.nn.Module(), MemoryBackend(), made, params=params, model=None, **hyper
    )


def require_same(cls: type[torch.optim.Optimizer], live: Any, expected: Any, **hyper: Any) -> None:
    """Train with the class itself and offloaded, and compare."""
    plain = cls(expected, **hyper)
    with offloaded(cls, live, **hyper) as optimizer:
        for step in range(3):
            give(live, step)
            give(expected, step)
            optimizer.step()
            plain.step()
    for ours, theirs in zip(live, expected, strict=True):
        assert torch.equal(ours, theirs)


def share(function: Function, others: Callable[[torch.Tensor], list[torch.Tensor]]) -> float:
    """Return which share of values has other bits if they are in other tensors; 0.0 for none."""
    generator = torch.Generator().manual_seed(11)
    scale = torch.empty(1 << 13).uniform_(-14, 4, generator=generator).exp()
    values = torch.randn(1 << 13, generator=generator) * scale
    whole = function(values)
    found = torch.cat([function(other).contiguous() for other in others(values)])
    whole = whole[: len(found)]
    different = whole.view(torch.int32) != found.view(torch.int32)
    return (different & ~(whole.isnan() & found.isnan())).double().mean().item()


def in_pieces(function: Function) -> float:
    return max(
        share(function, lambda values: list(values.split(7))),
        share(function, lambda values: list(values[:2048].split(1))),
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_bits_of_torch_or_its_class_is_refused_by_name(name: str) -> None:
    function = FUNCTIONS[name]
    of_pieces = in_pieces(function)
    if 0 < of_pieces < 0.002:
        pytest.skip(f"on this processor {of_pieces:.4%} of the results are other: too rare")
    if of_pieces and name not in ALWAYS_EXACT:
        with pytest.raises(UnsupportedOptimizerError, match="Shaped cannot be offloaded") as error:
            offloaded(Shaped, make_parameters(), function=function)
        assert "last bits depend on where an element lies" in str(error.value)
    else:
        require_same(Shaped, make_parameters(), make_parameters(), function=function)


def test_a_small_learning_rate_does_not_hide_it_and_what_the_message_advises_is_taken() -> None:
    """An update of a millionth of a parameter shows one of its bits in a million in that one."""
    with pytest.raises(UnsupportedOptimizerError, match="pow, sigmoid"):
        offloaded(Shaped, make_parameters(), lr=1e-7, power=0.3)
    for function in (lambda x: (x.abs().log() * 0.3).exp(), lambda x: 1 / (1 + (-x).exp())):
        offloaded(Shaped, make_parameters(), function=function).close()


def test_an_exponent_that_is_changed_is_looked_at_before_a_step_is_taken_with_it() -> None:
    live, expected = make_parameters(), make_parameters()
    plain = Shaped(expected, power=2.0)
    with offloaded(Shaped, live, power=2.0) as optimizer:
        for step, power in enumerate((2.0, 0.3, 3.0)):
            give(live, step)
            give(expected, step)
            optimizer.param_groups[0]["power"] = plain.param_groups[0]["power"] = power
            if power == 0.3:
                with pytest.raises(UnsupportedOptimizerError, match="Shaped cannot be offloaded"):
                    optimizer.step()
            else:
                optimizer.step()
                plain.step()
            assert all(map(torch.equal, live, expected))
        assert optimizer.num_steps == 2
