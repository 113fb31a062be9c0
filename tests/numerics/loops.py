"""Training loops that are run twice: with steps that overlap backward, and with torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import offload
from tests.numerics.delays import Disordered
from tests.numerics.pairs import Cut
from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import is_open

Loop = Callable[[Sequence[Any], Sequence[Any]], Iterator[torch.Tensor]]
"""Takes models and their optimizers; yields what must have the same bits with either."""

STEPS = 5


class Net(nn.Module):
    """Three layers."""

    def __init__(self, wide: int = 24, out: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(24, wide)
        self.middle = nn.Linear(wide, wide)
        self.last = nn.Linear(wide, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def batch(step: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(1000 * salt + step))


def optimizer_for(net: nn.Module, number: int = 0) -> offload.OffloadedOptimizer:
    options = Cut(4096, 2, settings={"overlap": "backward"}).options(Disordered(seed=number))
    return offload.AdamW(net.parameters(), lr=0.01, model=net, directory="/store", options=options)


def _run(loop: Loop, make: Callable[[], Sequence[nn.Module]], *, plain: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    nets = make()
    optimizers: list[Any] = [
        torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
        if plain
        else optimizer_for(net, number)
        for number, net in enumerate(nets)
    ]
    found = [tensor.detach().clone() for tensor in loop(nets, optimizers)]
    for net in nets:
        found += [p.detach().clone() for p in net.parameters()]
    if not plain:
        for optimizer in optimizers:
            optimizer.checkpoint().result()
            optimizer.close()
    return found


def check(loop: Loop, make: Callable[[], Sequence[nn.Module]]) -> None:
    """Compare what a loop yields, and every parameter after it."""
    found, expected = _run(loop, make, plain=False), _run(loop, make, plain=True)
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(mine, other, f"tensor {number}")


def assert_hidden(optimizer: Any, hidden: bool = True) -> None:
    """Check whether the backward that has ended was taken for a step; by torch it never is."""
    assert isinstance(optimizer, torch.optim.AdamW) or is_open(optimizer) == hidden


def training(num_calls: int = 1, *, hidden: bool | None) -> Loop:
    """Train a model by the mean of squares, which `num_calls` batches add to.

    `hidden` says whether steps must overlap; None if either will do.
    """

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step in range(STEPS):
            loss = sum(net(batch(step, call)).square().mean() for call in range(num_calls))
            loss.backward()  # type: ignore[union-attr]
            if hidden is not None:
                assert_hidden(optimizer, hidden)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return loop


def copies(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]
