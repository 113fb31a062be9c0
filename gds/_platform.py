"""Platform check: importing this module fails on any system but Linux.

The package imports it before everything else, so that the error is one clear line.
"""

from __future__ import annotations

import os
import sys

_COMMANDS = ("gds", "offload")


def require_linux() -> None:
    """Raise an error unless this Python runs on Linux."""
    if sys.platform.startswith("linux"):
        return
    message = (
        "ssd-offload requires Linux, whose direct I/O, file locks and durable renames it uses, "
        f"but this Python runs on {sys.platform}: use a Linux machine, WSL 2 or a container"
    )
    if _is_command():
        raise SystemExit(f"error: {message}")
    raise ImportError(message)


def _is_command() -> bool:
    """Return whether this process runs a command of the package, by script or by ``-m``."""
    name = os.path.basename((sys.argv or [""])[0].replace("\\", "/"))
    if name.removesuffix(".exe").removesuffix("-script.py") in _COMMANDS:
        return True
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module.partition(".")[0] in _COMMANDS


require_linux()
