"""Calls of ranks whose model is mostly frozen; they count what is moved in model files."""

from __future__ import annotations

import errno
import threading
import time

import torch

from gds import Buffer, File, IOFuture, PosixBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.format.names import TABLE_NAME
from tests.crash.fault_backend import FaultBackend
from tests.ranks_training.calls import Calls


class Counted(WrapperBackend):
    """Counts the bytes that are written to model files, and those that are read from the drive."""

    written = 0
    read_back = 0
    table_s = 0.0
    """Seconds that each write to the table of a part takes that is opened from now on."""
    held: threading.Event | None = None
    """If set, the next sync of a model file waits for it, and then fails."""

    def wrap_file(self, file: File) -> File:
        if self.table_s and file.path.endswith(TABLE_NAME):
            return _SlowFile(file, self)
        return _CountedFile(file, self) if "model" in file.path else file


class _CountedFile(WrapperFile):
    def __init__(self, inner: File, backend: Counted) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self._backend.written += source.nbytes
        return super().write(source, offset)

    def write_bytes(self, data: bytes, offset: int) -> None:
        self._backend.written += len(data)
        super().write_bytes(data, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        self._backend.read_back += into.nbytes
        return super().read_again(into, offset, direct=direct)

    def sync(self) -> None:
        held = self._backend.held
        if held is None:
            super().sync()
            return
        held.wait()
        self._backend.held = None
        raise StorageError(errno.EIO, "injected failure of sync", self.path)


class _SlowFile(WrapperFile):
    def __init__(self, inner: File, backend: Counted) -> None:
        super().__init__(inner)
        self._backend = backend

    def write_bytes(self, data: bytes, offset: int) -> None:
        time.sleep(self._backend.table_s)
        super().write_bytes(data, offset)


_counted = Counted(PosixBackend())


def begin(calls: Calls) -> None:
    """Freeze the first layer, which is nearly all of the model, and count from now on."""
    getattr(calls.model, "module", calls.model).layers[0].requires_grad_(False)
    calls.backend = FaultBackend(_counted)


def moved(calls: Calls) -> list[int]:
    """Return the bytes written and read back since the last call."""
    found = [_counted.written, _counted.read_back]
    _counted.written = _counted.read_back = 0
    return found


def slow_tables(calls: Calls, seconds: float) -> None:
    """Let writes to tables take long."""
    del calls
    _counted.table_s = seconds


def hold_sync(calls: Calls) -> None:
    """Let the next sync of a model file wait for `fail_sync`, and then fail."""
    del calls
    _counted.held = threading.Event()


def fail_sync(calls: Calls) -> None:
    """Let the sync fail that waits."""
    del calls
    if _counted.held is None:
        raise RuntimeError("no sync is held")
    _counted.held.set()


def fill(calls: Calls, value: float) -> None:
    """Fill the frozen matrix with a value."""
    weight = getattr(calls.model, "module", calls.model).layers[0].weight
    with torch.no_grad():
        getattr(weight, "to_local", lambda: weight)().fill_(value)
