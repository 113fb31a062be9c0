"""Values for the kernel: wide, and random bits with every special number among them."""

from __future__ import annotations

import torch


def wide(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return FP32 values of many magnitudes, with zeros of both signs."""
    scale = torch.empty(num).uniform_(-30, 12, generator=generator).exp_()
    values = torch.randn(num, generator=generator) * scale
    values[::11], values[5::13] = 0.0, -0.0
    return values


def ordinary(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return FP32 values like those of a training."""
    return torch.randn(num, generator=generator) * 0.02


def random_bits(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return FP32 values of random bits: denormal numbers, infinities and NaN are among them."""
    bits = torch.randint(-(1 << 31), 1 << 31, (num,), generator=generator, dtype=torch.int64)
    special = [0, -(1 << 31), 1, -(1 << 31) + 1, 0x7F800000, -0x800000, 0x7FC00000, 0x00800000]
    bits[: len(special)] = torch.tensor(special)
    return bits.to(torch.int32).view(torch.float32)


KINDS = {"ordinary": ordinary, "wide": wide, "bits": random_bits}
