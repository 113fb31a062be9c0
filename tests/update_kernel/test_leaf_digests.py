"""Digests that the kernel computes while it steps are those of the bytes that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from offload.format.arrays import MasterFormat, StateDtype
from offload.format.digests import LEAF_BYTES, DigestContext
from tests.update_kernel.chunk_steps import ChunkStep, Parameter, Taken
from tests.update_kernel.steps import kernel_for

CONTEXT = DigestContext("a store", 3)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = [
    Parameter(300_001, BF16, BF16),
    Parameter(33, FP16, FP16),
    Parameter(500_000, FP16, FP32),
    Parameter(1, FP32, FP32),
    Parameter(400_123, FP32, FP32),
    Parameter(900_000, BF16, FP32),
    *(Parameter(n, BF16, BF16) for n in range(1, 40)),
]
GAPS = [
    Parameter(262_144, FP32, FP32),  # its state ends where a leaf ends
    Parameter(17, FP32, None),
    Parameter(600_000, FP32, FP32),
    Parameter(70_000, BF16, BF16, is_new=True),
    Parameter(70_000, FP16, FP16, group=1),
    Parameter(5, BF16, None, is_new=True),
    Parameter(1_000_000, BF16, BF16),
    Parameter(100_000, FP32, torch.float64),
    Parameter(262_144, FP16, None),
    Parameter(300_000, FP16, FP16),
]
LAYOUTS = {"mixed": MIXED, "with-gaps": GAPS}


def finished(taken: Taken) -> tuple[list[dict[str, str]], int]:
    """Return the digests of each chunk, and the number of leaves that nobody had digested."""
    num_left = 0

    def run(function: Callable[[memoryview], bytes], items: Sequence[memoryview]) -> list[bytes]:
        nonlocal num_left
        num_left += len(items)
        return [function(item) for item in items]

    return [told.finish(CONTEXT, n, run) for n, told in enumerate(taken.digests)], num_left


def of_bytes(taken: Taken) -> list[dict[str, str]]:
    """Return the same digests, computed from the bytes afterwards."""
    return [
        {
            name: CONTEXT.digest(name, number, memoryview(values.view(torch.uint8).numpy()))
            for name, values in arrays.items()
        }
        for number, arrays in enumerate(taken.stored)
    ]


def step(layout: str, state_dtype: StateDtype, master: MasterFormat, chunk: int) -> ChunkStep:
    groups = [{"amsgrad": True}, {"foreach": True}]
    return ChunkStep(
        torch.optim.AdamW, LAYOUTS[layout], groups, master, state_dtype, chunk_elements=chunk
    )


@pytest.mark.parametrize(
    ("state_dtype", "master", "threads", "chunk_elements"),
    [
        ("float32", "float32", 1, 1 << 22),
        ("float32", "split", 2, 1 << 20),
        ("bfloat16", "split", 5, 1 << 22),
        ("bfloat16", "float32", 1, 1 << 20),
        ("int8", "float32", 2, 1 << 22),
        ("int8", "split", 5, 1 << 20),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_digests_are_those_of_the_bytes(
    layout: str,
    state_dtype: StateDtype,
    master: MasterFormat,
    threads: int,
    chunk_elements: int,
) -> None:
    kernel = kernel_for(torch.optim.AdamW, state_dtype)
    taken = step(layout, state_dtype, master, chunk_elements).taken(kernel, threads=threads)
    found, _ = finished(taken)
    assert found == of_bytes(taken)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_one_thread_leaves_no_leaf_to_digest_again(state_dtype: StateDtype) -> None:
    kernel = kernel_for(torch.optim.AdamW, state_dtype)
    taken = step("mixed", state_dtype, "split", 1 << 22).taken(kernel)
    assert max(v.nbytes for v in taken.stored[0].values()) > 2 * LEAF_BYTES
    found, num_left = finished(taken)
    assert found == of_bytes(taken)
    assert num_left == 0


def test_a_parameter_without_state_arrays_leaves_the_digests_of_others_right() -> None:
    kernel = kernel_for(torch.optim.SGD, "float32")
    parameters = [Parameter(400_000, FP32, FP32, group=number % 2) for number in range(6)]
    one = ChunkStep(torch.optim.SGD, parameters, [{}, {"momentum": 0.9}])
    for threads in (1, 2):
        taken = one.taken(kernel, threads=threads)
        assert finished(taken)[0] == of_bytes(taken)
