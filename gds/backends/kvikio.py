"""Files and device memory: KvikIO moves it, with GPUDirect Storage where that was shown to work."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from gds.backends.hybrid import HybridPolicy
from gds.backends.kvikio_file import (
    Handles,
    KvikioFile,
    Opened,
    PathCounts,
    Used,
)
from gds.backends.kvikio_library import Handle, Library
from gds.backends.names import reporting
from gds.backends.posix import PosixBackend
from gds.backends.posix_file import PosixFile
from gds.backends.transfer import Descriptors, Direction
from gds.buffers.cuda import Cuda
from gds.buffers.device import (
    PinnedBuffer,
    Region,
    device_buffer,
    tensor_buffer,
)
from gds.buffers.host import HostBuffer
from gds.buffers.pool import BufferPool
from gds.contract import Buffer, BufferKind, Capabilities
from gds.errors import StorageError
from gds.paths import DevicePath

DIRECTIONS: Final[tuple[Direction, ...]] = ("read", "write")

Examine: TypeAlias = Callable[[str], dict[Direction, Used]]
"""Says which path works in a directory, and why not a better one; may take seconds."""

_STAGING_BYTES: Final = 8 << 20

_abandoned: list[Handles] = []
"""Of a parent process: closing them in a forked child would call its driver."""


class RegistrationRefused(UserWarning):
    """cuFile did not register device memory: it copies within the device, which is slower."""


class KvikioBackend(PosixBackend):
    """Names, locks, syncs and host memory as `PosixBackend`; device memory through KvikIO.

    **Paths.** Whether GPUDirect Storage works in a directory is found out as `gds check` does, in a
    child process, when a file there first moves device memory, and once for each file system; it
    can take seconds. Where it does not work, KvikIO's compatibility mode copies through the host.
    `paths_in` and `KvikioFile.used` say which it is, for reads and for writes, and why; `moved`
    counts bytes by the path that they really took. What may be a copy through the host is never
    called GPUDirect Storage.

    **Ordering.** A transfer knows nothing of streams: tell it with `DeviceBuffer.after`. A file
    that was opened for GPUDirect Storage makes its transfer's thread wait for the legacy default
    stream, too, which is torch's default: compute on other streams, or they wait for it.

    **Durability** is that of `PosixBackend`: `File.sync`.

    KvikIO's settings belong to the process: this backend sets them when it is made and tuned, and
    the last one counts. After a fork the child needs a backend of its own, made before the
    parent's touched CUDA: CUDA itself does not survive a fork.
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
        """Import KvikIO and CuPy, and set KvikIO up.

        Args:
            memory: What `allocate` returns where it is not told.
            path: How device memory is moved: ``"gds"`` demands GPUDirect Storage, and raises
                `StorageError` where a file cannot have it; ``"compat"`` and ``"bounce"`` take
                KvikIO's, or our own, copy through the host (``"bounce"`` needs no KvikIO); None
                takes the first of ``gds`` and ``compat`` that works.
            device: Number of the GPU; None is the current one.
            read_threads: Number of reads that run at once.
            write_threads: Number of writes that run at once. KvikIO gets as many threads as both
                have.
            request_bytes: Most bytes that one thread moves at a time, a multiple of `ALIGNMENT`:
                `PosixBackend`'s parts, and KvikIO's tasks (16 MiB where it is None).
            direct: See `PosixBackend`; of host memory.
            hybrid: See `PosixBackend`; of host memory, and of what goes through it.
            examine: Replaces the examination.

        Raises:
            RefusedError: A library or the driver is missing; names the remedy.
        """
        self.cuda = Cuda(device)
        self._library = None if path == "bounce" else Library()
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
        self._paths = PathCounts()
        # Registering loads cuFile, which is of no use before a file is opened with it.
        self._unregistered: weakref.WeakSet[Region] = weakref.WeakSet()
        self._uses_cufile = False
        self._registering = threading.Lock()
        self.staging: BufferPool[HostBuffer] = BufferPool(
            self._pinned, _STAGING_BYTES, read_threads + write_threads
        )
        self._configure()

    def tune(self, *, read_threads: int, write_threads: int, request_bytes: int | None) -> None:
        """Change all three; arguments are the constructor's.

        Waits for the tasks that KvikIO is running, where its number of threads changes.
        """
        super().tune(
            read_threads=read_threads, write_threads=write_threads, request_bytes=request_bytes
        )
        self.staging.resize(read_threads + write_threads)
        self._configure()

    def capabilities(self, directory: str) -> Capabilities:
        """Say what can be done in an existing directory, by writing and reading a probe file."""
        return dataclasses.replace(super().capabilities(directory), device_memory=True)

    def paths_in(self, directory: str) -> dict[Direction, Used]:
        """Say how device memory is moved in a directory, and why not with GPUDirect Storage.

        This is what was found out by trying it there; a file that cuFile does not take all the
        same goes through the host, as its own `KvikioFile.used` says.

        Raises:
            StorageError: There is no such directory; or ``path="gds"`` demands what is not there.
        """
        self.check_usable("examine", directory)
        with reporting("examine", directory):
            return self._paths_on(os.stat(directory).st_dev, lambda: directory, directory)

    def moved(self) -> dict[Direction, dict[DevicePath, int]]:
        """Return the bytes of device memory that were moved so far, by the path that they took.

        ``gds`` is what cuFile moved while it was not allowed to copy through the host. Partial
        blocks, and memory that is not aligned as its place in the file, are ``bounce`` always.
        """
        return {direction: self._paths.totals(direction) for direction in DIRECTIONS}

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Return zeroed memory, registered once; of the constructor's kind if none is given."""
        self.check_usable("allocate", self.name)
        kind = kind or self._memory
        if kind == "host":
            return HostBuffer(nbytes)
        if kind == "pinned":
            return self._pinned(nbytes)
        buffer = device_buffer(self.cuda, nbytes)
        if self._library is not None:
            with self._registering:
                if self._uses_cufile:
                    self._register(self._library, buffer.region)
                else:
                    self._unregistered.add(buffer.region)
        return buffer

    def buffer_of(self, tensor: Any) -> Buffer:
        """Return a torch tensor's memory as a buffer; see `tensor_buffer`."""
        return tensor_buffer(tensor, self.cuda)

    def close(self) -> None:
        """Wait for transfers in flight, then release threads, files and locks. Idempotent.

        Buffers stay usable, and are released when nobody refers to them.
        """
        super().close()
        if not self.forked():
            self.staging.clear()

    # For the files.

    @property
    def device_request_bytes(self) -> int | None:
        """Most bytes of a part of a request for device memory; None where KvikIO cuts it up."""
        return self.request_bytes if self._library is None else None

    def make_file(
        self, path: str, descriptors: Descriptors, size_bytes: int, writable: bool
    ) -> PosixFile:
        """Return the object for an open file."""
        return KvikioFile(self, path, descriptors, size_bytes, writable)

    def open_handles(self, path: str, fd: int, *, writable: bool) -> Handles:
        """Decide on the path of each direction, and open the file for it."""
        library = self._library
        if library is None:
            opened = Opened(Used("bounce", "asked for by path='bounce'"), None)
            return {"read": opened, "write": opened}
        # A backend that is being closed still ends the transfers that were started.
        with reporting("examine", path):
            found = self._paths_on(os.fstat(fd).st_dev, lambda: _directory_of(path, fd), path)
        gds, refusal = None, ""
        if any(found[direction].path == "gds" for direction in DIRECTIONS):
            gds, refusal = self._open_gds(library, path, fd, writable=writable)
        handles: Handles = {}
        compat = None
        for direction in DIRECTIONS:
            used = found[direction]
            if used.path == "gds" and gds is not None:
                handles[direction] = Opened(used, gds)
                continue
            used = Used("compat", refusal if used.path == "gds" else used.reason)
            self._demand(used, direction, path)
            if compat is None:
                compat = library.open(path, fd, writable=writable, compat=True)
            if not compat.is_direct_io_supported():
                used = Used("compat", f"{used.reason}; KvikIO goes through the page cache here")
            handles[direction] = Opened(used, compat)
        return handles

    def count_path(self, direction: Direction, path: DevicePath, nbytes: int) -> None:
        """Note which way bytes of device memory went."""
        self._paths.add(direction, path, nbytes)

    def abandon(self, handles: Handles) -> None:
        """Keep handles that belong to the parent of this forked child from being closed here."""
        _abandoned.append(handles)

    def _paths_on(
        self, device: int, directory: Callable[[], str], path: str
    ) -> dict[Direction, Used]:
        """Return the paths on a file system, which `directory` is on, for a use of `path`."""
        if self._path in ("compat", "bounce"):
            used = Used(self._path, f"asked for by path={self._path!r}")
            return {"read": used, "write": used}
        with self._examining:
            if device not in self._examined:
                self._examined[device] = self._examine(directory())
            found = dict(self._examined[device])
        for direction in DIRECTIONS:
            self._demand(found[direction], direction, path)
        return found

    def _open_gds(
        self, library: Library, path: str, fd: int, *, writable: bool
    ) -> tuple[Handle | None, str]:
        """Return a handle for GPUDirect Storage and "", or None and why there is none."""
        try:
            handle = library.open(path, fd, writable=writable, compat=False)
        except StorageError as error:
            return None, f"cuFile does not take this file: {error.strerror}"
        if refusal := library.why_untold():
            handle.close()
            return None, refusal
        with self._registering:
            if not self._uses_cufile:
                self._uses_cufile = True
                for region in list(self._unregistered):
                    self._register(library, region)
                self._unregistered.clear()
        return handle, ""

    def _demand(self, used: Used, direction: Direction, path: str) -> None:
        if self._path == "gds" and used.path != "gds":
            raise StorageError(
                errno.EOPNOTSUPP,
                f"path='gds', but {direction}s would be copied through the host: {used.reason};",
                path,
            )

    def _register(self, library: Library, region: Region) -> None:
        memory = region.bytes
        try:
            library.register(memory)
        except RuntimeError as error:
            warnings.warn(
                f"cuFile does not register {memory.nbytes} bytes of device memory ({error}): "
                "transfers are copied within the device, and are slower",
                RegistrationRefused,
                stacklevel=4,
            )
            return
        region.released_by(library.deregister)

    def _pinned(self, nbytes: int) -> PinnedBuffer:
        return PinnedBuffer(self.cuda, nbytes)

    def _configure(self) -> None:
        if self._library is not None:
            self._library.configure(
                num_threads=self.read_threads + self.write_threads, task_bytes=self.request_bytes
            )


def _directory_of(path: str, fd: int) -> str:
    """Return the directory of an open file, which may have been renamed since it was opened."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
    return os.path.dirname(path) or "."


_known: dict[int, dict[Direction, Used]] = {}
"""What has been found out in this process, by the number of a file system."""

_knowing = threading.Lock()


def _examined(directory: str) -> dict[Direction, Used]:
    """Find out once for each file system, for all backends of this process."""
    device = os.stat(directory).st_dev
    with _knowing:
        if device not in _known:
            _known[device] = _examine(directory)
        return _known[device]


def _examine(directory: str) -> dict[Direction, Used]:
    """Find out as `gds check` does: cuFile is tried in a child process, its own fallback off."""
    from gds.check.choice import choose  # these read half of /sys, and only GPUs need it
    from gds.check.gpu import examine_gpu
    from gds.check.storage import examine_storage
    from gds.check.system import System

    system = System()
    storage = examine_storage(system, directory)
    gpu = examine_gpu(system, storage, timeout_s=10.0)
    found: dict[Direction, Used] = {}
    for direction in DIRECTIONS:
        why_not = choose(direction, storage, gpu).why_not
        with contextlib.suppress(KeyError):
            found[direction] = Used("compat", why_not["gds"])
        found.setdefault(direction, Used("gds", ""))
    return found
