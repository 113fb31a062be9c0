"""What a full disk looks like, and what to say of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, StorageError
from offload.units import size

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors that say that there is no space."""


@contextmanager
def saying_what_is_free(
    backend: Backend, path: str, needed_bytes: int, what: str
) -> Iterator[None]:
    """Say, where the block finds no space for something, how much it needs and how much is free.

    Args:
        backend: Where.
        path: What is being made.
        needed_bytes: All that it takes.
        what: What it is, for people.

    Raises:
        gds.StorageError: The block's; ENOSPC with both numbers.
    """
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENOSPC:
            raise
        try:
            free = backend.free_bytes(os.path.dirname(path))
        except StorageError:
            raise error from None  # it says more than that the rest cannot be told
        raise StorageError(
            errno.ENOSPC, f"reserve {size(needed_bytes)} for {what}, with {size(free)} free", path
        ) from error
