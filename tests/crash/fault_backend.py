"""A backend in which a chosen operation fails, and which sees what is written where afterwards."""

from __future__ import annotations

import errno
import json
import posixpath
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Literal, TypeVar

from gds import Backend, Buffer, IOFuture, StorageError, WrapperBackend
from gds.backends.threads import TransferPool
from gds.backends.wrapper import WrapperFile
from gds.contract import File

Kind = Literal[
    "read", "write", "read_bytes", "write_bytes", "sync", "sync_dir", "rename", "create",
    "make_dir", "open", "remove", "stat", "list_dir", "lock", "capabilities", "free_bytes",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = (
    "read", "write", "read_bytes", "write_bytes", "sync", "sync_dir", "rename", "create",
    "make_dir", "open", "remove",
)  # fmt: skip
"""Those that move data, open files or change names; the others only look."""

ERRNO: Final[dict[Kind, int]] = {
    "write": errno.ENOSPC,
    "create": errno.ENOSPC,
    "make_dir": errno.ENOSPC,
}
"""What a kind fails with; EIO unless it is listed."""

When = Literal["at once", "in time", "later"]

_R = TypeVar("_R")


def _may_fail(name: str, kind: Kind) -> Any:
    """Return a method that does an operation, or fails it."""

    def method(self: FaultBackend, path: str, *rest: Any, **options: Any) -> Any:
        forward = getattr(super(FaultBackend, self), name)
        return self.run(kind, path, lambda: forward(path, *rest, **options))

    return method


class FaultBackend(WrapperBackend):
    """Forwards everything, but lets the N-th operation of a kind fail, once or from then on.

    An operation that fails has no effect. When a transfer fails is within the contract's limits.
    """

    create = _may_fail("create", "create")
    open = _may_fail("open", "open")
    make_dir = _may_fail("make_dir", "make_dir")
    remove = _may_fail("remove", "remove")
    remove_dir = _may_fail("remove_dir", "remove")
    sync_dir = _may_fail("sync_dir", "sync_dir")
    stat = _may_fail("stat", "stat")
    list_dir = _may_fail("list_dir", "list_dir")
    capabilities = _may_fail("capabilities", "capabilities")
    free_bytes = _may_fail("free_bytes", "free_bytes")
    lock = _may_fail("lock", "lock")

    def __init__(self, inner: Backend, when: When = "in time") -> None:
        """Wrap a backend.

        Args:
            inner: Has the files.
            when: A transfer fails ``at once``, in the call; its future has failed when the call
                returns (``in time``); or transfers run on threads and end ``later``.
        """
        super().__init__(inner)
        self.when = when
        self._pools = {kind: TransferPool(f"later-{kind}", 1) for kind in ("read", "write")}
        self.num_done: Counter[Kind] = Counter()
        self.num_failed = 0
        self.violations: list[str] = []
        """Writes to what had been sealed when a sync or rename failed."""
        self._armed: tuple[Kind, int, bool] | None = None
        self._chosen: Callable[[Kind, str], bool] | None = None
        self._number: int | None = None
        """What it fails with, if that is not the kind's own."""
        self._sealed: dict[int, str] = {}
        self._protected: dict[int, str] = {}
        self._lock = threading.RLock()

    def fail(self, kind: Kind, nth: int, *, forever: bool) -> None:
        """Let the `nth` operation of a kind from now on fail, or all from that one on."""
        with self._lock:
            self._armed = (kind, self.num_done[kind] + nth, forever)

    def fail_if(self, chosen: Callable[[Kind, str], bool], number: int | None = None) -> None:
        """Let the first operation fail, of those to come, that is chosen by its kind and path.

        Args:
            chosen: Returns whether it is this one.
            number: Of the error; None for that of the kind.
        """
        with self._lock:
            self._chosen, self._number = chosen, number

    def repair(self) -> None:
        """Let nothing fail any more."""
        with self._lock:
            self._armed = self._chosen = self._number = None

    def new_process(self) -> None:
        """Note that what a failed sync forbids is forbidden no longer."""
        with self._lock:
            self._protected = {}

    def wrap_file(self, file: File) -> File:
        return _FaultFile(file, self)

    def rename(self, source: str, target: str) -> None:
        self.run("rename", source, lambda: super(FaultBackend, self).rename(source, target))
        self._note_sealed(target)

    def exchange(self, a: str, b: str) -> None:
        """Exchange, or fail; counted with the renames."""
        self.run("rename", a, lambda: super(FaultBackend, self).exchange(a, b))
        self._note_sealed(b)

    def run(self, kind: Kind, path: str, operation: Callable[[], _R]) -> _R:
        """Count an operation and do it, or fail it."""
        if error := self.due(kind, path):
            raise error
        return operation()

    def due(self, kind: Kind, path: str) -> StorageError | None:
        """Count an operation; returns the error it must fail with, if it must."""
        with self._lock:
            self.num_done[kind] += 1
            if not self._is_due(kind, path):
                return None
            self.num_failed += 1
            if kind in ("sync", "sync_dir", "rename"):
                self._protected.update(self._sealed)
            number = self._number or ERRNO.get(kind, errno.EIO)
            return StorageError(number, f"injected failure of {kind}", path)

    def _is_due(self, kind: Kind, path: str) -> bool:
        if self._chosen is not None and self._chosen(kind, path):
            self._chosen = None
            return True
        if self._armed is None or self._armed[0] != kind:
            return False
        _, nth, forever = self._armed
        number = self.num_done[kind]
        return number == nth or (forever and number > nth)

    def close(self) -> None:
        """Let the threads end; the files stay."""
        for pool in self._pools.values():
            pool.close()

    def transfer(self, kind: Kind, path: str, start: Callable[[], IOFuture]) -> IOFuture:
        """Count a transfer and start it, or fail it."""
        error = self.due(kind, path)
        if error is None and kind == "write":
            self.written(path)
        if self.when == "later":
            return self._pools[kind].submit(lambda: _raised(error) if error else start().result())
        if error is None:
            return start()
        if self.when == "at once":
            raise error
        future: Future[int] = Future()
        future.set_exception(error)
        return future

    def written(self, path: str) -> None:
        """Note that a file has been written to."""
        with self._lock:
            found = self.inner.stat(path)
            if found is not None and found.inode in self._protected:
                self.violations.append(f"{path}, which was {self._protected[found.inode]}")

    def synced(self, path: str) -> None:
        """Note that a file has been synced: a slot's manifest is, last of all in a withdrawal."""
        directory, name = posixpath.split(path)
        withdrawn = name == "manifest.json" and "/.slot-" in directory
        if withdrawn or (name == "part.json" and b"invalid" in self._content(path)):
            with self._lock:
                for inode in self._inodes(directory):
                    self._sealed.pop(inode, None)

    def _note_sealed(self, path: str) -> None:
        if posixpath.basename(path).startswith("step-"):
            manifest = json.loads(self._content(f"{path}/manifest.json"))
            parts = [f"{part['directory']}/{part['name']}" for part in manifest["body"]["parts"]]
            with self._lock:
                for directory in (path, *parts):
                    self._sealed.update(dict.fromkeys(self._inodes(directory), path))

    def _content(self, path: str) -> bytes:
        file = self.inner.open(path)
        try:
            return file.read_bytes(0, file.size_bytes)
        finally:
            file.close()

    def _inodes(self, directory: str) -> list[int]:
        stats = (self.inner.stat(f"{directory}/{n}") for n in self.inner.list_dir(directory))
        return [stat.inode for stat in stats if stat is not None]


class _FaultFile(WrapperFile):
    """Forwards, or fails."""

    def __init__(self, inner: File, backend: FaultBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self._backend.transfer("read", self.path, lambda: self.inner.read(into, offset))

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        return self._backend.transfer(
            "read", self.path, lambda: self.inner.read_again(into, offset, direct=direct)
        )

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return self._backend.transfer("write", self.path, lambda: self.inner.write(source, offset))

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        return self._backend.run(
            "read_bytes", self.path, lambda: self.inner.read_bytes(offset, nbytes)
        )

    def write_bytes(self, data: bytes, offset: int) -> None:
        self._backend.run("write_bytes", self.path, lambda: self.inner.write_bytes(data, offset))
        self._backend.written(self.path)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        """Counted with the writes."""
        self._backend.written(self.path)
        return self._backend.run(
            "write", self.path, lambda: super(_FaultFile, self).clone(source, offset, nbytes)
        )

    def sync(self) -> None:
        self._backend.run("sync", self.path, self.inner.sync)
        self._backend.synced(self.path)


def _raised(error: StorageError) -> int:
    raise error
