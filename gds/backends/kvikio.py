"""Backend for device memory: GPUDirect Storage if a trial has shown that it works, else copies."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from gds.backends.hybrid import Direction, HybridPolicy
from gds.backends.kvikio_file import Handles, KvikioFile, Opened, Used
from gds.backends.kvikio_library import CompatibilityMode, Library, PlainCalls
from gds.backends.names import reporting
from gds.backends.posix import PosixBackend
from gds.backends.posix_file import PosixFile
from gds.backends.transfer import Descriptors
from gds.buffers.cuda import Cuda
from gds.buffers.device import (
    PageLockRefused,
    PinnedBuffer,
    Region,
    device_buffer,
    tensor_buffer,
)
from gds.buffers.host import HostBuffer
from gds.buffers.pool import BufferPool
from gds.check.examine import choose
from gds.check.gpu import examine_gpu
from gds.check.storage import examine_storage
from gds.check.system import System
from gds.contract import Buffer, BufferKind, Capabilities
from gds.errors import RefusedError, StorageError
from gds.paths import DevicePath

DIRECTIONS: Final[tuple[Direction, ...]] = ("read", "write")

Examine: TypeAlias = Callable[[str], dict[Direction, Used]]
"""Function that returns, for each direction, the best path that works in a directory, with the
reason why no better one works. It may take seconds."""

_STAGING_BYTES: Final = 8 << 20


class RegistrationRefused(UserWarning):
    """cuFile did not register device memory, so it copies within the device, which is slower."""


class KvikioBackend(PosixBackend):
    """Backend that moves device memory; otherwise it is like `PosixBackend`.

    **Paths.** The backend tries out whether GPUDirect Storage works on a file system, like
    `gds check`, in a child process. This trial can take seconds. It is made once for each file
    system, when a file on it first moves device memory. If GPUDirect Storage does not work,
    transfers are copied through page-locked host memory by this package, without KvikIO. `paths_in`
    and `KvikioFile.used` return the path of reads and of writes with the reason. `moved` counts
    bytes by the path that they took. A transfer that may be a copy through the host is never called
    GPUDirect Storage.

    **Ordering.** A transfer does not wait for streams, unless `DeviceBuffer.after` tells it to, and
    no stream waits for it. Copies run on non-blocking streams, one for each direction. The
    exception is ``path="compat"``: KvikIO's copies are ordered with the legacy default stream,
    which is torch's default stream.

    **Durability** is that of `PosixBackend`: `File.sync` makes data durable.

    **Several backends** do not take threads from each other: transfers run on the threads of their
    backend. In compatibility mode, KvikIO's pool has the sum of the threads of all open backends.
    After a fork the child needs its own backend, and CUDA must not have been used before the fork:
    CUDA does not survive a fork.
    """

    name: str = "kvikio"

    def __init__(
        self,
        *,
        memory: BufferKind = "device",
        path: DevicePath | None = None,
        device: int | None = None,
        read_threads: int = 2,
        write_threads: int = 2,
        request_bytes: int | None = None,
        direct: bool | None = None,
        hybrid: bool | HybridPolicy = False,
        examine: Examine | None = None,
    ) -> None:
        """Import CuPy, and KvikIO if `path` needs it.

        Args:
            memory: Kind of memory that `allocate` returns by default.
            path: Path of device memory. ``"gds"`` demands GPUDirect Storage, and a file that
                cannot have it raises `StorageError`. ``"bounce"`` is this package's copy through
                the host, and needs no KvikIO. ``"compat"`` is KvikIO's copy through the host, which
                waits for training on the default stream and makes it wait: only for measurements.
                None takes the first of ``gds`` and ``bounce`` that works.
            device: Number of the GPU; None is the current one.
            read_threads: Number of reads that run at once.
            write_threads: Number of writes that run at once. In compatibility mode, KvikIO gets
                `read_threads` + `write_threads` more threads.
            request_bytes: Largest number of bytes that one thread moves at a time, a multiple of
                `ALIGNMENT`. It limits the parts of `PosixBackend`, and the tasks of KvikIO in
                compatibility mode. With None, parts have no limit, and these tasks have 16 MiB.
            direct: Direct I/O of host memory; see `PosixBackend`.
            hybrid: Policy for host memory, also where device memory is copied through it.
            examine: Function that replaces the examination of a directory.

        Raises:
            RefusedError: A library or the driver is missing; the message names the remedy.
            ValueError: A number is out of range, or `hybrid` is combined with ``direct=False``.
        """
        self.cuda = Cuda(device)
        self._library = Library() if path in ("gds", "compat") else None
        super().__init__(
            read_threads=read_threads,
            write_threads=write_threads,
            request_bytes=request_bytes,
            direct=direct,
            hybrid=hybrid,
        )
        self._memory: BufferKind = memory
        self._path = path
        self._examine = examine or _examined
        self._examined: dict[int, dict[Direction, Used]] = {}
        self._examining = threading.Lock()
        self._moved: Counter[tuple[Direction, DevicePath]] = Counter()
        self._counting = threading.Lock()
        # Registration loads cuFile, so it waits until a file is opened with cuFile.
        self._unregistered: weakref.WeakSet[Region] = weakref.WeakSet()
        self._uses_cufile = False
        self._registering = threading.Lock()
        self.staging: BufferPool[HostBuffer] = BufferPool(
            self._staging_buffer, _STAGING_BYTES, read_threads + write_threads
        )
        self._lock_refused = False
        self._configure()

    def tune(self, *, read_threads: int, write_threads: int, request_bytes: int | None) -> None:
        """Change the threads and the request size.

        In compatibility mode, the call waits for KvikIO's running tasks if their threads change.
        """
        super().tune(
            read_threads=read_threads, write_threads=write_threads, request_bytes=request_bytes
        )
        self.staging.resize(read_threads + write_threads)
        self._configure()

    def capabilities(self, directory: str) -> Capabilities:
        return dataclasses.replace(super().capabilities(directory), device_memory=True)

    def paths_in(self, directory: str) -> dict[Direction, Used]:
        """Return the path of device memory in a directory, and why it is not GPUDirect Storage.

        The result comes from a trial in the directory, which may take seconds. If cuFile does not
        take a particular file, the file's transfers are copied through the host, and
        `KvikioFile.used` says so.

        Raises:
            StorageError: The directory does not exist, or GPUDirect Storage is demanded by
                ``path="gds"`` and does not work.
        """
        self.check_usable("examine", directory)
        with reporting("examine", directory):
            return self._paths_on(os.stat(directory).st_dev, lambda: directory, directory)

    def moved(self) -> dict[Direction, dict[DevicePath, int]]:
        """Return the bytes of device memory moved so far, by direction and path.

        ``gds`` counts the bytes that cuFile moved while it was not allowed to copy through the
        host. Partial blocks, and memory that is not aligned like its place in the file, always
        count as ``bounce``.
        """
        paths: tuple[DevicePath, ...] = ("gds", "compat", "bounce")
        with self._counting:
            return {
                direction: {path: self._moved[direction, path] for path in paths}
                for direction in DIRECTIONS
            }

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Return zeroed memory; the default kind is the constructor's `memory`.

        Device memory is registered with cuFile once: by this call, or when a file is first opened
        for GPUDirect Storage.

        Raises:
            DeviceMemoryError: The device has no memory left.
            DeviceLostError: The device does not work any more.
            RefusedError: CUDA refuses to page-lock memory.
        """
        self.check_usable("allocate", self.name)
        kind = kind or self._memory
        if kind == "host":
            return HostBuffer(nbytes)
        if kind == "pinned":
            return PinnedBuffer(self.cuda, nbytes)
        buffer = device_buffer(self.cuda, nbytes)
        with self._registering:
            if self._uses_cufile and self._library is not None:
                self._register(self._library, buffer.region)
            else:
                self._unregistered.add(buffer.region)
        return buffer

    def buffer_of(self, tensor: Any) -> Buffer:
        """Return a torch tensor's memory as a buffer; see `gds.kvikio.tensor_buffer`."""
        return tensor_buffer(tensor, self.cuda)

    def close(self) -> None:
        """Wait for transfers in flight, then release threads, files and locks. Idempotent.

        Buffers stay usable, and are released when they are collected.
        """
        super().close()
        if not self.forked():
            self.staging.clear()
            if self._path == "compat" and self._library is not None:
                self._library.release()

    # Interface for the files of this backend.

    @property
    def device_request_bytes(self) -> int | None:
        """Largest part of a request for device memory, in bytes; None if KvikIO cuts requests."""
        return None if self._path == "compat" else self.request_bytes

    def make_file(
        self, path: str, descriptors: Descriptors, size_bytes: int, writable: bool
    ) -> PosixFile:
        return KvikioFile(self, path, descriptors, size_bytes, writable)

    def open_handles(self, path: str, fd: int, *, writable: bool) -> Handles:
        """Decide on the path of each direction, and open the file for it."""
        if self._path == "compat" and self._library is not None:
            compat = CompatibilityMode(
                self._library, path, fd, writable=writable, task_bytes=lambda: self.request_bytes
            )
            used = Used("compat", f"asked for by path={self._path!r}")
            if not compat.bypasses_cache:
                used = Used("compat", f"{used.reason}; KvikIO uses the page cache for this file")
            return {direction: Opened(used, compat) for direction in DIRECTIONS}
        # No check for a closed backend: while it closes, it still finishes started transfers.
        with reporting("examine", path):
            found = self._paths_on(os.fstat(fd).st_dev, lambda: _directory_of(path, fd), path)
        gds, refusal = None, ""
        if any(found[direction].path == "gds" for direction in DIRECTIONS):
            gds, refusal = self._open_gds(path, fd, writable=writable)
        handles: Handles = {}
        for direction in DIRECTIONS:
            used = found[direction]
            if used.path == "gds" and gds is not None:
                handles[direction] = Opened(used, gds)
                continue
            used = Used("bounce", refusal if used.path == "gds" else used.reason)
            self._require_path(used, direction, path)
            handles[direction] = Opened(used, None)
        return handles

    def count_path(self, direction: Direction, path: DevicePath, nbytes: int) -> None:
        """Count bytes of device memory by the path that they took."""
        with self._counting:
            self._moved[direction, path] += nbytes

    def _paths_on(
        self, device: int, directory: Callable[[], str], path: str
    ) -> dict[Direction, Used]:
        """Return the path of each direction on a file system, which is examined once."""
        if self._path in ("compat", "bounce"):
            used = Used(self._path, f"asked for by path={self._path!r}")
            return {"read": used, "write": used}
        with self._examining:
            if device not in self._examined:
                self._examined[device] = self._examine(directory())
            found = dict(self._examined[device])
        for direction in DIRECTIONS:
            self._require_path(found[direction], direction, path)
        return found

    def _open_gds(self, path: str, fd: int, *, writable: bool) -> tuple[PlainCalls | None, str]:
        """Return a file of GPUDirect Storage and "", or None and the reason for its absence."""
        try:
            with self._registering:
                library = self._library = self._library or Library()
        except RefusedError as error:
            return None, str(error)

        def open_here() -> PlainCalls:
            self.cuda.use()
            with library.cufile():
                return PlainCalls(library, path, fd, writable=writable)

        try:
            handle = self.cuda.here(open_here)
        except StorageError as error:
            return None, f"cuFile does not accept this file: {error.strerror}"
        if refusal := library.why_copies_are_silent():
            handle.close()
            return None, refusal
        with self._registering:
            if not self._uses_cufile:
                self._uses_cufile = True
                for region in list(self._unregistered):
                    self._register(library, region)
                self._unregistered.clear()
        return handle, ""

    def _require_path(self, used: Used, direction: Direction, path: str) -> None:
        if self._path == "gds" and used.path != "gds":
            raise StorageError(
                errno.EOPNOTSUPP,
                f"path='gds', but {direction}s would be copied through the host: {used.reason};",
                path,
            )

    def _register(self, library: Library, region: Region) -> None:
        """Register device memory with cuFile until it is released; warn if cuFile refuses."""
        memory = region.bytes
        try:
            library.register(memory)
        except RuntimeError as error:
            warnings.warn(
                f"cuFile does not register {memory.nbytes} bytes of device memory ({error}): "
                "transfers use an extra copy within the device, and are slower",
                RegistrationRefused,
                stacklevel=4,
            )
            return
        region.released_by(library.deregister)

    def _staging_buffer(self, nbytes: int) -> HostBuffer:
        """Return a host buffer to copy through: page-locked, unless CUDA refuses that."""
        if not self._lock_refused:
            try:
                return PinnedBuffer(self.cuda, nbytes)
            except RefusedError as error:
                self._lock_refused = True
                warnings.warn(str(error), PageLockRefused, stacklevel=4)
        return HostBuffer(nbytes)

    def _configure(self) -> None:
        if self._path == "compat" and self._library is not None:
            self._library.configure(num_threads=self.read_threads + self.write_threads)


def _directory_of(path: str, fd: int) -> str:
    """Return the directory of an open file, which may have been renamed since it was opened."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
    return os.path.dirname(path) or "."


_examinations: dict[int, dict[Direction, Used]] = {}
"""Results of the examinations in this process, by the number of the file system."""

_examinations_lock = threading.Lock()


def _examined(directory: str) -> dict[Direction, Used]:
    device = os.stat(directory).st_dev
    with _examinations_lock:
        if device not in _examinations:
            _examinations[device] = _examine(directory)
        return _examinations[device]


def _examine(directory: str) -> dict[Direction, Used]:
    """Examine a directory like `gds check`, and return the path of each direction."""
    system = System()
    storage = examine_storage(system, directory)
    gpu = examine_gpu(system, storage, timeout_s=10.0)
    found: dict[Direction, Used] = {}
    for direction in DIRECTIONS:
        reason = choose(direction, storage, gpu).why_not.get("gds", "")
        found[direction] = Used("bounce" if reason else "gds", reason)
    return found
