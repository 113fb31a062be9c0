"""A backend that lets something happen at a chosen moment of whoever looks at the files."""

from __future__ import annotations

import errno
from collections.abc import Callable

from gds import Backend, File, StorageError, WrapperBackend
from gds.contract import Lock, Stat


class Meanwhile(WrapperBackend):
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

    def _look(self, kind: str, path: str) -> None:
        self.left -= 1
        if self.left == 0:
            self._what()
        for one in self.due:
            if one[:2] == (kind, path):
                self.due.remove(one)
                one[2]()
                return

    def stat(self, path: str) -> Stat | None:
        self._look("stat", path)
        return super().stat(path)

    def list_dir(self, path: str) -> list[str]:
        self._look("list_dir", path)
        return super().list_dir(path)

    def open(self, path: str, *, writable: bool = False) -> File:
        self._look("open", path)
        return super().open(path, writable=writable)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        self._look("lock", path)
        return super().lock(path, shared=shared, create=create)

    def wrap_file(self, file: File) -> File:
        self._look("opened", file.path)  # the file is open, and has not been read
        return file

    def close(self) -> None:
        """Leave what is inside to training."""
