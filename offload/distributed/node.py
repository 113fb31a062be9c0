"""The running system that this rank is on, and what it calls a directory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from gds import Backend

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Node:
    """A running system."""

    host: str
    """Name of the host, for messages."""

    token: str
    """Text that is the same for two processes if, and only if, one running system has both."""


def this_node() -> Node:
    """Return the running system of this process."""
    host = socket.gethostname()
    return Node(host, _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else host)


def place_of(backend: Backend, directory: str) -> str:
    """Return a text that is the same for two processes if they mean the same directory.

    It names the running system. So a directory that two hosts share counts as two directories. If
    the directory is missing, the text names its path.
    """
    token = this_node().token
    if backend.stat(directory) is not None:
        try:
            found = os.stat(directory)
        except OSError:  # the backend has directories of its own
            return f"{token}:{directory}"
        return f"{token}:{found.st_dev}:{found.st_ino}"
    return f"{token}:{os.path.realpath(directory)}"
