"""The drives of one of several hosts, which are directories of one machine."""

from __future__ import annotations

import errno
from pathlib import Path

from gds import File, PosixBackend, StorageError, WrapperBackend
from gds.contract import Capabilities, Lock, Stat


class HostBackend(WrapperBackend):
    """A backend to which the directories of other hosts are missing.

    Args:
        folder: Folder that has the directories of all hosts.
        host: Name of the host, with which the names of its directories begin.
    """

    def __init__(self, folder: Path, host: str) -> None:
        super().__init__(PosixBackend())
        self._folder, self._host = str(folder), host

    def _is_here(self, path: str) -> bool:
        inside = path.removeprefix(f"{self._folder}/")
        return inside == path or inside.startswith(self._host)

    def _require_here(self, what: str, path: str) -> None:
        if not self._is_here(path):
            raise StorageError(errno.ENOENT, f"{what}, on host {self._host}", path)

    def stat(self, path: str) -> Stat | None:
        return super().stat(path) if self._is_here(path) else None

    def capabilities(self, directory: str) -> Capabilities:
        self._require_here("capabilities", directory)
        return super().capabilities(directory)

    def create(self, path: str, size_bytes: int) -> File:
        self._require_here("create", path)
        return super().create(path, size_bytes)

    def open(self, path: str, *, writable: bool = False) -> File:
        self._require_here("open", path)
        return super().open(path, writable=writable)

    def list_dir(self, path: str) -> list[str]:
        self._require_here("list_dir", path)
        return super().list_dir(path)

    def make_dir(self, path: str) -> None:
        self._require_here("make_dir", path)
        super().make_dir(path)

    def rename(self, source: str, target: str) -> None:
        self._require_here("rename", source)
        super().rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        self._require_here("exchange", a)
        super().exchange(a, b)

    def remove(self, path: str) -> None:
        self._require_here("remove", path)
        super().remove(path)

    def remove_dir(self, path: str) -> None:
        self._require_here("remove_dir", path)
        super().remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self._require_here("sync_dir", path)
        super().sync_dir(path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        self._require_here("lock", path)
        return super().lock(path, shared=shared, create=create)

    def free_bytes(self, directory: str) -> int:
        self._require_here("free_bytes", directory)
        return super().free_bytes(directory)
