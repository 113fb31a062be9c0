"""Calls of ranks whose model is mostly frozen; they count what is moved in model files."""

from __future__ import annotations

from gds import Buffer, File, IOFuture, PosixBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from tests.crash.fault_backend import FaultBackend
from tests.ranks_training.calls import Calls


class Counted(WrapperBackend):
    """Counts the bytes that are written to model files, and those that are read from the drive."""

    written = 0
    read_back = 0

    def wrap_file(self, file: File) -> File:
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
