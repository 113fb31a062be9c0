"""Checks of other programs' files before they are opened, and the reading of JSON files."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from offload.errors import CheckpointError

MAX_JSON_BYTES = 32 << 20
"""Largest JSON file that is read (an index of weights, or the Trainer's state), in bytes. Its
parsed objects take up to 25 times as much memory."""


def require_file(path: str) -> int:
    """Return the size of a regular file, in bytes. Symbolic links are followed.

    Anything else is refused before it is opened: opening a pipe could block, and reading a device
    might never end.
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


def read_json(path: str) -> Any:
    """Return the value of a JSON file of another program. NaN is accepted."""
    size = require_file(path)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes, at most {MAX_JSON_BYTES} are read")
    with open(path, "rb") as file:
        data = file.read(size)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path}: not JSON ({reason})") from error
