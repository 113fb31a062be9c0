"""cuFile itself, called through ctypes: files and plain transfers, which wait for no stream.

KvikIO loads the library and opens its driver; the calls here go to the same copy of it. ctypes
releases the GIL during a call, and keeps the error number that cuFile leaves in `errno`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any, Final

from gds.backends.transfer import Direction

SONAME: Final = "libcufile.so.0"
_FD_HANDLE: Final = 1
_ALREADY_OPEN: Final = 5026
"""Error of a driver that this process has opened before, perhaps through another library."""


class _Error(ctypes.Structure):
    """CUfileError_t, which cuFile returns by value."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class _Handle(ctypes.Union):
    """Union ``handle`` of CUfileDescr_t."""

    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t, which describes a file to cuFile."""

    _fields_ = (("type", ctypes.c_int), ("handle", _Handle), ("fs_ops", ctypes.c_void_p))


def load() -> Any:
    """Return the library as ctypes loads it; the loader finds the copy that KvikIO has loaded.

    Raises:
        OSError: The library is missing.
    """
    return ctypes.CDLL(SONAME, use_errno=True)


class CuFileLibrary:
    """The functions of cuFile that transfer files."""

    def __init__(self) -> None:
        """Load the library and open its driver."""
        self._library = library = load()
        for name in ("cuFileDriverOpen", "cuFileHandleRegister"):
            getattr(library, name).restype = _Error
        library.cuFileHandleDeregister.restype = None
        library.cuFileHandleDeregister.argtypes = [ctypes.c_void_p]
        for name in ("cuFileRead", "cuFileWrite"):
            function = getattr(library, name)
            function.restype = ctypes.c_ssize_t
            function.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int64,
                ctypes.c_int64,
            ]
        opened = library.cuFileDriverOpen()
        if opened.err != _ALREADY_OPEN:
            _check("cuFileDriverOpen", opened)

    def register(self, fd: int) -> int:
        """Return a handle for a file that is open for direct I/O; the descriptor must stay open.

        Raises:
            RuntimeError: cuFile does not take the file.
        """
        descriptor = _Descriptor(type=_FD_HANDLE, handle=_Handle(fd=fd), fs_ops=None)
        handle = ctypes.c_void_p()
        _check(
            "cuFileHandleRegister",
            self._library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor)),
        )
        return handle.value or 0

    def deregister(self, handle: int) -> None:
        """Release a handle; no transfer of it may be running."""
        self._library.cuFileHandleDeregister(handle)

    def move(
        self, direction: Direction, handle: int, base: int, start: int, nbytes: int, offset: int
    ) -> int:
        """Read or write on the calling thread, and return the bytes moved, which may be too few.

        The device must be current in the calling thread.

        Args:
            direction: Direction of the transfer.
            handle: Handle of the file.
            base: Address of the allocation that has the memory, as it was registered.
            start: Start of the memory within the allocation, in bytes.
            nbytes: Length in bytes.
            offset: Position in the file, in bytes.

        Raises:
            OSError: The file system reported an error.
            RuntimeError: cuFile reported an error.
        """
        call = self._library.cuFileRead if direction == "read" else self._library.cuFileWrite
        moved = int(call(handle, base, nbytes, offset, start))
        if moved >= 0:
            return moved
        if moved == -1:
            number = ctypes.get_errno() or errno.EIO
            raise OSError(number, os.strerror(number))
        raise RuntimeError(f"cuFile error {-moved} in {call.__name__}")


def _check(what: str, status: Any) -> None:
    """Raise `RuntimeError` if a call of cuFile failed."""
    if status.err:
        raise RuntimeError(f"cuFile error {status.err}, CUDA error {status.cu_err} in {what}")
