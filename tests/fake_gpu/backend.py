"""Storage that moves memory of the device that is not there."""

from __future__ import annotations

from typing import Any

from gds import Backend, Buffer, File, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile
from tests.fake_gpu.device import FakeDevice
from tests.fake_gpu.streams import GARBAGE


class DeviceMemory:
    """A buffer that the host cannot address, as far as anybody can see."""

    kind = "device"

    def __init__(self, buffer: Buffer) -> None:
        self.hidden = buffer
        self.nbytes, self.address = buffer.nbytes, buffer.address

    def slice(self, start: int, nbytes: int) -> DeviceMemory:
        return DeviceMemory(self.hidden.slice(start, nbytes))

    def memoryview(self) -> memoryview:
        raise TypeError("device memory has no host view")


class DeviceBackend(WrapperBackend):
    """Another backend, which can allocate memory of the device and move it.

    Args:
        inner: Has the files.
        device: Of which compute must have ended before its memory is moved.
    """

    def __init__(self, inner: Backend, device: FakeDevice) -> None:
        super().__init__(inner)
        self._device = device
        self.device_bytes = 0

    def allocate(self, nbytes: int, kind: str | None = None) -> Any:
        buffer = self.inner.allocate(nbytes)
        if kind != "device":
            return buffer
        self.device_bytes += nbytes
        buffer.memoryview()[:] = bytes([GARBAGE]) * nbytes
        return DeviceMemory(buffer)

    def wrap_file(self, file: File) -> File:
        return _DeviceFile(file)

    def reopened(self) -> DeviceBackend:
        return DeviceBackend(self.inner.reopened(), self._device)  # type: ignore[attr-defined]


class _DeviceFile(WrapperFile):
    def read(self, into: Any, offset: int) -> IOFuture:
        return self.inner.read(getattr(into, "hidden", into), offset)

    def read_again(self, into: Any, offset: int, *, direct: bool) -> IOFuture:
        return self.inner.read_again(getattr(into, "hidden", into), offset, direct=direct)

    def write(self, source: Any, offset: int) -> IOFuture:
        return self.inner.write(getattr(source, "hidden", source), offset)
