"""The errors of the I/O layer. Each also is the builtin that a caller would catch."""

from __future__ import annotations

import os


def message_of(error: BaseException) -> str:
    """Return what an error says for people: the path, then what is wrong, without a number."""
    if not isinstance(error, OSError):
        return str(error)
    if error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return OSError.__str__(error)


class StorageError(OSError):
    """An operation on a file or directory failed.

    Always carries `errno` and `filename`; `offset` (bytes) where the operation has one. The
    message says what was attempted, how much was expected and how much was done.
    """

    def __init__(
        self, errno: int, what: str, path: str | os.PathLike[str], *, offset: int | None = None
    ) -> None:
        where = f" at byte {offset}" if offset is not None else ""
        super().__init__(errno, f"{what}{where}: {os.strerror(errno)}", os.fspath(path))
        self.offset = offset

    def __str__(self) -> str:
        return message_of(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.errno, self.strerror, self.filename, self.offset))


class ShortReadError(StorageError, EOFError):
    """A read met the end of the file: the file is shorter than its layout says."""


class LockHeldError(StorageError, BlockingIOError):
    """Another process (or another handle in this one) holds a conflicting lock."""


class RefusedError(ValueError):
    """What was asked for is not done here: the message says what, why, and what to do instead."""


class WrongDataError(StorageError):
    """A read returned other bytes than were written there."""


def _rebuild(
    kind: type[StorageError], errno: int, message: str, path: str, offset: int | None
) -> StorageError:
    error = kind(errno, "", path, offset=offset)
    error.strerror = message
    return error
