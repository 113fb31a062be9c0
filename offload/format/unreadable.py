"""Errors of reading, divided into those about a checkpoint's content and all others.

If a file is gone, is shorter than it was, or was replaced by a link or a directory, it is not what
was sealed. So the checkpoint is refused, and an older one may take its place. All other errors (of
a drive, a limit, a permission, a network) may be temporary. Continuing from an older checkpoint
because of a temporary error would lose the newest one for nothing. So these errors stop the
operation.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gds import StorageError
from offload.errors import CheckpointError, UnreadableError

_OF_CONTENT: Final = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.EISDIR,
        errno.ENODATA,  # a read reached the end of the file
        errno.ENXIO,  # a socket, or a device without a driver
        errno.ENAMETOOLONG,  # only a manifest can name a path that long
    }
)

_ADVICE: Final = {
    errno.ENOMEM: "free memory, and try again",
    errno.EIO: "check the drive (dmesg), and try again",
    errno.EACCES: "check its permissions (ls -l), and try again",
    errno.EPERM: "check its permissions and attributes (ls -l, lsattr), and try again",
    errno.ESTALE: "check whether the file system is still mounted, and try again",
}


def is_of_content(error: OSError) -> bool:
    """Return whether an error of reading shows that the content is not what was written."""
    return error.errno in _OF_CONTENT


def unreadable(error: StorageError, *, checkpoint: str = "", then: str = "") -> UnreadableError:
    """Return the exception to raise for an error that says nothing about the content.

    Args:
        error: Error of the storage layer; it names the path.
        checkpoint: Directory of the checkpoint, if the error concerns only one.
        then: Further sentence for the message.
    """
    if isinstance(error, UnreadableError):
        message = error.strerror or ""
    else:
        advice = _ADVICE.get(error.errno or 0, "try again")
        why = f"could not be read ({error.strerror})"
        message = f"{why}, so it is not known whether its content is damaged: {advice}"
    if checkpoint:
        message += f". If it stays unreadable, move {checkpoint} out of the store"
    if then:
        message += f". {then}"
    return UnreadableError(error.errno or errno.EIO, message, str(error.filename))


@contextmanager
def as_unreadable(then: str) -> Iterator[None]:
    """Turn every storage error of the body into an `UnreadableError`.

    Args:
        then: Further sentence for the message.

    Raises:
        UnreadableError: Something could not be read, or could not be made durable.
    """
    try:
        yield
    except StorageError as error:
        raise unreadable(error, then=then) from error


@contextmanager
def reading(checkpoint: str = "") -> Iterator[None]:
    """Turn storage errors of the body into errors about the content, or about reading it.

    Args:
        checkpoint: Directory of the checkpoint that is read, for the message.

    Raises:
        CheckpointError: The content is not what was sealed.
        UnreadableError: The content could not be read, so nothing is known about it.
    """
    try:
        yield
    except UnreadableError:
        raise
    except StorageError as error:
        if is_of_content(error):
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error
        raise unreadable(error, checkpoint=checkpoint) from error
