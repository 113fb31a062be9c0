"""Backends that let something happen at a chosen moment of whoever uses the files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from gds import Backend, File, LockHeldError, StorageError, WrapperBackend


def _looked(name: str) -> Any:
    """Return a method that does an operation on names, and lets the test look at it."""

    def method(self: Looking, *paths: Any, **options: Any) -> Any:
        self.look(f"before {name}", paths[0])
        try:
            found = getattr(super(Looking, self), name)(*paths, **options)
        except LockHeldError:
            self.look(f"refused {name}", paths[0])
            raise
        self.look(f"after {name}", [path for path in paths if isinstance(path, str)][-1])
        return found

    return method


class Looking(WrapperBackend):
    """Calls `look` before and after each operation on names."""

    stat = _looked("stat")
    list_dir = _looked("list_dir")
    open = _looked("open")
    lock = _looked("lock")
    create = _looked("create")
    make_dir = _looked("make_dir")
    rename = _looked("rename")
    exchange = _looked("exchange")
    sync_dir = _looked("sync_dir")

    def look(self, moment: str, path: str) -> None:
        """Do what the test wants.

        Args:
            moment: Such as ``before rename``, ``after create`` or ``refused lock``.
            path: What it is about; of two, the first one before the operation and the second after.
        """


class Meanwhile(Looking):
    """Lets something happen before one of the operations of a reader.

    Args:
        inner: Has the files; it is not closed with this one.
        nth: Number of the operation before which something happens; 0 for none.
        what: What happens then.
    """

    def __init__(
        self, inner: Backend, nth: int = 0, what: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(inner)
        self.left = nth
        self._what = what
        self.due: list[tuple[str, str, Callable[[], object]]] = []

    def before(self, kind: str, path: str, what: Callable[[], object]) -> None:
        """Let something happen before the next operation of a kind on a path, or in its place."""
        self.due.append((kind, path, what))

    def fail(self, kind: str, path: str, number: int = errno.EIO) -> None:
        """Let the next operation of a kind on a path fail."""

        def raised() -> None:
            raise StorageError(number, kind, path)

        self.before(kind, path, raised)

    def look(self, moment: str, path: str) -> None:
        when, kind = moment.split()
        if when == "before" and kind in ("stat", "list_dir", "open", "lock", "reading"):
            self._look(kind, path)

    def _look(self, kind: str, path: str) -> None:
        self.left -= 1
        if self.left == 0:
            self._what()
        for one in self.due:
            if one[:2] == (kind, path):
                self.due.remove(one)
                one[2]()
                return

    def wrap_file(self, file: File) -> File:
        self.look("before reading", file.path)  # it is open
        return file

    def close(self) -> None:
        """Leave what is inside to training."""
