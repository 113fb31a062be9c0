"""A small language model of blocks, and pairs of it: one in memory, one whose blocks are streamed.

The oracle is plain torch: the same model, with the same torch optimizer on FP32 masters in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import offload
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters

VOCABULARY, WIDTH, LENGTH = 48, 32, 12
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


class Block(torch.nn.Module):
    """Attention and a feed-forward part, both with residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.gain = torch.nn.Parameter(torch.tensor(0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.before(x)).relu()) * (self.scale * self.gain)


class Model(torch.nn.Module):
    """A causal language model."""

    def __init__(self, layers: int = 5, width: int = WIDTH, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.order: Sequence[int] = range(layers)
        self.recompute: Callable[..., Any] | None = None
        """Called with a function and its input instead of the function; None for no checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        return self.after(hidden)

    def after(self, hidden: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            layer = self.layers[number]
            hidden = self.recompute(layer, hidden) if self.recompute else layer(hidden)
        return self.head(self.norm(hidden)).float()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(x).flatten(0, 1), x.flatten())


def make(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Model:
    """Return a model, the same for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model(**settings).to(dtype)


def batch(seed: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(
        VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(100 + seed)
    )


def recomputing(*, reentrant: bool, forward_only: bool = False) -> Callable[..., Any]:
    """Return what runs a block with activation checkpointing, as torch or as transformers do."""

    def run(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        function = layer.forward if forward_only else layer
        if reentrant and not hidden.requires_grad:
            hidden = hidden.requires_grad_()
        return checkpoint(function, hidden, use_reentrant=reentrant)

    return run


@dataclass
class Pair:
    """The same model twice: in memory, and with streamed blocks."""

    plain: Any
    streamed: Any
    reference: Reference
    optimizer: offload.OffloadedOptimizer

    def __iter__(self) -> Any:
        return iter((self.plain, self.streamed))

    def train(self, seed: int = 0, num: int = 1) -> None:
        """Add the gradients of some batches to both models, and compare the losses."""
        for n in range(num):
            losses = []
            for model in self:
                loss = model.loss(batch(10 * seed + n))
                loss.backward()
                losses.append(loss.detach())
            assert_same_bits(losses[1], losses[0], "the loss")

    def compare_gradients(self) -> None:
        found = {n: p.grad for n, p in self.streamed.named_parameters() if p.grad is not None}
        wanted = {n: p.grad for n, p in self.plain.named_parameters() if p.grad is not None}
        assert wanted
        assert_same_parameters(found.items(), wanted.items())

    def step(self) -> None:
        """Compare the gradients, step both models, and compare the parameters."""
        self.compare_gradients()
        self.reference.step()
        self.optimizer.step()
        for model in self:
            model.zero_grad()
        self.compare()

    def compare(self) -> None:
        """Compare all values of the models' state dicts."""
        assert_same_parameters(self.streamed.state_dict().items(), self.plain.state_dict().items())


def pair(
    directory: Path,
    prepare: Callable[[Any], Any] = lambda _: None,
    *,
    model: Callable[..., Any] = make,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    hyper: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Pair:
    """Return a pair, whose models `prepare` has changed before the optimizers were made."""
    hyper = HYPER if hyper is None else hyper
    plain, streamed = model(**settings), model(**settings)
    prepare(plain)
    prepare(streamed)
    reference = Reference(optimizer, [p for p in plain.parameters() if p.requires_grad], **hyper)
    offloaded = offload.OffloadedOptimizer(
        optimizer,
        [(n, p) for n, p in streamed.named_parameters() if p.requires_grad],
        directory=directory,
        model=streamed,
        options=offload.Options(**{"parameters": "host", "chunk_bytes": 32768, **(options or {})}),
        **hyper,
    )
    return Pair(plain, streamed, reference, offloaded)
