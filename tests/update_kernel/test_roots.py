"""The kernel has the square root of this torch, for every number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.update.kernel import find_library, torchs_root
from offload.update.kernel.loading import Library

_BLOCK = 1 << 24


@pytest.fixture
def library() -> Library:
    found = find_library()
    if isinstance(found, str):
        pytest.skip(found)
    flags = Path("/proc/cpuinfo").read_text().split()
    if (
        found.instructions == "AVX2"
        and "avx512f" in flags
        and os.environ.get("MKL_ENABLE_INSTRUCTIONS", "AVX512") == "AVX512"
    ):
        pytest.skip("torch was told not to use AVX-512, and MKL was not")
    return found


def test_it_has_the_root_of_this_torch(library: Library) -> None:
    assert torchs_root(library) is not None


@pytest.mark.slow
def test_every_number_without_a_sign(library: Library) -> None:
    kind = torchs_root(library)
    assert kind is not None
    for start in range(0, 1 << 31, _BLOCK):
        values = torch.arange(start, start + _BLOCK, dtype=torch.int64).int().view(torch.float32)
        found = library.roots(kind, values)
        assert found is not None
        expected = values.sqrt()
        same = (found.view(torch.int32) == expected.view(torch.int32)) | (
            found.isnan() & expected.isnan()
        )
        assert same.all(), f"bits {start + int((~same).nonzero()[0]):#x}"
