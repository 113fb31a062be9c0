"""Compiled kernels: what is asked of CuPy; what is kept between processes, whole or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gds.errors import DeviceLostError, RefusedError
from offload.device.kernels.binary_cache import BinaryCache, directory
from offload.device.kernels.loading import load
from offload.device.kernels.sources import OPTIONS
from tests.fake_gpu.machine import FakeGpu

PARTS = ["source", "-DX=1", "90"]


# The cache. Its own methods are called: no face gives control over two processes at once.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def entry(path: Path) -> Path:
    BinaryCache(path).keep(PARTS, b"machine code" * 1000)
    (found,) = path.iterdir()
    return found


def found(path: Path, parts=PARTS) -> bytes | None:
    return BinaryCache(path).find(parts)


def test_it_is_in_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert directory() == Path("/somewhere/ssd-offload/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setenv("HOME", "/home/user")
    assert directory() == Path("/home/user/.cache/ssd-offload/kernels")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is without a home
    BinaryCache(directory()).keep(PARTS, b"new")
    assert BinaryCache(directory()).find(PARTS) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_is_found_by_all_of_its_parts(path, entry):
    assert found(path) == b"machine code" * 1000
    for parts in (["source", "-DX=1"], ["source-DX=1", "90"], ["source", "-DX=", "190"]):
        assert found(path, parts) is None


@pytest.mark.parametrize("length", [0, 10, 40, 500, None], ids=str)
def test_a_damaged_or_torn_entry_is_not_found_and_is_replaced(length, path, entry):
    whole = entry.read_bytes()
    damaged = [whole[:length]] if length is not None else []
    for at in (0, 25, 60, -1) if length is None else ():
        content = bytearray(whole)
        content[at] ^= 1
        damaged.append(bytes(content))
    for content in damaged:
        entry.write_bytes(content)
        assert found(path) is None
        BinaryCache(path).keep(PARTS, b"new")
        assert found(path) == b"new"


def test_nothing_that_others_can_write_is_trusted_or_written(path, entry, monkeypatch):
    for target in (entry, path, path.parent):
        mode = target.stat().st_mode
        for shared in (0o002, 0o020):
            target.chmod(mode | shared)
            assert found(path) is None
        target.chmod(mode)
        assert found(path)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 12345)
        assert found(path) is None
    elsewhere = path.parent / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    assert found(path) is None
    entry.unlink()
    os.mkfifo(entry)
    assert found(path) is None
    entry.unlink()
    path.chmod(0o777)
    BinaryCache(path).keep(PARTS, b"new")
    assert list(path.iterdir()) == []


def test_what_cannot_be_kept_is_done_without(tmp_path, path, entry, monkeypatch):
    (tmp_path / "file").write_text("no directory")
    cache = BinaryCache(tmp_path / "file" / "kernels")
    cache.keep(PARTS, b"new")
    assert cache.find(PARTS) is None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    BinaryCache(path).keep(["other"], b"new")
    assert list(path.iterdir()) == [entry]


# What is asked of CuPy, on one that writes it down.


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
