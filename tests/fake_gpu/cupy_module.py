"""What is used of CuPy: memory, streams, events, and the compiler of kernels."""

from __future__ import annotations

import ctypes
import types
from typing import TYPE_CHECKING, Any

from tests.fake_gpu.streams import GARBAGE

if TYPE_CHECKING:
    from tests.fake_gpu.machine import FakeGpu

ALIGNMENT = 4096


def cupy_modules(gpu: FakeGpu) -> tuple[types.ModuleType, ...]:
    """Return `cupy`, `cupy.cuda`, and what it has of `cupy.cuda.*`."""

    class Stream:
        def __init__(self, *, non_blocking: bool = False) -> None:
            if not non_blocking:
                gpu.violations.append("a stream of ours waits for the default stream")
            gpu.touch()
            self.ptr = gpu.new_stream()

        def synchronize(self) -> None:
            gpu.streams.run(self.ptr)

    class Event:
        def __init__(self, *, block: bool = False, disable_timing: bool = False) -> None:
            if not block:
                gpu.violations.append("waiting for this event takes a core")
            self._at: tuple[int, int] | None = None

        def record(self, stream: Any) -> None:
            gpu.touch()
            self._at = (stream.ptr, gpu.streams.position(stream.ptr))

        def synchronize(self) -> None:
            assert self._at is not None
            if error := gpu.refuses("synchronize", 0):
                raise RuntimeError(error)
            gpu.streams.run(*self._at)

    class Device:
        compute_capability = "90"

        def __init__(self, number: int) -> None:
            assert number == gpu.number
            self._before = 0

        def __enter__(self) -> Device:
            self._before, gpu.current.number = gpu.current.number, gpu.number
            return self

        def __exit__(self, *_: object) -> None:
            gpu.current.number = self._before

    class CompileException(Exception):  # noqa: N818 - CuPy's name
        """What the compiler refuses."""

    class CUDADriverError(RuntimeError):
        """What the driver refuses."""

    class Module:
        def load(self, binary: bytes) -> None:
            if binary == gpu.refused_binary:
                raise CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")
            gpu.kernels.append(("load", binary, gpu.current.number))

        def get_function(self, name: str) -> Any:
            def launch(grid: Any, block: Any, arguments: Any, *, stream: Any) -> None:
                at = (stream.ptr, gpu.current.number)
                gpu.kernels.append((name, grid, block, arguments, *at))

            return launch

    def compile_using_nvrtc(source: str, *, options: Any) -> tuple[bytes, dict[str, str]]:
        gpu.kernels.append(("compile", source, options, gpu.current.number))
        return b"binary", {}

    contents = {
        "cupy.cuda.compiler": {
            "compile_using_nvrtc": compile_using_nvrtc,
            "CompileException": CompileException,
        },
        "cupy.cuda.driver": {"CUDADriverError": CUDADriverError},
        "cupy.cuda.nvrtc": {"getVersion": lambda: (13, 0)},
        "cupy.cuda": {
            "Module": Module,
            "Stream": Stream,
            "Event": Event,
            "Device": Device,
            "runtime": Runtime(gpu),
        },
        "cupy": {"__version__": "14.2.0"},
    }
    modules = {name: types.ModuleType(name) for name in contents}
    for name in ("compiler", "driver", "nvrtc"):
        contents["cupy.cuda"][name] = modules[f"cupy.cuda.{name}"]
    contents["cupy"]["cuda"] = modules["cupy.cuda"]
    for name, values in contents.items():
        vars(modules[name]).update(values)
    return (*modules.values(),)


class Runtime:
    """`cupy.cuda.runtime`."""

    memcpyHostToDevice = 1  # noqa: N815 - CuPy's names
    memcpyDeviceToHost = 2  # noqa: N815

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def getDevice(self) -> int:  # noqa: N802
        return self._gpu.current.number

    def setDevice(self, number: int) -> None:  # noqa: N802
        self._gpu.current.number = number
        self._gpu.touch()  # since CUDA 12

    def malloc(self, nbytes: int) -> int:
        gpu = self._gpu
        gpu.touch()
        if error := gpu.refuses("malloc", nbytes):
            raise RuntimeError(error)
        array = (ctypes.c_ubyte * (nbytes + 2 * ALIGNMENT))()
        base = ctypes.addressof(array)
        # Aligned as cudaMalloc promises, and to no more.
        ptr = base + -base % ALIGNMENT + 512
        ctypes.memset(ptr, GARBAGE, nbytes)
        with gpu.lock:
            gpu.live[ptr] = nbytes
            gpu.arrays[ptr] = array
        return ptr

    def free(self, ptr: int) -> None:
        gpu = self._gpu
        gpu.touch()
        with gpu.lock:
            if ptr in gpu.registered:
                gpu.violations.append("memory was freed while it was registered")
            nbytes = gpu.live.pop(ptr)
            ctypes.memset(ptr, GARBAGE, nbytes)
            del gpu.arrays[ptr]

    def deviceGetPCIBusId(self, device: int) -> str:  # noqa: N802
        return f"0000:4{device}:00.0"

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:  # noqa: N802
        self._gpu.touch()
        self._gpu.need_device("memset", address, nbytes)
        self._gpu.streams.launch(stream, lambda: ctypes.memset(address, value, nbytes) and None)

    def memcpyAsync(  # noqa: N802
        self, target: int, source: int, nbytes: int, kind: int, stream: int
    ) -> None:
        self._gpu.touch()
        if error := self._gpu.refuses("memcpy", nbytes):
            raise RuntimeError(error)
        device, host = (target, source) if kind == self.memcpyHostToDevice else (source, target)
        self._gpu.copies.append((kind, stream))
        self._gpu.need_device("memcpy", device, nbytes)
        if self._gpu.is_device(host, nbytes):
            self._gpu.violations.append("memcpy: the host's side is on the device")
        self._gpu.streams.launch(stream, lambda: ctypes.memmove(target, source, nbytes) and None)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802
        self._gpu.touch()
        if error := self._gpu.refuses("hostRegister", nbytes):
            raise RuntimeError(error)
        if address in self._gpu.pinned:
            raise RuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        self._gpu.pinned[address] = nbytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        self._gpu.touch()
        del self._gpu.pinned[address]
