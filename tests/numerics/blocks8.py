"""Moments to encode in 8 bits, and what should become of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload.update.coding.codecs import Scratch, decode_blocks, encode_blocks

BLOCK = 32
SIGNED, UNSIGNED = torch.int8, torch.uint8
BOTH = pytest.mark.parametrize("dtype", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])

# Of codes: FP32 rounds a few times before the code is rounded, so that almost-ties may go astray.
ALMOST = 1e-3


def encode(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((len(values),), 77, dtype=dtype)
    scales = torch.full((-(-len(values) // BLOCK),), 77.0, dtype=torch.bfloat16)
    before = values.clone()
    encode_blocks(values, codes, scales, scratch=Scratch())
    assert torch.equal(before.view(torch.int32), values.view(torch.int32))
    return codes, scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(codes),), 77.0)
    before = codes.clone()
    decode_blocks(codes, scales, out, scratch=Scratch())
    assert torch.equal(before, codes)
    return out


def recode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return decode(*encode(values, dtype))


def scale_bits(scales: torch.Tensor) -> np.ndarray:
    return scales.view(torch.int16).numpy().view(np.uint16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def per_element(scales: torch.Tensor, num: int) -> np.ndarray:
    return np.repeat(scales.double().numpy(), BLOCK)[:num]


def largest_of_blocks(values: torch.Tensor) -> np.ndarray:
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK, dtype=values.numpy().dtype)
    padded[: len(values)] = np.abs(values.numpy())
    return padded.reshape(-1, BLOCK).max(axis=1)


def rounded_up(largest: np.ndarray) -> np.ndarray:
    """Return bf16 bits of FP32 values: up, except from up to 2 (or 3, to even) units above."""
    bits = largest.view(np.uint32).astype(np.uint64) + 0x7FFD
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def expected_codes(values: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and the bits of scales, in numpy's FP32: the oracle for finite values."""
    v, largest = values.numpy(), largest_of_blocks(values)
    assert v.dtype == largest.dtype == np.float32
    one = np.float32(1)
    with np.errstate(all="ignore"):
        if dtype == SIGNED:
            bits = rounded_up(largest)
            s = np.repeat(np.maximum(floats(bits), np.float32(2.0**-149)), BLOCK)[: len(v)]
            return np.rint(np.float32(254) * v / (np.abs(v) + s)).astype(np.int8), bits
        bits = rounded_up(one / (one / np.sqrt(largest)))
        s = np.repeat(np.maximum(floats(bits), np.float32(2.0**-100)), BLOCK)[: len(v)]
        codes = np.rint(np.float32(255) * (one / s) / (one / np.sqrt(v)))
    return np.maximum(codes, v > 0).astype(np.uint8), bits


def expected_values(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    c = codes.numpy().astype(np.float32)
    s = np.repeat(floats(scale_bits(scales)), BLOCK)[: len(c)]
    if codes.dtype == SIGNED:
        return c / (np.float32(254) - np.abs(c)) * s
    root = c * np.float32(1 / 255) * s
    return root * root


def normal(num: int, seed: int) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def wide(num: int, seed: int, lowest: int = -126, highest: int = 119) -> torch.Tensor:
    """Return values of every magnitude in the same blocks."""
    exponents = torch.randint(
        lowest, highest, (num,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.ldexp(normal(num, seed + 1).clamp(-1.9, 1.9), exponents)


def dead_units(num: int, seed: int) -> torch.Tensor:
    values = normal(num, seed)
    values[::7] = 0
    values[::11] = -0.0
    values[64:160] = 0
    return values


MOMENTS = {
    "normal": lambda: normal(20_000, 1),
    "tiny": lambda: 1e-14 * normal(20_000, 2),
    "tiny-second-moments": lambda: 1e-30 * normal(20_000, 3),
    "denormal": lambda: torch.ldexp(normal(20_000, 4), torch.tensor(-140)),
    "almost-denormal": lambda: torch.ldexp(normal(20_000, 5), torch.tensor(-124)),
    "huge": lambda: torch.ldexp(normal(20_000, 6).clamp(-3.9, 3.9), torch.tensor(118)),
    "heavy-tails": lambda: normal(20_000, 7) / normal(20_000, 8),
    "every-magnitude": lambda: wide(20_000, 9),
    "block-by-block-another": lambda: (
        normal(20_000, 10) * torch.logspace(-35, 30, 625).repeat_interleave(BLOCK)
    ),
    "equal": lambda: torch.full((1000,), 0.1),
    "zeros": lambda: torch.zeros(1000),
    "negative-zeros": lambda: -torch.zeros(1000),
    "dead-units": lambda: dead_units(20_000, 11),
    "no-whole-block": lambda: normal(31, 12),
    "a-last-block-of-1": lambda: normal(6401, 13),
    "one": lambda: normal(1, 14),
    "none": lambda: torch.zeros(0),
}


def moments(name: str, dtype: torch.dtype) -> torch.Tensor:
    values = MOMENTS[name]()
    return values if dtype == SIGNED else torch.where(values == 0, values, values.abs())


# Where bfloat16 can hold the scale to eight bits.
NORMAL = [n for n in MOMENTS if n not in ("denormal", "zeros", "negative-zeros", "none")]
