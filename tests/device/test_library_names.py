"""What is used of KvikIO, CuPy and torch is there, in the versions that are installed.

The packages alone are needed: no device, and no driver. What only a driver can answer is not asked.
"""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import gds.backends.kvikio_library
import gds.buffers.cuda
from gds.backends.kvikio_library import Library
from gds.buffers.cuda import Handle
from gds.buffers.device import DeviceBytes
from gds.probe import direct_io

ALIGNMENT = 4096


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture
def kvikio() -> Any:
    return imported("kvikio")


@pytest.fixture
def cuda() -> Any:
    return imported("cupy").cuda


def parameters(function: Any) -> list[str]:
    """Return the names of a compiled function's parameters, by the first line of its help."""
    line = function.__doc__.strip().splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    return [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]


@pytest.mark.parametrize("writable", [False, True], ids=["reads", "writes"])
def test_kvikio_takes_the_settings_and_opens_the_file_of_a_descriptor(
    kvikio, writable, tmp_path, monkeypatch
):
    monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "")
    library = Library()  # most of it works without a driver
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * ALIGNMENT))
    defaults = importlib.import_module("kvikio.defaults")
    names = ("num_threads", "gds_threshold", "auto_direct_io_read", "auto_direct_io_write")
    before = {name: defaults.get(name) for name in names}
    fd = os.open(path, os.O_RDWR)
    try:
        library.configure(num_threads=3)
        assert [defaults.get(name) for name in names] == [3, 0, True, True]
        handle = library.open(str(path), fd, writable=writable)
        assert os.path.samestat(os.fstat(handle.fileno()), os.fstat(fd))
        assert handle.fileno() != fd
        assert handle.is_direct_io_supported() is direct_io(str(tmp_path)).supported
        # of the buffer it takes the address and length, and refuses more than that
        memory = DeviceBytes(ALIGNMENT, 2 * ALIGNMENT)
        for start in (handle.pread, handle.pwrite):
            with pytest.raises(ValueError, match="Size is greater than the size of the buffer"):
                start(memory, 3 * ALIGNMENT, 0, ALIGNMENT)
        handle.close()
        handle.close()
    finally:
        os.close(fd)
        library.release()
        defaults.set(before)


def test_kvikios_calls_take_what_they_are_given(kvikio):
    defaults = importlib.import_module("kvikio.defaults")
    before = defaults.get("compat_mode")
    for mode in (kvikio.CompatMode.ON, kvikio.CompatMode.OFF):
        with defaults.set("compat_mode", mode):
            assert defaults.get("compat_mode") == mode
        assert defaults.get("compat_mode") == before
    buffered = ("self", "buf", "size", "file_offset", "task_size")
    for call in ("pread", "pwrite"):
        signature = inspect.signature(getattr(kvikio.CuFile, call))
        assert tuple(signature.bind(*range(len(buffered))).arguments) == buffered
    cufile = importlib.import_module("kvikio.cufile")
    inspect.signature(cufile.IOFuture.get).bind(None)
    for function in (kvikio.memory_register, kvikio.memory_deregister):
        inspect.signature(function).bind("memory")
    driver = importlib.import_module("kvikio.cufile_driver")
    # Not asked: that would load cuFile, which hangs on some kernels.
    assert hasattr(type(driver.properties), "allow_compat_mode")
    inspect.signature(driver.get).bind("allow_compat_mode")


def test_cufile_is_the_copy_that_kvikio_has_loaded(kvikio):
    try:
        library = gds.backends.kvikio_library.load_cufile()
    except OSError as error:
        pytest.skip(f"cuFile cannot be loaded: {error}")
    for name in ("DriverOpen", "HandleRegister", "HandleDeregister", "Read", "Write"):
        assert getattr(library, f"cuFile{name}") is not None
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    copies = {os.path.realpath(name) for name in loaded if "/libcufile.so" in name}
    assert len(copies) == 1, "two copies would know nothing of each other's registrations"


def test_cupys_runtime_streams_and_compiler_take_what_they_are_given(cuda):
    runtime = cuda.runtime
    expected = {
        "getDevice": [],
        "setDevice": ["device"],
        "deviceGetPCIBusId": ["device"],
        "memsetAsync": ["ptr", "value", "size", "stream"],
        "memcpyAsync": ["dst", "src", "size", "kind", "stream"],
        "hostRegister": ["ptr", "size", "flags"],
        "hostUnregister": ["ptr"],
        "malloc": ["size"],
        "free": ["ptr"],
    }
    assert {name: parameters(getattr(runtime, name)) for name in expected} == expected
    assert (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost) == (1, 2)
    assert issubclass(runtime.CUDARuntimeError, RuntimeError)
    inspect.signature(cuda.Stream).bind(non_blocking=True)
    inspect.signature(cuda.Event).bind(block=True, disable_timing=True)
    inspect.signature(cuda.Event.record).bind(None, Handle(0))
    for kind in (cuda.Event, cuda.Stream):
        inspect.signature(kind.synchronize).bind(None)
    assert parameters(cuda.Device) == ["device"]
    assert hasattr(cuda.Device, "__enter__")
    compiler = importlib.import_module("cupy.cuda.compiler")
    inspect.signature(compiler.compile_using_nvrtc).bind("source", options=("-std=c++17",))
    assert issubclass(compiler.CompileException, Exception)
    assert not issubclass(compiler.CompileException, RuntimeError)
    assert compiler.nvrtc.getVersion is cuda.nvrtc.getVersion
    assert isinstance(importlib.import_module("cupy").__version__, str)
    assert isinstance(inspect.getattr_static(cuda.Device, "compute_capability"), object)
    assert issubclass(cuda.driver.CUDADriverError, RuntimeError)
    module = cuda.Module()
    assert parameters(module.load)[-1] == "cubin"
    assert parameters(module.get_function)[-1] == "name"


def test_torchs_streams_and_events_are_made_as_here():
    cuda: Any = torch.cuda
    inspect.signature(cuda.Stream.__new__).bind(None, torch.device("cuda", 0), priority=-1)
    for made in ({"blocking": True}, {"enable_timing": True}):
        inspect.signature(cuda.Event.__new__).bind(None, **made)
    inspect.signature(cuda.current_stream).bind(torch.device("cuda", 0))
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert {"cuda_stream", "wait_event", "wait_stream"} <= set(dir(cuda.Stream))
    assert {"record", "synchronize", "elapsed_time"} <= set(dir(cuda.Event))
    runtime = torch._C._cudart  # what cudart() returns once there is a device
    assert runtime.cudaHostRegister.__doc__.count("arg") == 3
    assert runtime.cudaHostUnregister.__doc__.count("arg") == 1
    assert int(runtime.cudaError(2)) == 2
    assert int(runtime.cudaError.success) == 0
