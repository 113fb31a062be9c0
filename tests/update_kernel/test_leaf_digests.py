"""Digests that the kernel computes while it steps are those of the bytes that it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.format.digests import LEAF_BYTES
from tests.update_kernel.steps import kernel_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS: dict[str, list[tuple[int, torch.dtype, torch.dtype | None]]] = {
    # Number of elements, dtype of the parameter, dtype of its gradient.
    "mixed": [
        (300_001, BF16, BF16),
        (33, FP16, FP16),
        (500_000, FP16, FP16),
        (1, FP32, FP32),
        (400_123, FP32, FP32),
        *((n, BF16, BF16) for n in range(1, 40)),
    ],
    "with-gaps": [
        (262_144, FP32, FP32),  # its state ends where a leaf ends
        (17, FP32, None),
        (600_000, FP32, FP32),
        (5, BF16, None),
        (70_000, FP16, FP16),
        (1_000_000, BF16, BF16),
        (262_144, FP16, None),
        (300_000, FP16, FP16),
    ],
}
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any], int, int]] = [
    (torch.optim.AdamW, {}, 1, 1 << 24),
    (torch.optim.AdamW, {"master": "split"}, 2, 1 << 22),
    (torch.optim.AdamW, {"master": "split", "state_dtype": "bfloat16"}, 5, 1 << 24),
    (torch.optim.Adam, {"state_dtype": "int8"}, 2, 1 << 22),
    (torch.optim.SGD, {}, 2, 1 << 24),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("optimizer", "form", "threads", "chunk_bytes"), CASES)
def test_a_checkpoint_of_what_the_kernel_has_stepped_is_verified(
    optimizer: type[torch.optim.Optimizer],
    form: dict[str, Any],
    threads: int,
    chunk_bytes: int,
    layout: str,
    tmp_path: Path,
) -> None:
    """The second group runs torch's code; of SGD, the first one alone has state."""
    kernel_for(optimizer, form.get("state_dtype", "float32"))
    parameters = [
        torch.nn.Parameter(torch.linspace(-1, 1, n).to(kind)) for n, kind, _ in LAYOUTS[layout]
    ]
    first = {"momentum": 0.9} if optimizer is torch.optim.SGD else {"amsgrad": True}
    groups = [{"params": parameters[::2], **first}, {"params": parameters[1::2], "foreach": True}]
    options = offload.Options(chunk_bytes=chunk_bytes, **form)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with offload.OffloadedOptimizer(
            optimizer, groups, lr=0.1, directory=str(tmp_path), options=options
        ) as made:
            assert made.stats().update_code.startswith("kernel")
            for _ in range(2):
                for parameter, (n, _, kind) in zip(parameters, LAYOUTS[layout], strict=True):
                    parameter.grad = None if kind is None else torch.linspace(-2, 1, n).to(kind)
                made.step()
            checkpoint = made.checkpoint().result()
            assert max(f.stat().st_size for f in Path(checkpoint.path).iterdir()) > LEAF_BYTES
            assert checkpoint.verify().ok
    finally:
        torch.set_num_threads(before)
