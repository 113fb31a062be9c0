"""Blocks to step: parameters, gradients and state of every form, with all kinds of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from offload.device.kernels.forms import Form
from offload.device.kernels.update import DeviceRun
from offload.format import rounding_keys
from offload.update.coding import blocks8, rounding
from offload.update.scratch import Scratch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK = 32


MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class DeviceBlock:
    """Elements of one parameter: a run of one piece."""

    live: torch.Tensor
    gradient: torch.Tensor
    arrays: Mapping[str, torch.Tensor]
    first_element: int = 0
    parameter: str = "weight"
    is_new: bool = False

    def run(self, seed: int = 0, rounding_step: int = 0) -> DeviceRun:
        return DeviceRun(
            live=[self.live],
            gradients=[self.gradient],
            arrays=self.arrays,
            first_elements=[self.first_element],
            keys=keys_of([self.parameter], [*self.arrays], seed, rounding_step),
            is_new=self.is_new,
        )


def keys_of(parameters, arrays, seed: int, step: int):
    """Return the keys of pieces, given their parameters' names."""

    numbers = rounding_keys.name_numbers(parameters)

    def key(array: str, piece: int, first: int) -> int:
        keys = rounding_keys.ParameterKeys(numbers, seed, array, step)
        low, high = keys.of(piece)(int(first) >> rounding_keys.WINDOW_BITS)
        return low | high << 32

    def keys(pieces, firsts):
        moments = [name for name in MOMENTS if name in arrays]
        return [
            np.array([key(m, p, f) for p, f in zip(pieces, firsts, strict=True)], np.uint64)
            for m in moments
        ]

    return keys


def normal(num: int, seed: int) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def wide(num: int, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes, denormal to huge, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 120, (num,), generator=generator)
    values = torch.ldexp(torch.rand(num, generator=generator) + 1, exponents)
    values *= torch.randint(0, 2, (num,), generator=generator) * 2 - 1
    values[5::17] = 0.0
    values[6::17] = -0.0
    return values


def odd(num: int, seed: int) -> torch.Tensor:
    """The same, with infinities and NaNs, some of odd bits."""
    values = wide(num, seed)
    values[3::29] = math.inf
    values[4::31] = -math.inf
    values[7::37] = math.nan
    bits = values.view(torch.int32)
    bits[8::41] = 0x7F80_0001  # signalling; rounded as a number it would be an infinity
    bits[9::43] = -1
    return values


def numbers(kind: str, num: int, seed: int) -> torch.Tensor:
    return {"normal": normal, "wide": wide, "odd": odd}[kind](num, seed)


def flat(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy that begins so many elements after an aligned address."""
    base = torch.empty(len(values) + offset, dtype=values.dtype)
    return base[offset:].copy_(values)


class State:
    """FP32 values of a block, and the same in a form that is stored."""

    def __init__(self, kind: str, num: int, num_moments: int) -> None:
        self.master = numbers(kind, num, 1)
        self.gradient = numbers(kind, num, 2)
        self.moments = [numbers(kind, num, 3 + k) for k in range(num_moments)]
        if kind == "normal":
            self.moments = [0.01 * m for m in self.moments]
        for k in range(1, num_moments):
            self.moments[k].abs_()

    def stored(
        self,
        form: Form,
        *,
        offset: int = 0,
        is_new: bool = False,
        first: int = 0,
        parameter: str = "weight",
    ) -> DeviceBlock:
        num = len(self.master)
        scratch = Scratch()
        arrays: dict[str, torch.Tensor] = {}
        if form.master == "own":
            live = self.master.clone()
        elif form.master == "float32":
            arrays["master"] = self.master.clone()
            live = self.master.to(form.live)
        else:
            live, arrays["master_low"] = torch.empty(num, dtype=BF16), torch.empty(num).short()
            rounding.split_master(self.master, live, arrays["master_low"], scratch=scratch)
        for k, name in enumerate(form.moments):
            values = self.moments[k]
            if form.state == "float32":
                arrays[name] = values.clone()
            elif form.state == "bfloat16":
                arrays[name] = values.bfloat16()
            else:
                codes = torch.empty(num, dtype=torch.uint8 if k else torch.int8)
                scales = torch.empty(-(-num // BLOCK), dtype=BF16)
                blocks8.encode_blocks(values, codes, scales, scratch=scratch)
                arrays[name], arrays[name + "_scale"] = codes, scales
        return DeviceBlock(
            live=flat(live, offset),
            gradient=flat(self.gradient.to(form.gradient), offset),
            arrays={name: flat(array, offset) for name, array in arrays.items()},
            first_element=first,
            parameter=parameter,
            is_new=is_new,
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    )


def contents(block: DeviceBlock) -> dict[str, torch.Tensor]:
    return {"live": block.live, **block.arrays}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return how many values differ in a bit, for the tensors where any do.

    One NaN is like another: which of two operands' bits a processor keeps is its own affair. But
    a scale that is NaN has certain bits, and the codes under it are 0.
    """
    assert found.keys() == expected.keys()
    counts = {}
    for name, values in found.items():
        differ = bits(values) != bits(expected[name])
        if values.is_floating_point() and not name.endswith("_scale"):
            differ &= ~(values.isnan() & expected[name].isnan())
        counts[name] = int(differ.sum())
    return {n: count for n, count in counts.items() if count}


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether FP32 values are equal to the bit, one NaN being like another."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the greatest distance in units of the last place; NaNs must be in the same places."""
    assert torch.equal(a.isnan(), b.isnan())
    ordered = [
        torch.where(x < 0, -(x.to(torch.int64) & 0x7FFF_FFFF), x.to(torch.int64))
        for x in (bits(a[~a.isnan()]), bits(b[~b.isnan()]))
    ]
    return int((ordered[0] - ordered[1]).abs().max()) if len(a) else 0
