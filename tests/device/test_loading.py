"""What is asked of CuPy to compile and launch a kernel, on a CuPy that writes it down."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from offload.device.kernels.loading import load
from offload.device.kernels.sources import OPTIONS


class FakeCupy:
    """Has what is used of CuPy, and nothing else."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.devices: list[int] = []

    def modules(self) -> dict[str, types.ModuleType]:
        cupy, cuda, compiler = (
            types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.compiler")
        )
        cuda.Device = self.device  # type: ignore[attr-defined]
        cuda.Module = lambda: self  # type: ignore[attr-defined]
        compiler.compile_using_nvrtc = self.compile  # type: ignore[attr-defined]
        cupy.cuda, cuda.compiler = cuda, compiler  # type: ignore[attr-defined]
        return {module.__name__: module for module in (cupy, cuda, compiler)}

    @contextlib.contextmanager
    def device(self, number: int):
        self.devices.append(number)
        yield
        self.devices.pop()

    def compile(self, source: str, *, options: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        self.calls.append(("compile", source, options, *self.devices))
        return b"binary", {}

    def load(self, binary: bytes) -> None:
        self.calls.append(("load", binary, *self.devices))

    def get_function(self, name: str) -> Any:
        def launch(grid, block, arguments, *, stream):
            self.calls.append((name, grid, block, arguments, stream.ptr, *self.devices))

        return launch


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_kernels_are_compiled_with_our_options_alone_and_launched_on_the_stream(cupy):
    first, second = load("source", ["first", "second"], 3, ("-DRULE=1",))
    assert cupy.calls == [
        ("compile", "source", (*OPTIONS, "-DRULE=1"), 3),
        ("load", b"binary", 3),
    ]
    assert "-ftz=false" in OPTIONS
    cupy.calls.clear()
    arguments = (np.uint64(7),)
    second.launch(5, 256, arguments, stream=0xABC)
    first.launch(1, 32, arguments, stream=0)
    assert cupy.calls == [
        ("second", (5,), (256,), arguments, 0xABC, 3),
        ("first", (1,), (32,), arguments, 0, 3),
    ]
    assert cupy.devices == []
