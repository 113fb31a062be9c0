"""Files that other programs have made, before they are opened."""

from __future__ import annotations

import os
import stat

from offload.errors import CheckpointError


def require_file(path: str) -> int:
    """Return the size of a regular file, in bytes; links to one are followed.

    Anything else is refused before it is opened: a pipe would be waited for, and a device read for
    ever.

    Raises:
        CheckpointError: It is something else, or is not there.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened ({reason})") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path}: {kind}, expected a file")
    return found.st_size
