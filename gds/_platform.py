"""Refuses other systems than Linux, in one line, when it is imported: before all else is."""

from __future__ import annotations

import os
import sys

_COMMANDS = ("gds", "offload")


def require_linux() -> None:
    """Refuse to be imported by Python of another system.

    Raises:
        ImportError: It is another one.
        SystemExit: Likewise, where one of this package's commands is what imports it: its message
            is then all that is printed.
    """
    if sys.platform.startswith("linux"):
        return
    message = (
        "ssd-offload needs Linux (direct I/O, file locks and durable renames as Linux has them), "
        f"and this Python is for {sys.platform}: use a Linux machine, WSL 2 or a container"
    )
    if _is_command():
        raise SystemExit(f"error: {message}")
    raise ImportError(message)


def _is_command() -> bool:
    name = os.path.basename((sys.argv or [""])[0].replace("\\", "/"))
    if name.removesuffix(".exe").removesuffix("-script.py") in _COMMANDS:
        return True
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module.partition(".")[0] in _COMMANDS


require_linux()
