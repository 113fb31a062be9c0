"""Models of parameters only: a step does its real work, but the compute takes almost no time.

This module imports only torch, so that it runs in any environment that a peer needs.
"""

from __future__ import annotations

import time
from typing import Any

import torch

_SEED = 1234


def make_parameters(
    num_parameters: int, num_tensors: int, *, seed: int = _SEED
) -> list[torch.nn.Parameter]:
    """Return bf16 parameters of equal size (the last takes the remainder)."""
    generator = torch.Generator().manual_seed(seed)
    each = num_parameters // num_tensors
    sizes = [each] * (num_tensors - 1) + [num_parameters - each * (num_tensors - 1)]
    return [
        torch.nn.Parameter(
            torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        )
        for size in sizes
    ]


def make_gradients(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return fixed random gradients, one for each parameter."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    return [
        torch.empty(p.shape, dtype=p.dtype).normal_(0, 0.01, generator=generator)
        for p in parameters
    ]


class _Dense(torch.autograd.Function):
    """Function that takes almost no time, but gives every element of the weight a gradient.

    The forward reads a few elements. The backward returns a copy of a fixed tensor.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the first elements of the weight."""
        ctx.gradient = gradient
        return weight.reshape(-1)[:8].float().sum()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return a copy of the fixed gradient."""
        del outputs
        return ctx.gradient.clone(), None


class Layer(torch.nn.Module):
    """Layer with one large weight, whose forward can be made to last, as on an accelerator."""

    def __init__(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self._gradient = gradient
        self.forward_s = 0.0
        """Seconds that the forward sleeps, without using the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus a number that depends on the weight."""
        if self.forward_s:
            time.sleep(self.forward_s)
        added: torch.Tensor = _Dense.apply(self.weight, self._gradient)  # type: ignore[no-untyped-call]
        return x + added


class Stack(torch.nn.Module):
    """Layers of equal size, one after another."""

    def __init__(self, num_layers: int, layer_parameters: int, *, seed: int = _SEED) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows = 4096 if layer_parameters % 4096 == 0 else 1
        shape = (rows, layer_parameters // rows)
        gradient = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.01, generator=generator)
        self.layers = torch.nn.ModuleList(
            Layer(
                torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator),
                gradient,
            )
            for _ in range(num_layers)
        )

    def set_forward_s(self, seconds: float) -> None:
        """Make one forward through all layers last this many seconds."""
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer.forward_s = seconds / len(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar that depends on every layer."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()
