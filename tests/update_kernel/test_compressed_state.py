"""State of any form has the same bytes after a step by the kernel and after one by torch's code.

NaN are an exception at the ends of torch's vectors: torch's scalar code makes other NaN there than
its vector code, so that those of torch's own step depend on where it is cut.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch

from offload.format.arrays import MasterFormat, StateDtype
from tests.update_kernel.chunk_steps import ChunkStep, Parameter
from tests.update_kernel.steps import kernel_for

ADAMS: list[dict[str, Any]] = [
    {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay, "betas": betas}
    for amsgrad, maximize, decay, betas in product(
        (False, True), (False, True), (0.0, 0.1), ((0.9, 0.999), (0.4, 0.6))
    )
]
SGDS: list[dict[str, Any]] = [
    {"lr": 0.1, "maximize": maximize, "weight_decay": decay, **momentum}
    for maximize, decay, momentum in product(
        (False, True),
        (0.0, 0.1),
        (
            {},
            {"momentum": 0.9},
            {"momentum": 0.8, "dampening": 0.3},
            {"momentum": 0.9, "nesterov": True},
        ),
    )
]
OPTIMIZERS = {
    torch.optim.AdamW: ADAMS,
    torch.optim.Adam: ADAMS,
    torch.optim.SGD: SGDS,
}
FORMS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
]
"""Dtypes of a parameter and of its gradient."""

by_state = pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda found: found.__name__)
by_kind = pytest.mark.parametrize("kind", ["ordinary", "wide", "bits"])


@by_kind
@by_optimizer
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_whole_vectors_with_every_flag_and_dtype(
    state_dtype: StateDtype, optimizer: type[torch.optim.Optimizer], kind: str
) -> None:
    kernel = kernel_for(optimizer, state_dtype)
    for seed, changes in enumerate(OPTIMIZERS[optimizer]):
        for master in ("float32", "split"):
            flushes = (seed + (master == "split")) % 2 == 0
            given, gradient = FORMS[seed % len(FORMS)]
            one = ChunkStep(
                optimizer,
                [Parameter(32 * 200, given, gradient)],
                [changes],
                master,
                state_dtype,
                kind,
                seed=seed,
            )
            found = one.taken(kernel, flushes=flushes)
            assert found.differences(one.taken(None, flushes=flushes)) == [], (changes, master)


def many_parameters(draw: random.Random, num_groups: int) -> list[Parameter]:
    """Return parameters of every length to 100 and some longer ones, in random forms.

    Some have no gradient in this step, and some have no state yet.
    """
    lengths = [*range(1, 101), 33, 4097, 2048, 7, 8191]
    draw.shuffle(lengths)
    found = []
    for num in lengths:
        given, gradient = draw.choice(FORMS)
        chance = draw.random()
        found.append(
            Parameter(
                num,
                given,
                None if chance < 0.1 else gradient,
                group=draw.randrange(num_groups),
                is_new=0.07 < chance < 0.15,
            )
        )
    return found


@by_kind
@by_optimizer
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_many_parameters_in_chunks_on_several_threads(
    state_dtype: StateDtype, optimizer: type[torch.optim.Optimizer], kind: str
) -> None:
    # torch.maximum itself flushes in vectors, and not at their ends.
    is_consistent = optimizer is torch.optim.SGD or state_dtype != "float32" or kind != "bits"
    kernel = kernel_for(optimizer, state_dtype)
    ways: list[tuple[int, int, MasterFormat, tuple[float, ...]]] = [
        (1, 1 << 20, "float32", ()),
        (2, 4096, "split", (2.0, 0.5, 3.0, 0.25, 0.9)),  # more than the kernel takes at last
        (3, 1024, "float32", (2.0**-10, 0.3)),
    ]
    for seed, (threads, chunk_elements, master, factors) in enumerate(ways):
        groups = OPTIMIZERS[optimizer]
        one = ChunkStep(
            optimizer,
            many_parameters(random.Random(seed), len(groups)),
            groups,
            master,
            state_dtype,
            kind,
            chunk_elements,
            step=(1, 7, 100_000)[seed],
            factors=factors,
            seed=seed,
        )
        flushes = is_consistent and seed != 1
        found = one.taken(kernel, threads=threads, flushes=flushes)
        expected = one.taken(None, threads=threads, flushes=flushes)
        assert found.differences(expected, any_nan=kind == "bits") == [], (threads, master)


SCALES = {
    "zero": 0x0000,
    "minus zero": 0x8000,
    "smallest": 0x0001,
    "denormal": 0x0040,
    "smallest normal": 0x0080,
    "below 2**-100": 0x0D7F,
    "2**-100": 0x0D80,
    "one": 0x3F80,
    "negative": 0xBF81,
    "2**63": 0x5F00,
    "2**119": 0x7B00,
    "2**120": 0x7B80,
    "largest": 0x7F7F,
    "infinity": 0x7F80,
    "NaN": 0x7FC0,
    "negative NaN": 0xFFC1,
}
"""Bits of bfloat16 scales."""


@by_optimizer
def test_scales_and_codes_of_every_kind(optimizer: type[torch.optim.Optimizer]) -> None:
    kernel = kernel_for(optimizer, "int8")
    kinds = torch.tensor(list(SCALES.values())).to(torch.uint16).view(torch.bfloat16)
    for seed, changes in enumerate(OPTIMIZERS[optimizer]):
        num = 32 * len(SCALES) * 8 + 5
        parameters = [Parameter(num, *FORMS[seed % len(FORMS)])]
        one = ChunkStep(optimizer, parameters, [changes], "float32", "int8", "wide", seed=seed)
        (arrays,) = one.stored
        for name, values in arrays.items():
            if name.endswith("_scale"):
                values.copy_(kinds.repeat(len(values) // len(kinds) + 1)[: len(values)])
                values[:] = values.roll(3 * ("sq" in name))
            elif values.dtype == torch.uint8:
                values[: 256 * 16] = torch.arange(256).to(torch.uint8).repeat(16)
        flushes = seed % 2 == 1
        found = one.taken(kernel, flushes=flushes)
        expected = one.taken(None, flushes=flushes)
        assert found.differences(expected, any_nan=True) == [], changes


GRADIENTS = {
    "zeros": 0.0,
    "minus zeros": -0.0,
    "denormal": 1e-42,
    "of a denormal square": 1e-20,
    "2**60": 2.0**60,
    "of an infinite square": 1e30,
    "infinity": float("inf"),
    "NaN": float("nan"),
}


@by_optimizer
@by_state
def test_blocks_that_meet_a_special_gradient(
    state_dtype: StateDtype, optimizer: type[torch.optim.Optimizer]
) -> None:
    kernel = kernel_for(optimizer, state_dtype)
    for seed, changes in enumerate(OPTIMIZERS[optimizer]):
        whole, flushes = seed % 2 == 0, seed // 2 % 2 == 0
        parameters = [Parameter(32 * 4 * len(GRADIENTS), torch.float32, torch.float32)]
        one = ChunkStep(optimizer, parameters, [changes], "float32", state_dtype, seed=seed)
        (gradient,) = one.gradients
        for number, value in enumerate(GRADIENTS.values()):
            block = gradient[128 * number :][:128]
            if whole:
                block[:] = value
            else:
                block[5::37] = value
        found = one.taken(kernel, flushes=flushes)
        assert found.differences(one.taken(None, flushes=flushes)) == [], changes
