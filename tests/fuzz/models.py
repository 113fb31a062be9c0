"""Models of random structure: what people write, and how their code reaches parameters.

Every model maps a batch of ``[B, T]`` tokens or ``[B, T, width]`` numbers to ``[B, T, outputs]``.
Blocks differ in how they read their parameters: by calling modules, by a functional call on the
weight of a module that is never called, through a parametrisation, only for some batches, twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCABULARY = 13


class Residual(nn.Module):
    """Two linear layers, with dropout between them and a way around them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(functional.gelu(self.up(x))))


class Convolution(nn.Module):
    """A convolution whose weight is channels-last, and BatchNorm with its running statistics."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        channels = 2 + hidden % 3
        self.first = nn.Conv2d(1, channels, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, 1, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x[:, None])))).squeeze(1)


class Attention(nn.Module):
    """`torch.nn.MultiheadAttention`, which never calls its ``out_proj``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=hidden % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    """`torch.nn.TransformerEncoderLayer`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, 2, hidden, dropout=0.1, batch_first=True, norm_first=hidden % 2 == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Recurrent(nn.Module):
    """An LSTM or a GRU, whose parameters are read as a list."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        kind = nn.LSTM if hidden % 2 else nn.GRU
        self.cell = kind(width, width, num_layers=1 + hidden % 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class Parametrised(nn.Module):
    """A linear layer whose weight is computed from two parameters at each use."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        linear = nn.Linear(width, width)
        self.linear = nn.utils.parametrizations.weight_norm(linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Odd(nn.Module):
    """Parameters without a module: of 0 dimensions, empty, transposed, in a list, never used."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, width))
        self.turned = nn.Parameter(torch.randn(hidden, width).t() * 0.1)  # not contiguous
        self.several = nn.ParameterList([torch.randn(width) * 0.1 for _ in range(3)])
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        y = (x @ self.turned) @ self.turned.t()
        for vector in self.several:
            y = y + vector
        return x + y * self.scale + self.empty.sum()


class Branches(nn.Module):
    """Two layers, of which a batch of an even length takes one and others the other."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.even = nn.Linear(width, width)
        self.odd = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.odd(x) if x.shape[1] % 2 else self.even(x))


class Twice(nn.Module):
    """A layer that is called twice, and a weight that is read without calling its module."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.read = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.shared(x))
        return functional.linear(self.shared(x), self.read.weight)


class Normed(nn.Module):
    """LayerNorm, and a gain of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.gain


BLOCKS: dict[str, Callable[[int, int], nn.Module]] = {
    "residual": Residual,
    "convolution": Convolution,
    "attention": Attention,
    "encoder": Encoder,
    "recurrent": Recurrent,
    "parametrised": Parametrised,
    "odd": Odd,
    "branches": Branches,
    "twice": Twice,
    "normed": Normed,
}
ONLY_FP32 = frozenset({"parametrised"})


class Network(nn.Module):
    """Blocks between an input and a head, each in a dtype of its own.

    Args:
        shape: ``blocks`` as pairs of a name in `BLOCKS` and one in `DTYPES`, ``tokens``,
            ``width``, ``hidden``, ``head`` (``"linear"``, ``"tied"`` or ``"fused"``),
            ``dtype`` of input and head, and ``late``: a last layer that joins the optimizer later.
        seed: Of the initial values.
    """

    def __init__(self, shape: dict[str, Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width, hidden, dtype = shape["width"], shape["hidden"], DTYPES[shape["dtype"]]
        self.shape = shape
        self.input = (
            nn.Embedding(VOCABULARY, width) if shape["tokens"] else nn.Linear(width, width)
        ).to(dtype)
        self.blocks = nn.ModuleList(
            BLOCKS[name](width, hidden).to(DTYPES[kind]) for name, kind in shape["blocks"]
        )
        outputs = VOCABULARY if shape["tokens"] else 3
        self.head = nn.Linear(width, outputs, bias=shape["head"] == "linear").to(dtype)
        if shape["head"] == "tied":
            self.head.weight = self.input.weight
        self.late = nn.Linear(outputs, outputs).to(dtype)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return an input and a target, the same ones for a seed."""
        generator = torch.Generator().manual_seed(seed)
        length = 2 + seed % 3
        if self.shape["tokens"]:
            x = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        else:
            x = torch.randn(2, length, self.shape["width"], generator=generator)
        outputs = VOCABULARY if self.shape["tokens"] else 3
        return x, torch.randn(2, length, outputs, generator=generator)

    def encode(self, x: Tensor, recompute: bool | None = None) -> Tensor:
        """Return what the head sees. `recompute`: checkpoint activations, True for reentrantly."""
        dtype = DTYPES[self.shape["dtype"]]
        h = self.input(x if self.shape["tokens"] else x.to(dtype)).float()
        for block, (_, kind) in zip(self.blocks, self.shape["blocks"], strict=True):
            h = h.to(DTYPES[kind])
            if recompute is None:
                h = block(h).float()
            else:
                h = checkpoint(block, h, use_reentrant=recompute).float()
        return h

    def forward(self, x: Tensor, recompute: bool | None = None) -> Tensor:
        h = self.encode(x, recompute).to(DTYPES[self.shape["dtype"]])
        if self.shape["head"] == "fused" and self.training:
            out = functional.linear(h, self.head.weight)
        else:
            out = self.head(h)
        return (out + self.late(out)).float()

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, without calling the model or the head: a fused loss."""
        h = self.encode(x).to(DTYPES[self.shape["dtype"]])
        out = functional.linear(h, self.head.weight, self.head.bias)
        return (out + self.late(out)).float().sub(target).square().mean()

    def penalty(self) -> Tensor:
        """Return a number that depends on parameters, calling no module."""
        return sum((p.float().square().sum() for p in self.parameters()), torch.zeros(()))


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw the shape of a model."""
    kind = rng.choice(["bf16", "bf16", "bf16", "fp16", "fp32", "mixed"])
    names = rng.choices(sorted(BLOCKS), k=rng.randint(1, 3))

    def dtype(name: str) -> str:
        if name in ONLY_FP32:
            return "fp32"
        return rng.choice(["bf16", "bf16", "fp16", "fp32"]) if kind == "mixed" else kind

    tokens = rng.random() < 0.5
    heads = ["linear", "linear", "fused"] + (["tied", "tied"] if tokens else [])
    return {
        "blocks": [(name, dtype(name)) for name in names],
        "tokens": tokens,
        "width": rng.choice([4, 6, 10, 14]),
        "hidden": rng.choice([5, 8, 11, 17]),
        "head": rng.choice(heads),
        "dtype": dtype("head"),
    }
