"""A model whose steps run beside the model, and the same one with plain torch's update.

By default the store is slow, and its transfers overtake each other, so that the model is ahead of
the step wherever hooks let it be. With `Held` a step ends when a test lets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import offload
from gds import Backend
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Disordered
from tests.numerics.pairs import Cut
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    read_state,
)

NUM_LAYERS = 6
LAST = NUM_LAYERS - 1


class Layers(nn.Module):
    """Layers of one chunk each."""

    def __init__(self, order: range = range(NUM_LAYERS)) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


def last(model: nn.Module) -> nn.Parameter:
    """Return the last layer's weight, which is the last chunk of the state."""
    weight: nn.Parameter = model.layers[LAST].weight  # type: ignore[index,union-attr,assignment]
    return weight


class Batched(nn.Module):
    """Linear layers, BatchNorm, a layer that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(11, 13)
        self.layers = nn.Sequential(
            nn.Linear(19, 67),
            nn.BatchNorm1d(67),
            nn.ReLU(),
            nn.Linear(67, 67),
            nn.Linear(67, 67).requires_grad_(False),
            nn.Linear(67, 21),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(8, 19, generator=generator)


class Attention(nn.Module):
    """`MultiheadAttention`, whose projection is used without being called, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 41, bias=False)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.embedding = nn.Embedding(41, 24)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + attended))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 41, (3, 7), generator=generator)


class Half(nn.Module):
    """bf16 parameters, the last layer first, and every layer recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 5)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.transposed = nn.Parameter(torch.randn(32, 32).t())
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16() @ self.transposed
        for block in self.blocks:
            x = recompute(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
        return self.out(x)


class Early(nn.Module):
    """Uses a later layer's weight before that layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.second.weight.sum(0)


class Branching(nn.Module):
    """Some branches are first used late and in another order, and some get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        for number in range(2):
            x = self.branches[(self.turn * 3 + number * 2) % (2 if self.turn < 5 else 5)](x)
        return x


class Twins:
    """Both models get the same batches; everything that differs afterwards is a bug.

    Args:
        model: Makes each of the two.
        overlap: As in `Options`.
        backend: Where the state is; None for one whose transfers overtake each other.
        cut: How element space is cut: bytes of a chunk, chunks of the ring, elements of a block.
        num_steps: How many steps are taken at once.
        settings: More of `Options`.
        optimizer_class: Torch's.
        hyper: Of the optimizer.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] = Layers,
        overlap: str | None = "forward",
        backend: Backend | None = None,
        *,
        cut: tuple[int, int, int | None] = (4096, 2, None),
        num_steps: int = 0,
        settings: Mapping[str, Any] | None = None,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **hyper: Any,
    ) -> None:
        self.kind, self.cut = model, Cut(*cut, {"overlap": overlap, **(settings or {})})
        self.hyper = {"lr": 0.01, **hyper}
        self.optimizer_class = optimizer_class
        self.backend: Any = backend or Disordered(seed=1)
        self.live, self.expected = self.make(), self.make()
        self.optimizer = self.offloaded(self.live)
        self.plain = Reference(optimizer_class, self.expected.parameters(), **self.hyper)
        for step in range(num_steps):
            self.step(step)

    def make(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return self.kind()

    def given(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Return what the optimizer of a model is given."""
        return model.parameters()

    def offloaded(self, model: nn.Module, **settings: Any) -> offload.OffloadedOptimizer:
        return offload.OffloadedOptimizer(
            self.optimizer_class,
            list(self.given(model)),
            model=model,
            directory="/store",
            options=self.cut.options(self.backend),
            **settings,
            **self.hyper,
        )

    def both(self) -> tuple[Any, Any]:
        return self.live, self.expected

    def sides(self) -> Iterator[tuple[Any, Any]]:
        """Yield each model with what steps it."""
        yield self.live, self.optimizer
        yield self.expected, self.plain

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        make = getattr(self.kind, "batch", None)
        return make(generator) if make else torch.randn(4, 32, generator=generator)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        return (model(self.batch(step)).float() - 1).square().mean()

    def backward(self, step: int) -> None:
        """Compute gradients on both sides, which shows what their parameters were."""
        losses = [self.loss(model, step) for model in self.both()]
        assert_same_bits(losses[0], losses[1], f"loss of step {step}")
        for model, loss in zip(self.both(), losses, strict=True):
            model.zero_grad()
            loss.backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.plain.step()

    def step_held(self, step: int, *chunks: int) -> None:
        """Take a step that cannot end before these chunks' reads are released, as by `Held`."""
        self.backward(step)
        self.backend.hold(*chunks)
        self.optimizer.step()
        self.plain.step()

    def assert_same(self) -> None:
        self.optimizer.synchronize()
        assert_same_parameters(self.live.state_dict().items(), self.expected.state_dict().items())

    def assert_same_state(self) -> None:
        self.assert_same()
        path = self.optimizer.checkpoint().result(TIMEOUT_S).path
        names = {n: p for n, p in self.expected.named_parameters() if p.requires_grad}
        assert_same_state(read_state(path, self.backend), self.plain, names)

    def resume(self) -> offload.Checkpoint:
        """Close, and go on as another process would."""
        self.optimizer.close()
        self.live = self.make(seed=99)
        self.optimizer = self.offloaded(self.live)
        found = self.optimizer.restore()
        assert found is not None
        return found


def when_waiting(run: Any, action: Callable[[], object]) -> None:
    """Have something done on another thread as soon as one waits for the step that is running.

    Nothing that is public tells that somebody has begun to wait.
    """
    running = run.optimizer._engine.strategy._running
    assert running is not None
    changed, wait = running._changed, running._changed.wait_until
    threads = [threading.Thread(target=action)]

    def waiting(reached: Callable[[], bool]) -> bool:
        def looked() -> bool:
            found = reached()  # chunks that are not held may just have been updated
            if not found and threads:
                threads.pop().start()
            return found

        return wait(looked)

    changed.wait_until = waiting


def is_open(optimizer: Any) -> bool:
    """Return whether a step has begun and not been waited for; torch's own never does."""
    engine = getattr(optimizer, "_engine", None)
    return engine is not None and engine.strategy._running is not None


def is_stepping(threads: set[threading.Thread]) -> bool:
    return any(thread.name == "offload-step" for thread in threads)
