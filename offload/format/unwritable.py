"""Errors about missing write access to a store, with advice for the user."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gds import StorageError
from offload.errors import UnreadableError, UnwritableError

_ADVICE: Final = {
    errno.EACCES: "check who has write permission (ls -l {}), and run this as that user",
    errno.EPERM: "check its attributes (ls -l, lsattr {}), and run this as a user who may write",
    errno.EROFS: "its file system is mounted read-only: mount it for writing",
}


@contextmanager
def writing(store: str) -> Iterator[None]:
    """Turn an error of the body about missing write access into one with advice for the user.

    Args:
        store: Directory of the store that is written to, for the message.

    Raises:
        UnwritableError: This user or this mount may not write to the store.
    """
    try:
        yield
    except (UnreadableError, UnwritableError):
        raise
    except StorageError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        path = os.path.relpath(os.fsdecode(error.filename), store)
        inside = path.partition("/")[0]  # users know this name, but not those of temporary files
        where = f", at {inside}" if inside not in (".", "..") else ""
        raise UnwritableError(
            error.errno or errno.EACCES,
            f"this store cannot be written ({os.strerror(error.errno or 0)}{where}): "
            f"{advice.format(store)}; or copy it to a directory of your own",
            store,
        ) from error
