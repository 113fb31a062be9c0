"""Full disks: their error numbers, and a message that names the needed and the free space."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, StorageError
from offload.units import size

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers which say that there is no space."""


@contextmanager
def naming_free_space(backend: Backend, path: str, needed_bytes: int, what: str) -> Iterator[None]:
    """Add the needed and the free space to the error if the block finds no space.

    Args:
        backend: Backend of the file system.
        path: Path of the file or directory that is being created.
        needed_bytes: Size in bytes of everything that is being created.
        what: Description of what is being created, for the message, such as "a slot".

    Raises:
        gds.StorageError: The error of the block. An ENOSPC error is replaced by one that names both
            sizes.
    """
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
