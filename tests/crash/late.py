"""Transfers that begin late: a test sees what was not waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from gds import Buffer, File, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile


class Late(Future[int]):
    """A transfer that begins when it is waited for."""

    def __init__(self, transfer: Callable[[], IOFuture]) -> None:
        super().__init__()
        self._transfer = transfer

    def result(self, timeout: float | None = None) -> int:
        """Make the transfer if it has not been made; return the number of bytes."""
        if not self.done():
            try:
                self.set_result(self._transfer().result())
            except StorageError as error:
                self.set_exception(error)
        return super().result(timeout)


class LateBackend(WrapperBackend):
    """Writes some files when it is waited for, and sees what is synced or read before that."""

    def __init__(self, file_name: str) -> None:
        super().__init__(MemoryBackend())
        self.file_name = file_name
        self.reads_late = False
        """Whether reads begin late as well."""
        self.late: list[tuple[str, int, Late]] = []
        self.too_early: list[str] = []

    def unfinished(self, path: str = "", offset: int = -1) -> bool:
        """Return whether a write has not ended: any one, or that at an offset of a file."""
        return any(
            not late.done() and (not path or (where, at) == (path, offset))
            for where, at, late in self.late
        )

    def finish(self) -> None:
        """Let all writes end, which closing would wait for otherwise."""
        for _, _, late in self.late:
            late.result()

    def wrap_file(self, file: File) -> File:
        return _LateFile(file, self)


class _LateFile(WrapperFile):
    def __init__(self, inner: File, backend: LateBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self._backend.file_name not in self.path:
            return super().write(source, offset)
        late = Late(lambda: self.inner.write(source, offset))
        self._backend.late.append((self.path, offset, late))
        return late

    def read(self, into: Buffer, offset: int) -> IOFuture:
        if self._backend.unfinished(self.path, offset):
            self._backend.too_early.append(f"read {self.path}")
        if not self._backend.reads_late or self._backend.file_name not in self.path:
            return super().read(into, offset)
        late = Late(lambda: self.inner.read(into, offset))
        self._backend.late.append((self.path, offset, late))
        return late

    def sync(self) -> None:
        if self._backend.unfinished():
            self._backend.too_early.append(f"sync {self.path}")
        super().sync()
