"""A step that runs beside the next forward gives the same bits as one that is waited for.

The store is slow, and its transfers overtake each other, so that the forward is ahead of the step
wherever hooks let it be.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as recompute

import offload
from gds import Backend, Buffer, File, IOFuture, MemoryBackend, WrapperBackend
from gds._wrapper import WrapperFile
from offload.errors import BrokenOptimizerError, OffloadError, SealError
from tests.numerics.delays import Disordered
from tests.numerics.models import Mixed, give_gradients
from tests.numerics.pairs import CASES, Cut, Pair
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    read_state,
)

TIMEOUT_S = 30
"""Only reached where something that should happen does not."""

FORWARD = {"overlap": "forward"}
CUTS = [
    Cut(4096, 2, settings=FORWARD),
    Cut(2 * 4096, 3, 777, settings=FORWARD),
    Cut(1 << 20, 2, settings=FORWARD),  # one chunk holds everything
]


class Batched(torch.nn.Module):
    """Linear layers, BatchNorm, a layer that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(11, 13)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(19, 67),
            torch.nn.BatchNorm1d(67),
            torch.nn.ReLU(),
            torch.nn.Linear(67, 67),
            torch.nn.Linear(67, 67).requires_grad_(False),
            torch.nn.Linear(67, 21),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(8, 19, generator=generator)


class Attention(torch.nn.Module):
    """`MultiheadAttention`, whose projection is used without being called, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(24, 41, bias=False)
        self.attention = torch.nn.MultiheadAttention(24, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(24)
        self.embedding = torch.nn.Embedding(41, 24)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + attended))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 41, (3, 7), generator=generator)


class Half(torch.nn.Module):
    """bf16 parameters, the last layer first, and every layer recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(48, 5)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(4))
        self.transposed = torch.nn.Parameter(torch.randn(48, 48).t())
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.transposed
        for block in self.blocks:
            x = recompute(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
        return self.out(x)

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(6, 48, generator=generator).bfloat16()


class Early(torch.nn.Module):
    """Uses a later layer's weight before that layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 40)
        self.last = torch.nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.last.weight.sum(0))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 40, generator=generator)


MODELS = [Batched, Attention, Half, Early]


class Twins:
    """A model trained with overlap, and the same one with plain torch's update."""

    def __init__(
        self,
        model: type[torch.nn.Module] = Batched,
        cut: Cut = CUTS[0],
        backend: Backend | None = None,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **hyper,
    ) -> None:
        self.kind, self.cut = model, cut
        self.hyper = {"lr": 0.01, **hyper}
        self.optimizer_class = optimizer_class
        self.backend = backend or Disordered(seed=cut.ring_chunks)
        self.live, self.expected = self.make(), self.make()
        self.optimizer = self.offloaded(self.live)
        self.reference = Reference(optimizer_class, self.expected.parameters(), **self.hyper)

    def make(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        return self.kind()

    def offloaded(self, model: torch.nn.Module, **settings) -> offload.OffloadedOptimizer:
        return offload.OffloadedOptimizer(
            self.optimizer_class,
            model.parameters(),
            model=model,
            directory="/store",
            options=self.cut.options(self.backend),
            **settings,
            **self.hyper,
        )

    def sides(self) -> Iterator[tuple[torch.nn.Module, offload.OffloadedOptimizer | Reference]]:
        yield self.live, self.optimizer
        yield self.expected, self.reference

    def batch(self, step: int) -> torch.Tensor:
        return self.kind.batch(torch.Generator().manual_seed(step))

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        return (model(self.batch(step)).float() - 1).square().mean()

    def backward(self, step: int) -> None:
        """Compute gradients on both sides, which shows what their parameters were."""
        losses = [self.loss(model, step) for model in (self.live, self.expected)]
        assert_same_bits(losses[0], losses[1], f"loss of step {step}")
        for model, loss in zip((self.live, self.expected), losses, strict=True):
            model.zero_grad()
            loss.backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.reference.step()

    def assert_same(self) -> None:
        assert_same_parameters(self.live.state_dict().items(), self.expected.state_dict().items())

    def assert_same_state(self) -> None:
        path = self.optimizer.checkpoint().result(TIMEOUT_S).path
        names = {n: p for n, p in self.expected.named_parameters() if p.requires_grad}
        assert_same_state(read_state(path, self.backend), self.reference, names)

    def resume(self) -> offload.Checkpoint:
        """Close, and go on as another process would."""
        self.optimizer.close()
        self.live = self.make(seed=99)
        self.optimizer = self.offloaded(self.live)
        found = self.optimizer.restore()
        assert found is not None
        return found


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_forward_sees_the_updated_parameters(model, cut):
    twins = Twins(model, cut)
    for step in range(12):
        twins.step(step)
        assert all(p.grad is None for p in twins.live.parameters())
    twins.assert_same()
    twins.assert_same_state()
    stats = twins.optimizer.stats()
    assert stats.steps == 12
    trained = [p for p in twins.expected.parameters() if p.grad is not None]
    assert stats.moved_gradient_bytes == sum(p.grad.nbytes for p in trained)
    twins.optimizer.close()
