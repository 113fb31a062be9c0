"""What is used of cuFile itself: files of descriptors, and transfers on the calling thread."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.fake_gpu.kvikio_module import Task, note_alignment

if TYPE_CHECKING:
    from tests.fake_gpu.machine import FakeGpu

_REFUSED = 5027
_INTERNAL = 5030


class Status(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class Function:
    """A function of a library, as ctypes has it: with attributes."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.__name__ = name
        self.restype: Any = ctypes.c_int
        self.argtypes: Any = None
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class CuFileLibrary:
    """``libcufile.so.0``. It knows addresses and numbers only, and is ordered with no stream."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._files: dict[int, tuple[int, int, list[None]]] = {}
        self._num_files = 0
        for name, call in {
            "cuFileDriverOpen": self._open,
            "cuFileHandleRegister": self._register,
            "cuFileHandleDeregister": self._deregister,
            "cuFileRead": lambda *a: self._move("read", *a),
            "cuFileWrite": lambda *a: self._move("write", *a),
        }.items():
            setattr(self, name, Function(name, call))

    def _open(self) -> Status:
        if os.environ.get("CUFILE_ALLOW_COMPAT_MODE") is None:
            self._gpu.violations.append("cuFile was loaded while it may copy through the host")
        return Status(0, 0)

    def _need_context(self) -> None:
        if not self._gpu.current.has_context:
            self._gpu.violations.append("cuFile was called in a thread without a context")

    def _register(self, handle: Any, descriptor: Any) -> Status:
        self._need_context()
        fd = descriptor._obj.handle.fd
        assert (descriptor._obj.type, descriptor._obj.fs_ops) == (1, None)
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self._gpu.violations.append("cuFile was given a file that is not open for direct I/O")
        if not self._gpu.gds:
            return Status(_REFUSED, 7)
        self._num_files += 1
        handle._obj.value = 0x7F00_0000_0000 + self._num_files  # a pointer: longer than an int
        # Short counts need not be whole blocks: cuFile has its own ways to get at the rest.
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        self._files[handle._obj.value] = fd, os.open(f"/proc/self/fd/{fd}", mode), []
        self._gpu.num_open += 1
        self._gpu.num_opened += 1
        return Status(0, 0)

    def _deregister(self, handle: int) -> None:
        fd, own, in_flight = self._files.pop(handle)
        os.fstat(fd)  # it must still be open
        os.close(own)
        if in_flight:
            self._gpu.violations.append("a file was closed during its transfers")
        self._gpu.num_open -= 1

    def _move(
        self, direction: str, handle: int, base: int, size: int, offset: int, start: int
    ) -> int:
        gpu, (_, fd, in_flight) = self._gpu, self._files[handle]
        gpu.calls.append((direction, "gds", offset, size))
        note_alignment(gpu, direction, base, start, size, offset)
        self._need_context()
        if gpu.current.number != gpu.number:
            gpu.violations.append("cuFile was called with another device being current")
        try:
            return Task(gpu, fd, "gds", in_flight).move(direction, base + start, size, offset)
        except RuntimeError as error:
            text = str(error)
            known = (n for n in errno.errorcode if text.endswith(os.strerror(n)))
            number = next(known, None)
            if number is None:
                return -_INTERNAL
            ctypes.set_errno(number)
            return -1
