"""Compiled kernels: what is asked of CuPy; what is kept between processes, whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gds.errors import DeviceLostError, RefusedError
from offload.device.kernels.loading import OPTIONS, directory, load
from tests.fake_gpu.machine import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    fake = FakeGpu(number=3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def asked(gpu: FakeGpu, source: str = "source", options: Any = ()) -> list[str]:
    """Load a kernel, and return what was asked of CuPy for it."""
    gpu.kernels.clear()
    load(source, ["first"], 3, options)
    return [kernel[0] for kernel in gpu.kernels]


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


def test_it_is_compiled_once_for_everything_that_it_depends_on(gpu, monkeypatch):
    assert asked(gpu) == ["compile", "load"]
    assert asked(gpu) == ["load"], "the next process finds it"
    for given in ({"source": "source "}, {"options": ["-DX"]}):
        assert asked(gpu, **given) == ["compile", "load"]
        assert asked(gpu, **given) == ["load"]
    for owner, name, value in (
        (sys.modules["cupy.cuda.nvrtc"], "getVersion", lambda: (13, 1)),
        (sys.modules["cupy"], "__version__", "15.0.0"),
        (sys.modules["cupy.cuda"].Device, "compute_capability", "100"),
    ):
        monkeypatch.setattr(owner, name, value)
        assert asked(gpu) == ["compile", "load"]
        assert asked(gpu) == ["load"]


def test_they_are_kept_in_the_users_cache_directory(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert directory() == Path("/somewhere/ssd-offload/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setenv("HOME", "/home/user")
    assert directory() == Path("/home/user/.cache/ssd-offload/kernels")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is without a home
    for _ in range(2):
        assert asked(gpu) == ["compile", "load"]
    assert list(tmp_path.iterdir()) == []


def flip(at: int) -> Callable[[Path], object]:
    def spoil(entry: Path) -> None:
        content = bytearray(entry.read_bytes())
        content[at] ^= 1
        entry.write_bytes(content)

    return spoil


def tear(length: int) -> Callable[[Path], object]:
    return lambda entry: os.truncate(entry, length)


def share(parent: int, mode: int) -> Callable[[Path], object]:
    """Let others write to the entry, or to a directory above it."""

    def spoil(entry: Path) -> None:
        target = (entry, *entry.parents)[parent]
        target.chmod(target.stat().st_mode | mode)

    return spoil


def replace(make: Callable[[Path, Path], object]) -> Callable[[Path], object]:
    def spoil(entry: Path) -> None:
        aside = entry.parents[1] / "aside"
        entry.rename(aside)
        make(entry, aside)

    return spoil


MENDED = {
    **{f"torn-at-{length}": tear(length) for length in (0, 10, 40)},
    **{f"flipped-at-{at}": flip(at) for at in (0, 25, 35, -1)},
    "a-link": replace(lambda entry, aside: entry.symlink_to(aside)),
}
NOT_USED = {
    "writable-by-the-group": share(0, 0o020),
    "directory-writable-by-all": share(1, 0o002),
    "cache-writable-by-the-group": share(2, 0o020),
    "a-pipe": replace(lambda entry, _: os.mkfifo(entry)),
    "a-directory": replace(lambda entry, _: entry.mkdir()),
}


@pytest.mark.parametrize("case", [*MENDED, *NOT_USED])
def test_what_is_damaged_or_may_be_anothers_is_compiled_anew(case, gpu):
    assert asked(gpu) == ["compile", "load"]
    (entry,) = directory().iterdir()
    (MENDED | NOT_USED)[case](entry)
    assert asked(gpu) == ["compile", "load"]
    if case in MENDED:
        assert asked(gpu) == ["load"], "it has been replaced"
    elif "directory-" in case or "cache-" in case:
        assert asked(gpu) == ["compile", "load"], "nothing is kept there"


def test_another_users_are_not_used_and_a_full_disk_is_done_without(gpu, monkeypatch):
    assert asked(gpu) == ["compile", "load"]
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 12345)
        assert asked(gpu) == ["compile", "load"]
    assert asked(gpu) == ["load"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = list(directory().iterdir())
    monkeypatch.setattr(os, "replace", full)
    for _ in range(2):
        assert asked(gpu, source="another") == ["compile", "load"]
    assert list(directory().iterdir()) == before


def test_what_the_driver_does_not_load_is_compiled_anew(gpu):
    load("source", ["first"], 3)
    (path,) = directory().iterdir()
    before = path.stat().st_ino
    gpu.refused_binary = b"binary"
    with pytest.raises(RefusedError, match="NO_BINARY"):
        asked(gpu)  # this driver takes none that is compiled here
    assert [kernel[0] for kernel in gpu.kernels] == ["compile"]
    assert path.stat().st_ino == before


class CompileError(Exception):
    """As CuPy's, which is no `RuntimeError`."""


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (CompileError("nvrtc: error: invalid value for --gpu-architecture"), RefusedError),
        (RuntimeError("CuPy failed to load libnvrtc.so.13"), RefusedError),
        (ImportError("libnvrtc.so.13: cannot open shared object file"), RefusedError),
        (
            RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered"),
            DeviceLostError,
        ),
    ],
    ids=["refused", "no-library", "no-import", "lost"],
)
def test_a_gpu_for_which_nothing_can_be_compiled_is_named(error, named, gpu, monkeypatch):
    def refuse(source: str, *, options: object) -> None:
        raise error

    compiler = sys.modules["cupy.cuda.compiler"]
    monkeypatch.setattr(compiler, "compile_using_nvrtc", refuse)
    monkeypatch.setattr(compiler, "CompileException", CompileError)
    with pytest.raises(named) as caught:
        load("source", ["first"], 3)
    said = ["the GPU is lost"]
    if named is RefusedError:
        said = ["cuda:3", "compute capability 90", str(error), 'placement="host"']
    assert [words for words in said if words not in str(caught.value)] == []
    assert not directory().exists(), "nothing of it is kept"
