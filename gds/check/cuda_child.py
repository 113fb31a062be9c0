"""Child program that calls CUDA and cuFile, so that its parent can stop waiting if a call hangs.

Opening a file with cuFile spins for ever on some kernels, and a faulty driver can hang in its first
call. The program runs as a script and imports nothing of this package::

    cuda_child.py devices          list the GPUs
    cuda_child.py cufile PATH      write and read PATH from and to GPU memory

Each line of output is a JSON object. ``stage`` names the next call, so that the last one tells
where the program hung. ``error`` ends the program with a failure, ``done`` with success.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import json
import os
import sys
from typing import Any, Final, NoReturn

_BYTES: Final = 64 << 10
FD_HANDLE: Final = 1


class Error(ctypes.Structure):
    """CUfileError_t, which cuFile returns by value."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class Handle(ctypes.Union):
    """Union ``handle`` of CUfileDescr_t."""

    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class Descriptor(ctypes.Structure):
    """CUfileDescr_t, which describes a file to cuFile."""

    _fields_ = (("type", ctypes.c_int), ("handle", Handle), ("fs_ops", ctypes.c_void_p))


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _fail(error: str) -> NoReturn:
    _say(error=error)
    sys.exit(1)


class _Cuda:
    """The CUDA driver, called through ctypes. Every failure ends the program."""

    def __init__(self) -> None:
        _say(stage="libcuda.so.1")
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            _fail(str(error))
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver, and end the program if it fails."""
        _say(stage=name)
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            _fail(f"{(text.value or b'').decode() or 'an error'} (CUDA error {status})")

    def devices(self) -> list[dict[str, Any]]:
        """Return the name of every GPU, and its memory in bytes."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for number in range(count.value):
            device, name, nbytes = (
                ctypes.c_int(),
                ctypes.create_string_buffer(128),
                ctypes.c_size_t(),
            )
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
            self.call("cuDeviceGetName", name, ctypes.c_int(128), device)
            self.call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), device)
            found.append({"name": name.value.decode(errors="replace"), "bytes": nbytes.value})
        return found

    def version(self) -> int:
        """Return the newest CUDA version that the driver supports, as 1000 * major + 10 * minor."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return number.value

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        """Return the address of new memory on the first GPU, in its primary context."""
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address

    def upload(self, address: ctypes.c_uint64, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))

    def download(self, address: ctypes.c_uint64, nbytes: int) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", data, address, ctypes.c_size_t(nbytes))
        return data.raw


def _cufile_library() -> ctypes.CDLL:
    """Load cuFile, from the system or from a package that pip installed."""
    _say(stage="libcufile.so.0")
    paths = ["libcufile.so.0", "/usr/local/cuda/lib64/libcufile.so.0"]
    for name in ("nvidia-cufile", "nvidia-cufile-cu13", "nvidia-cufile-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths += [str(file.locate()) for file in files if file.name.startswith("libcufile.so")]
    paths += sorted(glob.glob("/usr/local/cuda-*/lib64/libcufile.so.0"))
    said = ""
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            said = said or str(error)
    _fail(said)


def _check(stage: str, status: Error) -> None:
    if status.err:
        _fail(f"cuFile error {status.err}, CUDA error {status.cu_err} in {stage}")


def _cufile(path: str) -> None:
    """Read and write a file of `_BYTES` bytes with cuFile, and report if the bytes are right."""
    cuda = _Cuda()
    library = _cufile_library()
    for name in ("cuFileDriverOpen", "cuFileHandleRegister"):
        getattr(library, name).restype = Error
    for name in ("cuFileRead", "cuFileWrite"):
        getattr(library, name).restype = ctypes.c_ssize_t
    address = cuda.allocate(_BYTES)
    first, second = os.urandom(_BYTES), os.urandom(_BYTES)
    with open(path, "wb") as file:
        file.write(first)
        file.flush()
        os.fsync(file.fileno())
    _say(stage="cuFileDriverOpen")
    _check("cuFileDriverOpen", library.cuFileDriverOpen())
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    descriptor = Descriptor(type=FD_HANDLE, handle=Handle(fd=fd), fs_ops=None)
    handle = ctypes.c_void_p()
    _say(stage="cuFileHandleRegister")
    status = library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor))
    _check("cuFileHandleRegister", status)

    def move(name: str) -> int:
        _say(stage=name)
        zero = ctypes.c_longlong(0)
        size = ctypes.c_size_t(_BYTES)
        return int(getattr(library, name)(handle, ctypes.c_void_p(address.value), size, zero, zero))

    moved = move("cuFileRead")
    reads = moved == _BYTES and cuda.download(address, _BYTES) == first
    _say(reads=reads, moved=moved)
    cuda.upload(address, second)
    moved = move("cuFileWrite")
    os.fsync(fd)
    with open(path, "rb") as written:
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        writes = moved == _BYTES and written.read() == second
    _say(writes=writes, moved=moved)


def main() -> None:
    """Run the command that the arguments name."""
    if sys.argv[1] == "devices":
        cuda = _Cuda()
        _say(version=cuda.version(), devices=cuda.devices())
    else:
        _cufile(sys.argv[2])
    _say(done=True)
    os._exit(0)  # skips the cleanup of cuFile and of the driver, which could hang as well


if __name__ == "__main__":
    main()
