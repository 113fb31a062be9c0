"""Errors of the I/O layer. Each derives from the builtin exception that a caller would catch."""

from __future__ import annotations

import os
from errno import EFBIG, EMFILE, ENFILE


class OffloadError(Exception):
    """Base of every error that `gds`, and `offload` above it, raise on purpose."""


_REMEDIES = {
    EFBIG: "; raise the limit of file sizes with ulimit -f, or use another file system",
    EMFILE: "; close files, or raise the limit of open files with ulimit -n",
    ENFILE: "; the whole machine has too many: close some, or raise sysctl fs.file-max",
}


def message_of(error: BaseException) -> str:
    """Return an error's message for people: the path, then the cause, without the error number."""
    if not isinstance(error, OSError):
        return str(error)
    if error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return OSError.__str__(error)


class StorageError(OffloadError, OSError):
    """An operation on a file or directory failed.

    `errno` and `filename` are always set. `offset` is in bytes, or None if the operation has no
    offset. The message says what was attempted, how much was expected and how much was done.
    """

    def __init__(
        self, errno: int, what: str, path: str | os.PathLike[str], *, offset: int | None = None
    ) -> None:
        """Describe a failed operation.

        Args:
            errno: Error number of the system.
            what: Operation that failed; the start of the message.
            path: File or directory that the operation was for.
            offset: Position in the file, in bytes, if the operation has one.
        """
        where = f" at byte {offset}" if offset is not None else ""
        meaning = os.strerror(errno) + _REMEDIES.get(errno, "")
        super().__init__(errno, f"{what}{where}: {meaning}", os.fspath(path))
        self.offset = offset

    def __str__(self) -> str:
        return message_of(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.errno, self.strerror, self.filename, self.offset))


class ShortReadError(StorageError, EOFError):
    """A read reached the end of the file: the file is shorter than its layout says."""


class LockHeldError(StorageError, BlockingIOError):
    """A conflicting lock is held, by another process or through another handle of this one."""


class DeviceLostError(StorageError, RuntimeError):
    """A GPU does not work any more in this process: every further call to it fails as well.

    The kernel's log (``dmesg``) has a line ``NVRM: Xid`` if the hardware or the driver is at fault.
    `filename` is the file of the transfer that failed, or the device's name.
    """


class DeviceMemoryError(OffloadError, MemoryError):
    """A GPU has no memory left for a request. The message says how much was asked for."""


class RefusedError(OffloadError, ValueError):
    """A request is refused; the message says what is refused, why, and what to do instead."""


class WrongDataError(StorageError):
    """A read returned bytes that differ from those written at the same place."""


def _rebuild(
    kind: type[StorageError], errno: int, message: str, path: str, offset: int | None
) -> StorageError:
    """Rebuild a pickled error with its original message."""
    error = kind(errno, "", path, offset=offset)
    error.strerror = message
    return error
