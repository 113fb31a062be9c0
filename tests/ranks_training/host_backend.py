"""The drives of one of several hosts, which are directories of one machine."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from gds import PosixBackend, StorageError, WrapperBackend
from gds.contract import Stat


class HostBackend(WrapperBackend):
    """A backend to which the directories of other hosts are missing.

    Args:
        folder: Folder that has the directories of all hosts.
        host: Name of the host, with which the names of its directories begin.
    """

    def __init__(self, folder: Path, host: str) -> None:
        super().__init__(PosixBackend())
        self._folder, self._host = str(folder), host

    def is_here(self, path: str) -> bool:
        """Return whether a path is on this host."""
        inside = path.removeprefix(f"{self._folder}/")
        return inside == path or inside.startswith(self._host)

    def stat(self, path: str) -> Stat | None:
        return super().stat(path) if self.is_here(path) else None


def _guarded(name: str) -> Any:
    operation = getattr(WrapperBackend, name)

    def call(backend: HostBackend, path: str, *arguments: Any, **how: Any) -> Any:
        if not backend.is_here(path):
            raise StorageError(errno.ENOENT, f"{name}, on another host", path)
        return operation(backend, path, *arguments, **how)

    return call


for _name in (
    "capabilities", "create", "open", "list_dir", "make_dir", "rename", "exchange", "remove",
    "remove_dir", "sync_dir", "lock", "free_bytes",
):  # fmt: skip
    setattr(HostBackend, _name, _guarded(_name))
