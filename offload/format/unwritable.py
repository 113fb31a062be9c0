"""What an error of writing says if the user has no right to write: who may, or what else to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gds import StorageError
from offload.errors import UnreadableError, UnwritableError

_ADVICE: Final = {
    errno.EACCES: "see who may write there (ls -l {}), and do it as that user",
    errno.EPERM: "see who may write there (ls -l, lsattr {}), and do it as that user",
    errno.EROFS: "its file system is mounted read-only: mount it for writing",
}


@contextmanager
def writing(store: str) -> Iterator[None]:
    """Say of an error in the body that is of a missing right to write what to do next.

    Args:
        store: The directory that is written to, for the message.

    Raises:
        UnwritableError: This user, or this mount, may not write there.
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
        inside = path.partition("/")[0]  # which is known to users; names of temporary files are not
        where = f", at {inside}" if inside not in (".", "..") else ""
        raise UnwritableError(
            error.errno or errno.EACCES,
            f"this store cannot be written ({os.strerror(error.errno or 0)}{where}): "
            f"{advice.format(store)}; or copy it to a directory of your own",
            store,
        ) from error
