"""The calls of cuFile through ctypes: over C code with the declarations of NVIDIA's headers."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import gds.backends.kvikio_library
from gds.backends.kvikio_library import CuFileLibrary

STUB = Path(__file__).parent.parent / "gds_cli" / "cuda_stub.c"
FAR = 5 << 30
"""An offset that needs more than 32 bits."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("libraries") / "libcufile.so.0"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, STUB], check=True)
    return library


@pytest.fixture
def library(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> CuFileLibrary:
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "false")
    monkeypatch.setattr(gds.backends.kvikio_library, "SONAME", str(compiled))
    return CuFileLibrary()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(opened, FAR + 8192)
    yield opened
    os.close(opened)


def test_bytes_go_where_they_belong_also_far_into_a_file(library, fd):
    handle = library.register(fd)
    memory = (ctypes.c_char * 8192)()
    memory[4096:8192] = bytes(range(256)) * 16
    base = ctypes.addressof(memory)
    assert library.move("write", handle, base, 4096, 4096, FAR) == 4096
    assert os.pread(fd, 4096, FAR) == bytes(range(256)) * 16
    assert library.move("read", handle, base, 0, 4096, FAR) == 4096
    assert memory[:4096] == memory[4096:8192]
    assert library.move("read", handle, base, 0, 4096, FAR + 8192) == 0, "the end of the file"
    library.deregister(handle)


def test_errors_of_the_file_system_and_of_cufile_have_their_numbers(library, fd, monkeypatch):
    handle = library.register(fd)
    for direction in ("read", "write"):
        with pytest.raises(OSError, match="Invalid argument") as caught:
            library.move(direction, handle, 4096, 0, 4096, -1)
        assert caught.value.errno == errno.EINVAL
    monkeypatch.setenv("STUB", "internal")
    with pytest.raises(RuntimeError, match="cuFile error 5030 in cuFileRead"):
        library.move("read", handle, 4096, 0, 4096, 0)
    monkeypatch.setenv("STUB", "refuse")
    with pytest.raises(RuntimeError, match="cuFile error 5027, CUDA error 7 in cuFileHandleR"):
        library.register(fd)


def test_a_driver_that_does_not_open_is_an_error_and_one_that_is_open_is_used(
    compiled, fd, monkeypatch
):
    """CU_FILE_DRIVER_ALREADY_OPEN is no failure: KvikIO, or torch, may have been first."""
    monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE", raising=False)
    monkeypatch.setattr(gds.backends.kvikio_library, "SONAME", str(compiled))
    with pytest.raises(RuntimeError, match="cuFile error 5001, CUDA error 0 in cuFileDriverOpen"):
        CuFileLibrary()
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "false")
    monkeypatch.setenv("STUB", "open")
    library = CuFileLibrary()
    library.deregister(library.register(fd))
