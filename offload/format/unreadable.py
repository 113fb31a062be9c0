"""What an error of reading says: something about the content of a checkpoint, or nothing about it.

A file that is gone, is shorter than it was, or has a link or a directory in its place is not what
was sealed: the checkpoint is refused, and an older one may take its place. All other errors (of a
drive, a limit, a permission, a network) may be over in a moment. Whoever went on from an older
checkpoint because of one would give up the newest for nothing. So those stop what was asked for.
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
        errno.ENODATA,  # a read met the end of the file
        errno.ENXIO,  # a socket, or a device without a driver
        errno.ENAMETOOLONG,  # only a manifest can name such a path
    }
)

_ADVICE: Final = {
    errno.EMFILE: "close files, or raise the limit of open files (ulimit -n), and try again",
    errno.ENFILE: "the whole machine has too many files open (sysctl fs.file-max): close some, and "
    "try again",
    errno.ENOMEM: "free memory, and try again",
    errno.EIO: "look at the drive (dmesg), and try again",
    errno.EACCES: "see who may read it (ls -l), and try again",
    errno.EPERM: "see who may read it (ls -l, lsattr), and try again",
    errno.ESTALE: "see whether the file system is still mounted, and try again",
}


def is_of_content(error: OSError) -> bool:
    """Return whether an error of reading says that the content is not what was written."""
    return error.errno in _OF_CONTENT


def unreadable(error: StorageError, *, checkpoint: str = "", then: str = "") -> UnreadableError:
    """Return what to raise for an error that says nothing about the content.

    Args:
        error: What happened; names the path.
        checkpoint: The directory of the one checkpoint that is concerned, if it is only one.
        then: A further sentence for the message.
    """
    if isinstance(error, UnreadableError):
        message = error.strerror or ""
    else:
        advice = _ADVICE.get(error.errno or 0, "try again")
        why = f"could not be read ({error.strerror})"
        message = f"{why}, which says nothing about what it holds: {advice}"
    if checkpoint:
        message += f". If it stays unreadable, move {checkpoint} out of the store"
    if then:
        message += f". {then}"
    return UnreadableError(error.errno or errno.EIO, message, str(error.filename))


@contextmanager
def stopping(then: str) -> Iterator[None]:
    """Let any error of reading in the body stop what is done, by name.

    Args:
        then: A further sentence for the message.

    Raises:
        UnreadableError: Something could not be read, or not be made durable.
    """
    try:
        yield
    except StorageError as error:
        raise unreadable(error, then=then) from error


@contextmanager
def reading(checkpoint: str = "") -> Iterator[None]:
    """Turn errors of reading in the body into what they say.

    Args:
        checkpoint: The directory of the checkpoint that is read, for the message.

    Raises:
        CheckpointError: The content is not what was sealed.
        UnreadableError: It could not be read, and nothing is known of it.
    """
    try:
        yield
    except UnreadableError:
        raise
    except StorageError as error:
        if is_of_content(error):
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error
        raise unreadable(error, checkpoint=checkpoint) from error
