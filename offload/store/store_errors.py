"""Errors of the file system, as errors about a store: each says what to do about it.

After a failed rename or sync nobody knows what is on the drive. `Poison` then keeps the process
from reusing anything.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, LockHeldError, StorageError
from offload.errors import (
    StoreError,
    StoreFullError,
    StoreLockedError,
    UnreadableError,
    reason_of,
)
from offload.format.names import LOCK_NAME
from offload.format.unreadable import unreadable
from offload.store.writer_lock import is_held_here, who_holds
from offload.units import size

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers which say that there is no space."""

_UNSUITABLE = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST,
        errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EOPNOTSUPP,
        errno.ENOSYS, errno.ENODEV, errno.ENXIO,
    }
)  # fmt: skip
"""Error numbers which say that a directory cannot hold a store. Other errors may be temporary."""

NOTHING_CHANGED = "No checkpoint has been changed"
"""What the message of an error says that came before any change."""


@contextmanager
def as_store_errors(backend: Backend, directory: str) -> Iterator[None]:
    """Turn errors in the block into errors about a store in the given directory."""
    try:
        yield
    except LockHeldError as error:
        raise StoreLockedError(error.errno, _who_writes(backend, directory), directory) from None
    except UnreadableError as error:
        raise unreadable(error, then=NOTHING_CHANGED) from error
    except StorageError as error:
        if error.errno in FULL:
            free = backend.free_bytes(nearest_existing(backend, directory))
            raise StoreFullError(
                error.errno,
                f"there is no space, not even for an empty store ({error.strerror}): "
                f"{free} bytes are free; free some, or choose another directory",
                directory,
            ) from error
        if error.errno not in _UNSUITABLE:
            raise unreadable(error, then=NOTHING_CHANGED) from error
        advice = "choose a directory that you can create files in"
        if error.errno == errno.ENAMETOOLONG:
            advice = "choose a shorter path, in which each name has at most 255 bytes"
        raise StoreError(
            error.errno, f"cannot keep a store here ({error.strerror}); {advice}", directory
        ) from error


def _who_writes(backend: Backend, directory: str) -> str:
    if is_held_here(directory):
        return (
            "another optimizer of this process is writing to this store (a cell of a notebook that "
            "is run twice makes a second one): call close() of that optimizer first, or use "
            "another directory"
        )
    holder = who_holds(backend, directory)
    return (
        f"another process is writing to this store{f' ({holder})' if holder else ''}: close it "
        "first, or use another directory. "
        f"`fuser -v {directory}/{LOCK_NAME}` says which process it is"
    )


def nearest_existing(backend: Backend, directory: str) -> str:
    """Return a directory if it exists, else its nearest existing ancestor."""
    while (stat := backend.stat(directory)) is None:
        directory = os.path.dirname(directory)
    if stat.kind == "file":
        raise StorageError(errno.ENOTDIR, "making the store's directory", directory)
    return directory


@contextmanager
def naming_free_space(backend: Backend, path: str, needed_bytes: int, what: str) -> Iterator[None]:
    """Add the needed and the free space to the error if the block finds no space."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENOSPC:
            raise
        try:
            free = backend.free_bytes(os.path.dirname(path))
        except StorageError:
            raise error from None  # this error is more useful than that of the query
        raise StorageError(
            errno.ENOSPC, f"reserve {size(needed_bytes)} for {what}, with {size(free)} free", path
        ) from error


class Poison:
    """Records the failure that has left the content of a store's drives unknown, if there is one.

    The object is true once the store is poisoned.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._told = False
        self.reason = ""
        """Description of the first failure; empty if nothing has failed."""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def warn_once(self) -> None:
        """Warn once of the consequences of a failure; call this on the thread of a user's call."""
        if self.reason and not self._told:
            self._told = True
            warnings.warn(
                f"{self._directory}: {self.reason}. After that the content of the drive is "
                "unknown, so this process reuses no slot any more, and every checkpoint takes new "
                "space. Check the drive, and start a new process",
                RuntimeWarning,
                stacklevel=3,
            )

    def require_healthy(self, path: str) -> None:
        """Refuse to withdraw a checkpoint if the store is poisoned."""
        if self.reason:
            raise StoreError(
                errno.EIO,
                f"this checkpoint cannot be withdrawn any more: {self.reason}; check the drive, "
                "and start a new process",
                path,
            )

    @contextmanager
    def fatal(self, what: str) -> Iterator[None]:
        """Poison the store if the block raises any error."""
        try:
            yield
        except BaseException as error:
            self.reason = self.reason or f"{what} ({reason_of(error)})"
            raise
