"""A GPU made of host memory, and the libraries at its boundary: what is used of CuPy and KvikIO.

Nothing of ours is replaced. What the fake makes worse than a real machine, so that mistakes show:
streams do nothing until somebody waits for them; device memory is filled with rubbish when it is
allocated and when it is freed; futures and tasks hold on to neither buffer nor file; and every
rule of the libraries that a caller can break is noted in `violations`.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

import gds.backends.kvikio_library
import gds.buffers.cuda
from tests.fake_gpu.cufile_library import CuFileLibrary
from tests.fake_gpu.cupy_module import cupy_modules
from tests.fake_gpu.kvikio_module import CompatMode, CuFile, Restore, range_of
from tests.fake_gpu.streams import Streams
from tests.limits import HANG_S


class _Current(threading.local):
    """The device that is current in each thread: CUDA begins with the first one."""

    number = 0
    has_context = False
    """Whether a context is current. CUDA's runtime sees to that by itself; cuFile does not."""


class FakeGpu:
    """The state of the machine, and what goes wrong on it.

    Args:
        number: Number of the GPU that may be used.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.contexts: set[int] = set()
        """Devices on which CUDA has made a context, which takes memory there."""
        self.default_stream: list[str] = []
        """Calls that waited for the legacy default stream, where the training runs."""
        self.compat_is_measured = False
        """Whether such calls are what a test is about."""
        self.refuses: Callable[[str, int], str] = lambda _call, _nbytes: ""
        """The text of the error of a call of the runtime, if it is to fail."""
        self.copies: list[tuple[int, int]] = []
        """Kind and stream of every copy."""
        self.arrays: dict[int, Any] = {}
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
        self.kernels: list[tuple[Any, ...]] = []
        """Compilations, loads and launches of kernels, each with the device that was current."""
        self.refused_binary: bytes | None = None
        """Compiled kernels that the driver does not load."""
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
        self.streams = Streams()
        self.lock = self.streams.lock
        self.num_streams = 0

    # Memory.

    def is_device(self, address: int, nbytes: int) -> bool:
        """Return whether a range of addresses is device memory."""
        with self.lock:
            # Copied at once: memory may be freed by a collection wherever Python allocates.
            ranges = [*self.live.copy().items(), *self.adopted.copy().items()]
        return any(start <= address and address + nbytes <= start + n for start, n in ranges)

    def need_device(self, what: str, address: int, nbytes: int) -> None:
        """Note a violation unless a range of addresses is device memory."""
        if not self.is_device(address, nbytes):
            self.violations.append(f"{what}: {nbytes} bytes at {address:#x} are no device memory")

    # Devices.

    def touch(self) -> None:
        """Note the context of the device that is current in this thread."""
        self.contexts.add(self.current.number)
        self.current.has_context = True

    def wait_for_training(self, what: str) -> None:
        """Wait for the legacy default stream, as what is ordered with it does."""
        self.default_stream.append(what)
        self.streams.run(0)

    # Streams.

    def new_stream(self) -> int:
        """Return the handle of a new stream."""
        with self.lock:
            self.num_streams += 1
            return 1000 + self.num_streams

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
        modules = (kvikio, defaults, driver, *cupy_modules(self))
        found = {module.__name__: module for module in modules}
        for name, module in found.items():
            module.__spec__ = ModuleSpec(name, None)
        return found

    def _set(self, *config: Any) -> Any:
        wanted = config[0] if len(config) == 1 else {config[0]: config[1]}
        before = {name: self.settings[name] for name in wanted}
        self.settings.update(wanted)

        return Restore(self.settings, before)

    def _allocation_of(self, buf: Any) -> int:
        address, nbytes = range_of(buf)
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


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Make a machine with one GPU; at the end nothing of it may be held, and no rule broken."""
    fake = FakeGpu()
    monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "")
    cufile = CuFileLibrary(fake)
    monkeypatch.setattr(gds.backends.kvikio_library, "load_cufile", lambda: cufile)
    for name in ("CUFILE_ALLOW_COMPAT_MODE", "CUFILE_LOGGING_LEVEL", "CUFILE_LOGFILE_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    fake.streams.clear()
    deadline = time.monotonic() + HANG_S
    while (fake.live or fake.pinned or fake.num_open) and time.monotonic() < deadline:
        gc.collect()  # an error's traceback may hold some of it,
        time.sleep(0.001)  # or a thread that has just told the result of a transfer
    assert fake.violations == []
    assert fake.default_stream == [] or fake.compat_is_measured
    assert fake.contexts <= {fake.number}
    assert (fake.num_open, fake.live, fake.registered, fake.pinned) == (0, {}, {}, {})
