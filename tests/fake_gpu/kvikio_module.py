"""What is used of KvikIO: files whose transfers know addresses and numbers only."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_gpu.machine import FakeGpu

ALIGNMENT = 4096


class Restore:
    """What `kvikio.defaults.set` returns: settings have changed already, and may change back."""

    def __init__(self, settings: dict[str, Any], before: dict[str, Any]) -> None:
        self._settings, self._before = settings, before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._settings.update(self._before)


class CompatMode(enum.Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class CuFile:
    """`kvikio.CuFile`: two transfers, each on a thread that knows an address and a number."""

    def __init__(self, gpu: FakeGpu, path: str, flags: str) -> None:
        self.gpu = gpu
        mode = gpu.settings["compat_mode"]
        if mode is CompatMode.AUTO:
            gpu.violations.append("a file was opened with AUTO, which can hang")
        if flags not in ("r", "r+"):
            gpu.violations.append(f"a file was opened with {flags!r}, which creates or truncates")
        if mode is CompatMode.OFF:
            if os.environ.get("CUFILE_ALLOW_COMPAT_MODE") is None:
                gpu.violations.append("cuFile was loaded while it may copy through the host")
            if not gpu.gds:
                raise RuntimeError("cuFile error at: file_handle.cpp:90: unsupported file system")
        self.mode = "gds" if mode is CompatMode.OFF else "compat"
        try:
            self._fd = os.open(path, os.O_RDONLY if flags == "r" else os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"Unable to open file. {path}: {error.strerror}") from None
        self._in_flight: list[None] = []
        gpu.num_open += 1
        gpu.num_opened += 1

    def fileno(self) -> int:
        return self._fd

    def is_direct_io_supported(self) -> bool:
        return True

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._in_flight:
            self.gpu.violations.append("a file was closed during its transfers")
        os.close(self._fd)
        self._fd = -1
        self.gpu.num_open -= 1

    def __del__(self) -> None:
        if hasattr(self, "_in_flight"):  # it was opened
            self.close()

    def pread(
        self, buf: Any, size: int, file_offset: int = 0, task_size: int | None = None
    ) -> _Future:
        return self._start("read", buf, size, file_offset)

    def pwrite(
        self, buf: Any, size: int, file_offset: int = 0, task_size: int | None = None
    ) -> _Future:
        return self._start("write", buf, size, file_offset)

    def _start(self, direction: str, buf: Any, size: int, offset: int) -> _Future:
        gpu, (address, nbytes) = self.gpu, range_of(buf)
        gpu.calls.append((direction, self.mode, offset, size))
        if size > nbytes:
            raise ValueError("Size is greater than the size of the buffer")
        # Its plain calls synchronise the stream; in compatibility mode, copies are ordered with it.
        gpu.wait_for_training(f"{direction} by KvikIO, {self.mode}")
        task = Task(gpu, self._fd, self.mode, self._in_flight)
        return _Future(lambda: task.move(direction, address, size, offset))


class Task:
    """A transfer, which knows numbers only: nothing here keeps a buffer or a file."""

    def __init__(self, gpu: FakeGpu, fd: int, mode: str, in_flight: list[None]) -> None:
        self._gpu, self._fd, self._mode, self._in_flight = gpu, fd, mode, in_flight
        in_flight.append(None)

    def move(self, direction: str, address: int, size: int, offset: int) -> int:
        gpu = self._gpu
        try:
            gpu.need_device(direction, address, size)
            if text := gpu.error(direction, offset):
                raise RuntimeError(text)
            view = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
            call = os.preadv if direction == "read" else os.pwritev
            wanted, done = min(gpu.shorten(direction, size), size), 0
            while done < wanted:
                try:
                    moved = call(self._fd, [view[done:wanted]], offset + done)
                except OSError as error:
                    raise RuntimeError(
                        f"POSIX error on p{direction}: {os.strerror(error.errno or errno.EIO)}"
                    ) from None
                if moved == 0:
                    if self._mode == "gds":
                        break  # cuFile returns what there was
                    raise RuntimeError("POSIX error on pread: EOF")
                done += moved
            gpu.need_device(f"the end of a {direction}", address, size)
            return done
        finally:
            self._in_flight.pop()


class _Future:
    """`kvikio.IOFuture`: holds neither buffer nor file, and is asked once."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._result: int | BaseException | None = None
        self._asked = False

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # noqa: BLE001 - for who asks
                self._result = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def get(self) -> int:
        if self._asked:
            raise RuntimeError("std::future_error: No associated state")
        self._asked = True
        self._thread.join()
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result


def note_alignment(
    gpu: FakeGpu, direction: str, base: int, start: int, size: int, offset: int
) -> None:
    """Note a violation if cuFile would have to copy, or looks for memory by another address."""
    if (offset | size | (base + start)) % ALIGNMENT:
        gpu.violations.append(f"{direction} of {size} at {offset} is not aligned")
    for address, nbytes in gpu.registered.copy().items():
        if address <= base + start < address + nbytes and base != address:
            gpu.violations.append(f"{direction}: not by the address that was registered")


def range_of(buf: Any) -> tuple[int, int]:
    """Read `__cuda_array_interface__` as KvikIO does."""
    interface = buf.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["typestr"] == "|u1"
    assert interface["strides"] is None
    address, read_only = interface["data"]
    assert not read_only
    (nbytes,) = interface["shape"]
    return address, nbytes
