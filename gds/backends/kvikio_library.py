"""KvikIO: imported on use, set up, and its mistakes told from one another.

What KvikIO (26.10) does that matters here. Its settings belong to the process, and are read partly
when a file is opened (compatibility mode) and partly at each transfer. A future keeps neither its
buffer nor its file alive. Errors are `RuntimeError` with the text of `strerror` in it and no
number; cuFile answers with a short count, and says nothing. Nothing is ever synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Final, Protocol

from gds.buffers.cuda import require
from gds.buffers.device import DeviceBytes
from gds.contract import ALIGNMENT
from gds.errors import StorageError

TASK_BYTES: Final = 16 << 20
"""What a thread of KvikIO moves at a time unless calibration says otherwise; its own default of
4 MiB is for network file systems."""

_TRUE: Final = frozenset({"1", "true", "on", "yes"})

_settings = threading.RLock()
"""KvikIO's settings are the process's: held while one of them must not change."""

_ERRORS: Final = sorted(
    ((os.strerror(number), number) for number in errno.errorcode),
    key=lambda entry: len(entry[0]),
    reverse=True,
)


class Moved(Protocol):
    """A transfer under way. Whoever starts one keeps its buffer and its file until `get`."""

    def get(self) -> int:
        """Wait, once, and return how many bytes were moved, which may be too few."""
        ...


class Handle(Protocol):
    """What is used of `kvikio.CuFile`."""

    def pread(self, buf: object, size: int, file_offset: int) -> Moved:
        """Start reading into device memory."""
        ...

    def pwrite(self, buf: object, size: int, file_offset: int) -> Moved:
        """Start writing device memory."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that goes through the page cache."""
        ...

    def is_direct_io_supported(self) -> bool:
        """Return whether there is a descriptor that does not."""
        ...

    def close(self) -> None:
        """Close both."""
        ...


class Library:
    """The imported package."""

    def __init__(self) -> None:
        """Import KvikIO.

        Raises:
            RefusedError: It is not installed, or there is no CUDA driver; names the remedy.
        """
        self._kvikio = require("kvikio")
        self._defaults = require("kvikio.defaults")

    def configure(self, *, num_threads: int, task_bytes: int | None) -> None:
        """Set what transfers use; for the whole process, until somebody sets it again.

        A changed number of threads waits for the tasks that are running.
        """
        wanted = {
            "num_threads": num_threads,
            "task_size": task_bytes or TASK_BYTES,
            # Its default reads through the page cache, and small requests on the caller's thread.
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
            "gds_threshold": 0,
        }
        with _settings:
            changed = {
                name: value for name, value in wanted.items() if self._defaults.get(name) != value
            }
            if changed:
                self._defaults.set(changed)

    def open(self, path: str, fd: int, *, writable: bool, compat: bool) -> Handle:
        """Open the file of an open descriptor once more, for device memory.

        Args:
            path: For messages, and to open where there is no ``/proc``.
            fd: Of the file, which may have been renamed since.
            writable: Whether it can be written as well.
            compat: Copy through the host; otherwise cuFile has to do it, or this fails. To be
                called only where a child process has shown that cuFile does not hang.

        Raises:
            StorageError: KvikIO or cuFile does not take the file.
        """
        link = f"/proc/self/fd/{fd}"
        name = link if os.path.exists(link) else path
        with _settings, self._mode(compat=compat):
            try:
                handle: Handle = self._kvikio.CuFile(name, "r+" if writable else "r")
            except (RuntimeError, OSError) as error:
                raise storage_error(error, "open with KvikIO", path) from error
        if not os.path.samestat(os.fstat(handle.fileno()), os.fstat(fd)):
            handle.close()
            raise StorageError(errno.ESTALE, "open: the name was replaced meanwhile", path)
        return handle

    def register(self, memory: DeviceBytes) -> None:
        """Register an allocation with cuFile, so that it does not copy within the device.

        Raises:
            RuntimeError: cuFile refuses, for want of address space (BAR1), say.
        """
        with _settings, self._mode(compat=False):
            self._kvikio.memory_register(memory)

    def deregister(self, memory: DeviceBytes) -> None:
        """Undo `register`."""
        with _settings, self._mode(compat=False):
            self._kvikio.memory_deregister(memory)

    def why_untold(self) -> str:
        """Say why cuFile might copy through the host without telling; empty where it would fail.

        Call it when a file is open: then cuFile's driver is, and knows.
        """
        wanted = os.environ.get("CUFILE_ALLOW_COMPAT_MODE", "")
        if wanted.strip().lower() in _TRUE:
            return f"CUFILE_ALLOW_COMPAT_MODE={wanted} lets cuFile copy through the host untold"
        try:
            allowed = require("kvikio.cufile_driver").get("allow_compat_mode")
        except RuntimeError as error:
            return f"cuFile does not say whether it may copy through the host: {error}"
        if allowed:
            return "cuFile was loaded before with allow_compat_mode, and may copy through the host"
        return ""

    @contextlib.contextmanager
    def _mode(self, *, compat: bool) -> Iterator[None]:
        # Never AUTO: it decides by whether cuFile can be loaded, not by whether it works.
        mode = self._kvikio.CompatMode.ON if compat else self._kvikio.CompatMode.OFF
        if not compat:
            _before_cufile()
        with self._defaults.set("compat_mode", mode):
            yield


def _before_cufile() -> None:
    """Set what cuFile reads from the environment when it is loaded, unless somebody else did."""
    # Otherwise it copies through the host where it cannot do better, and nobody can tell; and it
    # writes a log into the current directory.
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")
    os.environ.setdefault("CUFILE_LOGGING_LEVEL", "ERROR")
    log = os.path.join(tempfile.gettempdir(), f"cufile-{os.getuid()}.log")
    os.environ.setdefault("CUFILE_LOGFILE_PATH", log)


def storage_error(
    error: Exception, what: str, path: str, offset: int | None = None
) -> StorageError:
    """Return a `StorageError` for what KvikIO raised: by the text of an error, or EIO."""
    if isinstance(error, StorageError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    text = " ".join(str(error).split())
    if number is None:
        number = next((known for words, known in _ERRORS if words in text), errno.EIO)
    return StorageError(number, f"{what} (KvikIO: {text})", path, offset=offset)


def is_end_of_file(error: Exception) -> bool:
    """Return whether KvikIO raised this because a read met the end of the file."""
    return "EOF" in str(error).replace(":", " ").split()


def whole_blocks(nbytes: int) -> int:
    """Return how much of a short count can be kept: a remainder would not be aligned."""
    return nbytes // ALIGNMENT * ALIGNMENT
