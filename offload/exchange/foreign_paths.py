"""Files that other programs have made, before they are opened."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from offload.errors import CheckpointError

MAX_JSON_BYTES = 32 << 20
"""Of a list of weights, or of the Trainer's state; as objects they take up to 25 times as much."""


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


def read_json(path: str) -> Any:
    """Return the value of a JSON file of another program, which may have NaN in it.

    Raises:
        CheckpointError: It is no regular file, is too large, or is not JSON.
    """
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
