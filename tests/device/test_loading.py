"""What is asked of CuPy to compile and launch a kernel, on a CuPy that writes it down."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from offload.device.kernels.loading import load
from offload.device.kernels.sources import OPTIONS
from tests.fake_gpu.machine import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu(number=3)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_kernels_are_compiled_with_our_options_alone_and_launched_on_the_stream(gpu):
    first, second = load("source", ["first", "second"], 3, ("-DRULE=1",))
    assert gpu.kernels == [
        ("compile", "source", (*OPTIONS, "-DRULE=1"), 3),
        ("load", b"binary", 3),
    ]
    assert "-ftz=false" in OPTIONS
    gpu.kernels.clear()
    arguments = (np.uint64(7),)
    second.launch(5, 256, arguments, stream=0xABC)
    first.launch(1, 32, arguments, stream=0)
    assert gpu.kernels == [
        ("second", (5,), (256,), arguments, 0xABC, 3),
        ("first", (1,), (32,), arguments, 0, 3),
    ]
    assert gpu.current.number == 0
