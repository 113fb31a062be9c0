"""Adapter of the KvikIO library: import, settings, and translation of its errors.

Behaviour of KvikIO (26.10) that matters to this module: its settings belong to the process, and are
read partly when a file is opened (compatibility mode) and partly at each transfer. A future keeps
neither its buffer nor its file alive. KvikIO reports an error as a `RuntimeError` with the text of
`strerror` and without a number. cuFile reports an error as a short count without a message. KvikIO
never syncs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from gds.backends.cufile import CuFileLibrary
from gds.backends.transfer import Direction
from gds.buffers.cuda import is_lost, lost_error, require
from gds.buffers.device import DeviceBuffer, DeviceBytes
from gds.contract import ALIGNMENT
from gds.errors import StorageError

TASK_BYTES: Final = 16 << 20
"""Bytes that a thread of KvikIO moves at a time, unless calibration finds another value. KvikIO's
default of 4 MiB is meant for network file systems."""

_TRUE: Final = frozenset({"1", "true", "on", "yes"})
"""Values of an environment variable that mean true."""

_settings = threading.RLock()
"""Lock held while a setting of KvikIO must not change; the settings belong to the process."""

_num_threads: weakref.WeakKeyDictionary[Library, int] = weakref.WeakKeyDictionary()
"""Number of threads that each open backend asks for."""

_ERRORS: Final = sorted(
    ((os.strerror(number), number) for number in errno.errorcode),
    key=lambda entry: len(entry[0]),
    reverse=True,
)
"""Messages of `strerror` with their error numbers, the longest message first."""


class Moved(Protocol):
    """A transfer in progress. The caller keeps buffer and file alive until `get` returns."""

    def get(self) -> int:
        """Wait for the transfer and return the bytes moved, which may be too few; call it once."""
        ...


class MovedOnStream(Protocol):
    """A transfer that is queued on a stream, with the memory for its result."""

    def check_bytes_done(self) -> int:
        """Wait for the stream and return the bytes moved, which may be too few."""
        ...


class Handle(Protocol):
    """Methods of `kvikio.CuFile` that this package uses."""

    def pread(self, buf: object, size: int, file_offset: int, task_size: int) -> Moved:
        """Start reading `size` bytes from `file_offset` (bytes) into device memory.

        A task has `task_size` bytes. The copies are ordered with the legacy default stream.
        """
        ...

    def pwrite(self, buf: object, size: int, file_offset: int, task_size: int) -> Moved:
        """Start writing `size` bytes of device memory at `file_offset` (bytes); see `pread`."""
        ...

    def raw_read_async(
        self, buf: object, raw_stream: int, size: int, file_offset: int, dev_offset: int
    ) -> MovedOnStream:
        """Queue a read of `size` bytes to `dev_offset` (bytes) of device memory on a stream."""
        ...

    def raw_write_async(
        self, buf: object, raw_stream: int, size: int, file_offset: int, dev_offset: int
    ) -> MovedOnStream:
        """Queue a write of `size` bytes from `dev_offset` (bytes) of device memory on a stream."""
        ...

    def fileno(self) -> int:
        """Return the descriptor of transfers through the page cache."""
        ...

    def is_direct_io_supported(self) -> bool:
        """Return whether the file also has a descriptor that bypasses the page cache."""
        ...

    def close(self) -> None:
        """Close both descriptors."""
        ...


class Library:
    """The imported KvikIO package."""

    def __init__(self) -> None:
        """Import KvikIO.

        Raises:
            RefusedError: KvikIO or the CUDA driver is missing; the message names the remedy.
        """
        self._kvikio = require("kvikio")
        self._defaults = require("kvikio.defaults")
        self._plain: CuFileLibrary | None = None

    def plain_calls(self) -> CuFileLibrary:
        """Return cuFile's plain calls, within a block of `cufile`; loaded once."""
        if self._plain is None:
            self._plain = CuFileLibrary()
        return self._plain

    def configure(self, *, num_threads: int) -> None:
        """Set KvikIO's settings, for the whole process.

        KvikIO has one pool of threads. It gets the sum of the numbers that all backends ask for, so
        that no backend takes the threads of another. A change waits for the running tasks.
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
        """Set KvikIO's settings; the caller holds their lock."""
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

    def open(self, path: str, fd: int, *, writable: bool, compat: bool) -> Handle:
        """Open the file of a descriptor once more, for transfers of device memory.

        Args:
            path: Path of the file, for messages; also used to open the file if ``/proc`` is
                missing.
            fd: Descriptor of the file, which may have been renamed since it was opened.
            writable: Whether to open the file for writing as well.
            compat: True copies through the host. False requires cuFile, and fails if cuFile does
                not take the file. Pass False only if a child process has shown that cuFile does
                not hang.

        Raises:
            StorageError: KvikIO or cuFile does not take the file, or `path` names another file
                now (ESTALE).
        """
        name = _name_of(path, fd)
        with _settings, self._mode(compat=compat):
            try:
                handle: Handle = self._kvikio.CuFile(name, "r+" if writable else "r")
            except (RuntimeError, OSError) as error:
                raise storage_error(error, "open with KvikIO", path) from error
        if not os.path.samestat(os.fstat(handle.fileno()), os.fstat(fd)):
            handle.close()
            raise _replaced(path)
        return handle

    def register(self, memory: DeviceBytes) -> None:
        """Register an allocation with cuFile, so that cuFile does not copy it within the device.

        Raises:
            RuntimeError: cuFile refuses, for example because of too little address space (BAR1).
        """
        with self.cufile():
            self._kvikio.memory_register(memory)

    def deregister(self, memory: DeviceBytes) -> None:
        """Undo `register` of the same allocation."""
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
        with _settings, self._mode(compat=False):
            yield

    @contextlib.contextmanager
    def _mode(self, *, compat: bool) -> Iterator[None]:
        """Run the body with KvikIO's compatibility mode on or off."""
        # AUTO is never used: it asks whether cuFile can be loaded, not whether it works.
        mode = self._kvikio.CompatMode.ON if compat else self._kvikio.CompatMode.OFF
        if not compat:
            _before_cufile()
        with self._defaults.set("compat_mode", mode):
            yield


class CompatibilityMode:
    """One open file that KvikIO moves in compatibility mode.

    KvikIO copies on blocking streams: a copy waits for all work that is queued on the legacy
    default stream, which is torch's default stream, and work queued there later waits for the
    copy. It is here to be measured (`gds bench --path compat`), not for training.
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
        """Open the file of a descriptor once more; see `Library.open`."""
        self._task_bytes = task_bytes
        self._handle = library.open(path, fd, writable=writable, compat=True)
        self.bypasses_cache = self._handle.is_direct_io_supported()
        """Whether transfers bypass the page cache."""

    def move(self, direction: Direction, memory: DeviceBuffer, offset: int) -> int:
        """Transfer memory by KvikIO's threads, and return the bytes moved.

        Raises:
            RuntimeError: KvikIO reported an error.
        """
        start = self._handle.pread if direction == "read" else self._handle.pwrite
        return start(memory, memory.nbytes, offset, self._task_bytes() or TASK_BYTES).get()

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
    """Return a `StorageError` for an error of KvikIO, cuFile or CUDA.

    The error number is that of an `OSError`, or the one whose text is in the message, or EIO.
    """
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


def whole_blocks(nbytes: int) -> int:
    """Return a count of bytes rounded down to whole blocks, so that the rest stays aligned."""
    return nbytes // ALIGNMENT * ALIGNMENT
