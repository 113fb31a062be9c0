"""A GPU made of host memory, and the libraries at its boundary: what is used of CuPy and KvikIO.

Nothing of ours is replaced. What the fake makes worse than a real machine, so that mistakes show:
streams do nothing until somebody waits for them; device memory is filled with rubbish when it is
allocated and when it is freed; futures and tasks hold on to neither buffer nor file; and every
rule of the libraries that a caller can break is noted in `violations`.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import gc
import os
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

import gds.buffers.cuda

ALIGNMENT = 4096
RUBBISH = 0xDD


class _Current(threading.local):
    """The device that is current in each thread: CUDA begins with the first one."""

    number = 0


class FakeGpu:
    """The state of the machine, and what goes wrong on it."""

    def __init__(self) -> None:
        self.gds = False
        """Whether cuFile takes files."""
        self.copies_untold = False
        """Whether cuFile was loaded with its own compatibility mode allowed."""
        self.shorten: Callable[[str, int], int] = lambda _direction, size: size
        """How many bytes of a transfer are moved."""
        self.error: Callable[[str, int], str | None] = lambda _direction, _offset: None
        """The text of the error of a transfer, if it is to fail."""
        self.refuses_registration = False
        self.violations: list[str] = []
        self.calls: list[tuple[str, str, int, int]] = []
        """Direction, mode of the handle, offset and size of every transfer."""
        self.live: dict[int, int] = {}
        """Device memory: address and length."""
        self.adopted: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.num_registrations = 0
        self.num_open = 0
        """Handles of KvikIO that are open."""
        self.num_opened = 0
        self.settings: dict[str, Any] = {
            "compat_mode": CompatMode.AUTO,
            "num_threads": 1,
            "task_size": 4 << 20,
            "gds_threshold": 16 << 10,
            "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }
        self.current = _Current()
        self.lock = threading.RLock()
        self._streams: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._ran: dict[int, int] = defaultdict(int)
        self._num_streams = 0

    # Memory.

    def is_device(self, address: int, nbytes: int) -> bool:
        with self.lock:
            # Copied at once: memory may be freed by a collection wherever Python allocates.
            ranges = [*self.live.copy().items(), *self.adopted.copy().items()]
        return any(start <= address and address + nbytes <= start + n for start, n in ranges)

    def need_device(self, what: str, address: int, nbytes: int) -> None:
        if not self.is_device(address, nbytes):
            self.violations.append(f"{what}: {nbytes} bytes at {address:#x} are no device memory")

    # Streams.

    def new_stream(self) -> int:
        with self.lock:
            self._num_streams += 1
            return 1000 + self._num_streams

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        """Queue work, as a kernel launch does."""
        with self.lock:
            self._streams[stream].append(work)

    def position(self, stream: int) -> int:
        with self.lock:
            return len(self._streams[stream])

    def run(self, stream: int, position: int) -> None:
        with self.lock:
            while self._ran[stream] < position:
                queue, number = self._streams[stream], self._ran[stream]
                work, queue[number] = queue[number], _nothing
                self._ran[stream] += 1
                work()

    def reset(self) -> None:
        """Forget the work that nobody waited for, and the memory that it refers to."""
        self._streams.clear()

    def modules(self) -> dict[str, types.ModuleType]:
        """Return the modules by the names under which they are imported."""
        kvikio, defaults, driver = (
            types.ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
        )
        for name, value in {
            "CompatMode": CompatMode,
            "CuFile": lambda path, flags="r": CuFile(self, path, flags),
            "memory_register": self._register,
            "memory_deregister": self._deregister,
            "defaults": defaults,
            "cufile_driver": driver,
        }.items():
            setattr(kvikio, name, value)
        defaults.get = self.settings.__getitem__  # type: ignore[attr-defined]
        defaults.set = self._set  # type: ignore[attr-defined]
        driver.get = lambda _name: self.copies_untold  # type: ignore[attr-defined]
        cupy = types.ModuleType("cupy")
        cupy.cuda = _cuda(self)  # type: ignore[attr-defined]
        found = {module.__name__: module for module in (kvikio, defaults, driver, cupy)}
        for name, module in found.items():
            module.__spec__ = ModuleSpec(name, None)
        return found

    def _set(self, *config: Any) -> Any:
        wanted = config[0] if len(config) == 1 else {config[0]: config[1]}
        before = {name: self.settings[name] for name in wanted}
        self.settings.update(wanted)

        return _Restore(self.settings, before)

    def _allocation_of(self, buf: Any) -> int:
        address, nbytes = _range_of(buf)
        self.need_device("registration", address, nbytes)
        return next(s for s, n in self.live.copy().items() if s <= address < s + n)

    def _register(self, buf: Any) -> None:
        if self.settings["compat_mode"] is not CompatMode.OFF:
            self.violations.append("a registration in compatibility mode does nothing")
        if self.refuses_registration:
            raise RuntimeError("cuFile error at: buffer.cpp:30: GPU memory registration failed")
        base = self._allocation_of(buf)
        if base in self.registered:
            raise RuntimeError("cuFile error: memory is already registered")
        self.registered[base] = self.live[base]
        self.num_registrations += 1

    def _deregister(self, buf: Any) -> None:
        self.registered.pop(self._allocation_of(buf))


def _nothing() -> None:
    """Be work that has been done."""


class _Restore:
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

    def pread(self, buf: Any, size: int, file_offset: int = 0) -> _Future:
        return self._start("read", buf, size, file_offset)

    def pwrite(self, buf: Any, size: int, file_offset: int = 0) -> _Future:
        return self._start("write", buf, size, file_offset)

    def _start(self, direction: str, buf: Any, size: int, offset: int) -> _Future:
        gpu, (address, nbytes) = self.gpu, _range_of(buf)
        gpu.calls.append((direction, self.mode, offset, size))
        if size > nbytes:
            raise ValueError("Size is greater than the size of the buffer")
        if self.mode == "gds" and (offset | size | address) % ALIGNMENT:
            gpu.violations.append(f"{direction} of {size} at {offset} is not aligned")
        task = _Task(gpu, self._fd, self.mode, self._in_flight)
        return _Future(lambda: task.move(direction, address, size, offset))


class _Task:
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


def _range_of(buf: Any) -> tuple[int, int]:
    """Read `__cuda_array_interface__` as KvikIO does."""
    interface = buf.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["typestr"] == "|u1"
    assert interface["strides"] is None
    address, read_only = interface["data"]
    assert not read_only
    (nbytes,) = interface["shape"]
    return address, nbytes


def _cuda(gpu: FakeGpu) -> types.SimpleNamespace:
    """`cupy.cuda`."""

    class Memory:
        def __init__(self, nbytes: int) -> None:
            # Aligned as cudaMalloc promises, and to no more.
            self._array = (ctypes.c_ubyte * (nbytes + 2 * ALIGNMENT))()
            base = ctypes.addressof(self._array)
            self.ptr = base + -base % ALIGNMENT + 512
            self.size = nbytes
            ctypes.memset(self.ptr, RUBBISH, nbytes)
            with gpu.lock:
                gpu.live[self.ptr] = nbytes

        def __del__(self) -> None:
            with gpu.lock:
                if self.ptr in gpu.registered:
                    gpu.violations.append("memory was freed while it was registered")
                del gpu.live[self.ptr]
            ctypes.memset(self.ptr, RUBBISH, self.size)

    class Stream:
        def __init__(self, *, non_blocking: bool = False) -> None:
            if not non_blocking:
                gpu.violations.append("a stream of ours waits for the default stream")
            self.ptr = gpu.new_stream()

        def synchronize(self) -> None:
            gpu.run(self.ptr, gpu.position(self.ptr))

    class Event:
        def __init__(self, *, block: bool = False, disable_timing: bool = False) -> None:
            if not block:
                gpu.violations.append("waiting for this event takes a core")
            self._at: tuple[int, int] | None = None

        def record(self, stream: Any) -> None:
            self._at = (stream.ptr, gpu.position(stream.ptr))

        def synchronize(self) -> None:
            assert self._at is not None
            gpu.run(*self._at)

    @contextmanager
    def device(number: int) -> Iterator[None]:
        assert number == 0
        yield

    return types.SimpleNamespace(
        Memory=Memory,
        Stream=Stream,
        Event=Event,
        Device=device,
        runtime=_Runtime(gpu),
    )


class _Runtime:
    """`cupy.cuda.runtime`."""

    memcpyHostToDevice = 1  # noqa: N815 - CuPy's names
    memcpyDeviceToHost = 2  # noqa: N815

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def getDevice(self) -> int:  # noqa: N802
        return self._gpu.current.number

    def setDevice(self, number: int) -> None:  # noqa: N802
        self._gpu.current.number = number

    def deviceGetPCIBusId(self, device: int) -> str:  # noqa: N802
        return f"0000:4{device}:00.0"

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:  # noqa: N802
        self._gpu.need_device("memset", address, nbytes)
        self._gpu.launch(stream, lambda: ctypes.memset(address, value, nbytes) and None)

    def memcpyAsync(  # noqa: N802
        self, target: int, source: int, nbytes: int, kind: int, stream: int
    ) -> None:
        device, host = (target, source) if kind == self.memcpyHostToDevice else (source, target)
        self._gpu.need_device("memcpy", device, nbytes)
        if self._gpu.is_device(host, nbytes):
            self._gpu.violations.append("memcpy: the host's side is on the device")
        self._gpu.launch(stream, lambda: ctypes.memmove(target, source, nbytes) and None)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802
        if address in self._gpu.pinned:
            raise RuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        self._gpu.pinned[address] = nbytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        del self._gpu.pinned[address]


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Make a machine with one GPU; at the end nothing of it may be held, and no rule broken."""
    fake = FakeGpu()
    monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "")
    for name in ("CUFILE_ALLOW_COMPAT_MODE", "CUFILE_LOGGING_LEVEL", "CUFILE_LOGFILE_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    fake.reset()
    deadline = time.monotonic() + 60
    while (fake.live or fake.pinned or fake.num_open) and time.monotonic() < deadline:
        gc.collect()  # an error's traceback may hold some of it,
        time.sleep(0.001)  # or a thread that has just told the result of a transfer
    assert fake.violations == []
    assert (fake.num_open, fake.live, fake.registered, fake.pinned) == (0, {}, {}, {})
