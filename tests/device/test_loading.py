"""What is asked of CuPy to compile and launch a kernel, on a CuPy that writes it down."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gds.errors import DeviceLostError, RefusedError
from offload.device.kernels.binary_cache import directory
from offload.device.kernels.loading import load
from offload.device.kernels.sources import OPTIONS
from tests.fake_gpu.machine import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    fake = FakeGpu(number=3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def operations(gpu: FakeGpu) -> list[str]:
    return [kernel[0] for kernel in gpu.kernels]


def test_what_was_compiled_is_loaded_by_the_next_process(gpu):
    load("source", ["first"], 3)
    gpu.kernels.clear()
    (kernel,) = load("source", ["first"], 3)
    assert gpu.kernels == [("load", b"binary", 3)]
    kernel.launch(1, 32, (), stream=0)
    assert operations(gpu) == ["load", "first"]


def test_it_is_compiled_anew_for_everything_that_it_depends_on(gpu, monkeypatch):
    load("source", ["first"], 3)
    changes = [
        lambda: load("source ", ["first"], 3),
        lambda: load("source", ["first"], 3, ["-DX"]),
        lambda: monkeypatch.setattr(sys.modules["cupy.cuda.nvrtc"], "getVersion", lambda: (13, 1)),
        lambda: monkeypatch.setattr(sys.modules["cupy"], "__version__", "15.0.0"),
        lambda: monkeypatch.setattr(sys.modules["cupy.cuda"].Device, "compute_capability", "100"),
    ]
    for change in changes:
        gpu.kernels.clear()
        change()
        load("source", ["first"], 3)
        assert operations(gpu).count("compile") == 1
        gpu.kernels.clear()
        load("source", ["first"], 3)
        assert operations(gpu) == ["load"]


def test_what_the_driver_does_not_load_is_compiled_anew(gpu):
    load("source", ["first"], 3)
    (path,) = directory().iterdir()
    before = path.stat().st_ino
    gpu.refused_binary = b"binary"
    gpu.kernels.clear()
    with pytest.raises(RefusedError, match="NO_BINARY"):
        load("source", ["first"], 3)  # this driver takes none that is compiled here
    assert operations(gpu) == ["compile"]
    assert path.stat().st_ino == before


class CompileError(Exception):
    """As CuPy's, which is no `RuntimeError`."""


@pytest.mark.parametrize(
    "error",
    [
        CompileError("nvrtc: error: invalid value for --gpu-architecture (-arch)"),
        RuntimeError("CuPy failed to load libnvrtc.so.13"),
        ImportError("libnvrtc.so.13: cannot open shared object file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_gpu_for_which_nothing_can_be_compiled_is_named(error, gpu, monkeypatch):
    def refuse(source: str, *, options: object) -> None:
        raise error

    compiler = sys.modules["cupy.cuda.compiler"]
    monkeypatch.setattr(compiler, "compile_using_nvrtc", refuse)
    monkeypatch.setattr(compiler, "CompileException", CompileError)
    with pytest.raises(RefusedError) as caught:
        load("source", ["first"], 3)
    said = str(caught.value)
    assert "cuda:3" in said
    assert "compute capability 90" in said
    assert str(error) in said
    assert 'placement="host"' in said
    assert not directory().exists(), "nothing of it is kept"


def test_a_device_that_is_lost_meanwhile_is_named_as_such(gpu, monkeypatch):
    def lose(source: str, *, options: object) -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules["cupy.cuda.compiler"], "compile_using_nvrtc", lose)
    with pytest.raises(DeviceLostError, match="the GPU is lost"):
        load("source", ["first"], 3)
