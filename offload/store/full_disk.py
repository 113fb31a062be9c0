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
