"""Adapter of the KvikIO library: import, settings, and translation of its errors.

Behaviour of KvikIO (26.10) that matters to this module: its settings belong to the process, and are
read partly when a file is opened (compatibility mode) and partly at each transfer. A future keeps
neither its buffer nor its file alive. KvikIO reports an error as a `RuntimeError` with the text of
`strerror` and without a number. cuFile reports an error as a short count without a message. KvikIO
never syncs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final

from gds.backends.hybrid import Direction
from gds.buffers.cuda import is_lost, lost_error, require
from gds.buffers.device import DeviceBuffer, DeviceBytes
from gds.check.cuda_child import FD_HANDLE, Descriptor, Error, Handle
from gds.errors import StorageError

SONAME: Final = "libcufile.so.0"
_ALREADY_OPEN: Final = 5026
"""Error of a driver that this process has opened before, perhaps through another library."""


def load_cufile() -> Any:
    """Return the library as ctypes loads it; the loader finds the copy that KvikIO has loaded."""
    return ctypes.CDLL(SONAME, use_errno=True)


class CuFileLibrary:
    """The functions of cuFile that transfer files and wait for no stream, called through ctypes.

    They are those of the copy that KvikIO has loaded. ctypes releases the GIL during a call, and
    keeps the error number that cuFile leaves in `errno`.
    """

    def __init__(self) -> None:
        """Load the library and open its driver."""
        self._library = library = load_cufile()
        for name in ("cuFileDriverOpen", "cuFileHandleRegister"):
            getattr(library, name).restype = Error
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
        """Return a handle for a file that is open for direct I/O; the descriptor must stay open."""
        descriptor = Descriptor(type=FD_HANDLE, handle=Handle(fd=fd), fs_ops=None)
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

        The device must be current in the calling thread. The memory begins `start` bytes after
        `base`, the address by which its allocation is registered.
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
    if status.err:
        raise RuntimeError(f"cuFile error {status.err}, CUDA error {status.cu_err} in {what}")


TASK_BYTES: Final = 16 << 20
"""Bytes that a thread of KvikIO moves at a time, unless calibration finds another value. KvikIO's
default of 4 MiB is meant for network file systems."""

_TRUE: Final = frozenset({"1", "true", "on", "yes"})
_settings = threading.RLock()
"""Lock held while a setting of KvikIO must not change; the settings belong to the process."""

_num_threads: weakref.WeakKeyDictionary[Library, int] = weakref.WeakKeyDictionary()
_ERRORS: Final = sorted(
    ((os.strerror(number), number) for number in errno.errorcode),
    key=lambda entry: len(entry[0]),
    reverse=True,
)
"""Messages of `strerror` with their error numbers, the longest message first."""


class Library:
    """The imported KvikIO package."""

    def __init__(self) -> None:
        """Import KvikIO; raises `RefusedError` if it or the CUDA driver is missing."""
        self._kvikio = require("kvikio")
        self._defaults = require("kvikio.defaults")

    @cached_property
    def plain_calls(self) -> CuFileLibrary:
        """The plain calls of cuFile, to be loaded within a block of `cufile`."""
        return CuFileLibrary()

    def configure(self, *, num_threads: int) -> None:
        """Set KvikIO's settings for the process, with the sum of the threads that backends ask for.

        A change waits for the running tasks.
        """
        with _settings:
            _num_threads[self] = num_threads
            self._apply()

    def release(self) -> None:
        """Give back the threads that `configure` asked for. Idempotent."""
        with _settings:
            if _num_threads.pop(self, 0) and _num_threads:
                self._apply()

    def _apply(self) -> None:
        """Set the settings; the caller holds their lock."""
        wanted = {
            "num_threads": sum(_num_threads.values()),
            # KvikIO's defaults read through the page cache, and run small requests on the caller's
            # thread.
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
            "gds_threshold": 0,
        }
        changed = {
            name: value for name, value in wanted.items() if self._defaults.get(name) != value
        }
        if changed:
            self._defaults.set(changed)

    def open(self, path: str, fd: int, *, writable: bool) -> Any:
        """Return a new `kvikio.CuFile` of the file of a descriptor, in compatibility mode.

        The file may have been renamed since it was opened. `path` opens it if ``/proc`` is missing.

        Raises:
            StorageError: KvikIO does not take the file, or `path` names another file now (ESTALE).
        """
        name = _name_of(path, fd)
        with _settings, self._defaults.set("compat_mode", self._kvikio.CompatMode.ON):
            try:
                handle = self._kvikio.CuFile(name, "r+" if writable else "r")
            except (RuntimeError, OSError) as error:
                raise storage_error(error, "open with KvikIO", path) from error
        if not os.path.samestat(os.fstat(handle.fileno()), os.fstat(fd)):
            handle.close()
            raise _replaced(path)
        return handle

    def register(self, memory: DeviceBytes) -> None:
        """Register an allocation with cuFile, so that it is not copied within the device."""
        with self.cufile():
            self._kvikio.memory_register(memory)

    def deregister(self, memory: DeviceBytes) -> None:
        """Undo `register`."""
        with self.cufile():
            self._kvikio.memory_deregister(memory)

    def why_copies_are_silent(self) -> str:
        """Return the reason why cuFile might copy through the host silently; empty if it cannot.

        Call it while a file is open: only then is cuFile's driver open and can answer.
        """
        wanted = os.environ.get("CUFILE_ALLOW_COMPAT_MODE", "")
        if wanted.strip().lower() in _TRUE:
            return (
                f"CUFILE_ALLOW_COMPAT_MODE={wanted} lets cuFile copy through the host without "
                "reporting it"
            )
        try:
            allowed = require("kvikio.cufile_driver").get("allow_compat_mode")
        except RuntimeError as error:
            return f"cuFile does not report whether it may copy through the host: {error}"
        if allowed:
            return "cuFile was already loaded with allow_compat_mode, and may copy through the host"
        return ""

    @contextlib.contextmanager
    def cufile(self) -> Iterator[None]:
        """Run the body with KvikIO's compatibility mode off, and with cuFile's environment set."""
        with _settings:
            _before_cufile()
            # AUTO is never used: it asks whether cuFile can be loaded, not whether it works.
            with self._defaults.set("compat_mode", self._kvikio.CompatMode.OFF):
                yield


class PlainCalls:
    """One open file that cuFile's own plain calls move, on the calling thread.

    KvikIO's plain calls (`CuFile.pread`) would first wait for the legacy default stream, on which
    most training runs. Open it within a block of `Library.cufile`, and only if a child process has
    shown that cuFile does not hang. It has not been run on a GPU.
    """

    def __init__(self, library: Library, path: str, fd: int, *, writable: bool) -> None:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC
        opened = -1
        try:
            self._cufile = library.plain_calls
            opened = open_again(path, fd, flags)
            self._handle = self._cufile.register(opened)
        except (RuntimeError, OSError) as error:
            if opened >= 0:
                os.close(opened)
            raise storage_error(error, "open with cuFile", path) from error
        self._release = weakref.finalize(
            self, _release, self._cufile, self._handle, opened, os.getpid()
        )
        self._release.atexit = False

    def move(self, direction: Direction, memory: DeviceBuffer, offset: int) -> int:
        """Transfer on the calling thread, and return the bytes moved, maybe too few."""
        base = memory.region.base
        start = memory.address - base
        return self._cufile.move(direction, self._handle, base, start, memory.nbytes, offset)

    def close(self) -> None:
        """Release the handle, then the descriptor; no transfer may be running. Idempotent."""
        self._release()


def _release(cufile: CuFileLibrary, handle: int, fd: int, process: int) -> None:
    """Release a handle of cuFile, unless this is a forked child, and its descriptor."""
    if os.getpid() == process:
        cufile.deregister(handle)
    os.close(fd)


class CompatibilityMode:
    """One open file that KvikIO moves in compatibility mode, to be measured, not for training.

    A copy waits for all work that is queued on the legacy default stream, which is torch's default
    stream, and work queued there later waits for the copy.
    """

    def __init__(
        self,
        library: Library,
        path: str,
        fd: int,
        *,
        writable: bool,
        task_bytes: Callable[[], int | None],
    ) -> None:
        self._task_bytes = task_bytes
        self._handle = library.open(path, fd, writable=writable)
        self.bypasses_cache = self._handle.is_direct_io_supported()

    def move(self, direction: Direction, memory: DeviceBuffer, offset: int) -> int:
        """Transfer memory by KvikIO's threads, and return the bytes moved, maybe too few."""
        start = self._handle.pread if direction == "read" else self._handle.pwrite
        # The caller keeps the buffer and the file alive until `get` returns.
        moved = start(memory, memory.nbytes, offset, self._task_bytes() or TASK_BYTES).get()
        return int(moved)

    def close(self) -> None:
        """Close the handle of KvikIO. Idempotent."""
        self._handle.close()


def open_again(path: str, fd: int, flags: int) -> int:
    """Return a new descriptor for the file of a descriptor."""
    again = os.open(_name_of(path, fd), flags)
    if not os.path.samestat(os.fstat(again), os.fstat(fd)):
        os.close(again)
        raise _replaced(path)
    return again


def _name_of(path: str, fd: int) -> str:
    """Return a name that opens the file of a descriptor, also if it has been renamed."""
    link = f"/proc/self/fd/{fd}"
    return link if os.path.exists(link) else path


def _replaced(path: str) -> StorageError:
    return StorageError(errno.ESTALE, "open: the name was replaced meanwhile", path)


def _before_cufile() -> None:
    """Set the environment variables that cuFile reads when it is loaded, if they are not set."""
    # By default cuFile silently copies through the host if it cannot do better, and it writes a log
    # file into the current directory.
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")
    os.environ.setdefault("CUFILE_LOGGING_LEVEL", "ERROR")
    log = os.path.join(tempfile.gettempdir(), f"cufile-{os.getuid()}.log")
    os.environ.setdefault("CUFILE_LOGFILE_PATH", log)


def storage_error(
    error: Exception, what: str, path: str, offset: int | None = None
) -> StorageError:
    """Return a `StorageError` for an error of KvikIO, cuFile or CUDA, if need be with EIO."""
    if isinstance(error, StorageError):
        return error
    if is_lost(error):
        return lost_error(error, what, path, offset=offset)
    number = error.errno if isinstance(error, OSError) else None
    text = " ".join(str(error).split())
    if number is None:
        number = next((known for words, known in _ERRORS if words in text), errno.EIO)
    return StorageError(number, f"{what} ({text})", path, offset=offset)


def is_end_of_file(error: Exception) -> bool:
    """Return whether an error of KvikIO means that a read reached the end of the file."""
    return "EOF" in str(error).replace(":", " ").split()
