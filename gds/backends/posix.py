"""Backend for files of the kernel: direct I/O if the file system has it, else the page cache."""

from __future__ import annotations

import errno
import os
import stat as stat_module
import threading
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Final

from gds import probe
from gds.backends.hybrid import Direction, Hybrid, HybridFile, HybridPolicy
from gds.backends.names import PosixNames, overwrite_in_place, reporting
from gds.backends.posix_file import PosixFile
from gds.backends.threads import Meter, Meters, Part, Transfer, TransferPool, check_threads
from gds.backends.transfer import Descriptors, OpenDescriptor, check_request_bytes
from gds.buffers.host import HostBuffer, host_buffer
from gds.contract import (
    ALIGNMENT,
    CLONE_REACH_BYTES,
    Buffer,
    BufferKind,
    Capabilities,
    Counters,
)
from gds.errors import StorageError

_OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class PosixBackend(PosixNames):
    """Backend that transfers by `preadv` and `pwritev` on two small pools of threads.

    Reads and writes have separate pools, so that the last writes of a step do not delay the reads
    of the next one. The kernel cuts a request and queues the pieces, and a few requests of 16 to 64
    MiB usually keep a drive busy. If they do not, as with several drives under one file system,
    `request_bytes` cuts requests into parts that all threads work on at once.
    `gds.calibration.calibrate` measures which setting is best.

    The part of a request that is aligned in file and memory bypasses the page cache. A partial
    block at either end goes through the page cache. If the memory of a request is not aligned like
    its offset, the whole request goes through the page cache.

    All methods may be called from any thread. A forked child cannot use the backend; it makes a
    new one.
    """

    def __init__(
        self,
        *,
        read_threads: int = 2,
        write_threads: int = 2,
        request_bytes: int | None = None,
        direct: bool | None = None,
        hybrid: bool | HybridPolicy = False,
    ) -> None:
        """Make a backend; threads start with the first transfer.

        Args:
            read_threads: Number of reads, or parts of reads, that can run at once.
            write_threads: Number of writes, or parts of writes, that can run at once.
            request_bytes: Largest request to the kernel in bytes, a multiple of `ALIGNMENT`. A
                longer transfer runs in parts, with one future for all. None keeps transfers whole.
            direct: True demands direct I/O, and a file that does not support it raises
                `StorageError`. False never uses direct I/O. None uses it if it works, and warns
                once (`gds.probe.DirectIOUnavailable`) if it does not.
            hybrid: Policy that sends requests through the page cache if that is faster, although
                they could be direct; True is the default policy. When the future of such a write
                resolves, the data has only reached memory: an error of the drive may come at the
                next `File.sync`.

        Raises:
            ValueError: A number is out of range, or `hybrid` is combined with ``direct=False``.
        """
        super().__init__()
        if hybrid and direct is False:
            raise ValueError(
                "hybrid chooses between direct and buffered I/O, so it cannot be combined with "
                "direct=False: pass one of the two"
            )
        self.hybrid = (
            Hybrid(hybrid if isinstance(hybrid, HybridPolicy) else None) if hybrid else None
        )
        """State of the choice between direct and buffered I/O, with counts; None if it is off."""
        self._wanted = direct
        self._request_bytes = check_request_bytes(request_bytes)
        self._pools: dict[Direction, TransferPool] = {
            "read": TransferPool("gds-read", read_threads),
            "write": TransferPool("gds-write", write_threads),
        }
        self.meters = Meters()
        self._files: weakref.WeakSet[PosixFile] = weakref.WeakSet()
        self._lock = threading.Lock()
        # By device number: the reason why direct I/O fails on the device, or "" if it works.
        self._direct_refusals: dict[int, str] = {}
        self._warned = False
        # The threads of a backend must end even if it is collected without close().
        for pool in self._pools.values():
            weakref.finalize(self, pool.stop).atexit = False

    @property
    def read_threads(self) -> int:
        """Number of reads, or parts of reads, that can run at once."""
        return self._pools["read"].num_threads

    @property
    def write_threads(self) -> int:
        """Number of writes, or parts of writes, that can run at once."""
        return self._pools["write"].num_threads

    @property
    def request_bytes(self) -> int | None:
        """Largest request to the kernel, in bytes; None if transfers are not cut into parts."""
        return self._request_bytes

    def tune(self, *, read_threads: int, write_threads: int, request_bytes: int | None) -> None:
        """Change the threads and the request size, at any time and without waiting.

        Transfers that were already started keep the parts that they were cut into. Additional
        threads work on them at once. Excess threads end after all queued parts have begun.

        The constructor describes the arguments.

        Raises:
            ValueError: A number is out of range.
            StorageError: The backend is closed.
        """
        self.check_usable("tune", self.name)
        check_threads("read_threads", read_threads)
        check_threads("write_threads", write_threads)
        self._request_bytes = check_request_bytes(request_bytes)
        self._pools["read"].resize(read_threads)
        self._pools["write"].resize(write_threads)

    def capabilities(self, directory: str) -> Capabilities:
        """Return what the backend can do in an existing directory, tried with probe files.

        The probe files are removed afterwards.
        """
        self.check_usable("probe", directory)
        with reporting("probe", directory):
            refusal = self._direct_refusals.get(os.stat(directory).st_dev, "")
            mount = probe.mount_of(directory)
            if self._wanted is False:
                found = probe.no_direct_io("switched off by direct=False")
            elif refusal:
                found = probe.no_direct_io(refusal)
            else:
                found = probe.direct_io(directory)
        return Capabilities(
            backend=self.name,
            filesystem=mount.filesystem,
            direct=found.supported,
            alignment=max(found.memory_alignment, found.offset_alignment),
            volatile=mount.volatile,
            remote=mount.remote,
            device_memory=False,
            reason=found.reason,
            clones=probe.can_clone(directory),
        )

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Return zeroed host memory; 2 MiB or more are on huge pages, if the kernel has them."""
        self.check_usable("allocate", self.name)
        return host_buffer(self.name, nbytes, kind)

    def create(self, path: str, size_bytes: int) -> PosixFile:
        """Create a file, reserve all its space, and open it for reading and writing."""
        self.check_usable("create", path)
        if size_bytes < 0:
            raise ValueError(f"a file cannot have {size_bytes} bytes: {path!r}")
        flags = _OPEN_FLAGS | os.O_RDWR
        with reporting("create", path):
            opened = OpenDescriptor(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            fd = opened.fd
            with reporting(f"reserve {size_bytes} bytes", path):
                piece = CLONE_REACH_BYTES if size_bytes and overwrite_in_place(fd) else size_bytes
                for start in range(0, size_bytes, max(piece, 1)):
                    os.posix_fallocate(fd, start, min(piece, size_bytes - start))
            return self._opened(path, opened, flags)
        except BaseException:
            opened.close()
            with reporting("remove after a failed create", path):
                os.unlink(path)
            raise

    def open(self, path: str, *, writable: bool = False) -> PosixFile:
        """Open an existing regular file; a symbolic link is refused (ELOOP)."""
        self.check_usable("open", path)
        flags = _OPEN_FLAGS | (os.O_RDWR if writable else os.O_RDONLY)
        with reporting("open", path):
            # Opening a device can have an effect, and opening a pipe can wait for its other end.
            # So the type is checked first. If the name is replaced after the check, O_NONBLOCK
            # keeps the open from waiting. For directories and links, the kernel's error is the
            # message.
            kind = stat_module.S_IFMT(os.lstat(path).st_mode)
            if kind not in (stat_module.S_IFREG, stat_module.S_IFDIR, stat_module.S_IFLNK):
                raise StorageError(errno.EINVAL, "open: not a regular file", path)
            opened = OpenDescriptor(os.open(path, flags | os.O_NONBLOCK))
        try:
            os.set_blocking(opened.fd, True)
            mode = os.fstat(opened.fd).st_mode
            if not stat_module.S_ISREG(mode):
                number = errno.EISDIR if stat_module.S_ISDIR(mode) else errno.EINVAL
                raise StorageError(number, "open: not a regular file", path)
            return self._opened(path, opened, flags)
        except BaseException:
            opened.close()
            raise

    def counters(self) -> Counters:
        """Return the totals so far; also after `close`."""
        if not self._closed:
            self.check_usable("count", self.name)
        return self.meters.counters()

    def close(self) -> None:
        """Wait for transfers in flight, then release threads, files and locks. Idempotent."""
        self._closed = True
        if self.forked():  # the threads, and any holder of the lock, exist only in the parent
            files = list(self._files)
        else:
            with self._lock:
                files = list(self._files)
        for file in files:
            file.close()
        if not self.forked():
            for pool in self._pools.values():
                pool.close()
        for held in list(self._held):
            held.release()

    def submit(
        self, direction: Direction, moves: Sequence[Part], *, counted: bool = True
    ) -> Transfer:
        """Run the parts of a transfer on threads, and count them as one if all succeed."""
        if not counted:
            return self._pools[direction].submit(*moves)
        meter = self.meters[direction]
        parts = [partial(_metered, meter, move) for move in moves]
        return self._pools[direction].submit(*parts, succeeded=meter.count)

    def _opened(self, path: str, opened: OpenDescriptor, flags: int) -> PosixFile:
        """Return the file of a descriptor. If this raises, the caller closes the descriptor."""
        fd = opened.fd
        with reporting("open", path):
            found = os.fstat(fd)
            direct_fd, memory_alignment = -1, 1
            chooser = HybridFile(self.hybrid, found.st_size) if self.hybrid else None
            spared = bool(
                chooser and chooser.is_small and self._direct_refusals.get(found.st_dev) == ""
            )
            if self._wanted is not False and not spared:
                reason, direct_fd, memory_alignment = self._open_direct(path, fd, flags)
                if reason:
                    self._report_buffered(path, reason)
            descriptors = Descriptors(
                fd,
                direct_fd,
                memory_alignment,
                partial(self._direct_refused, found.st_dev, path),
                hybrid=chooser,
                spared=spared,
                owner=opened,
                inode=found.st_ino,
            )
        file = self.make_file(path, descriptors, found.st_size, bool(flags & os.O_RDWR))
        with self._lock:
            self._files.add(file)
        return file

    def make_file(
        self, path: str, descriptors: Descriptors, size_bytes: int, writable: bool
    ) -> PosixFile:
        """Return the object for an open file; a derived backend overrides this."""
        return PosixFile(self, path, descriptors, size_bytes, writable)

    def _open_direct(self, path: str, fd: int, flags: int) -> tuple[str, int, int]:
        """Open a file for direct transfers, if it supports them."""
        found = os.fstat(fd)
        reason = self._direct_refusals.get(found.st_dev)
        untried = reason is None
        if reason is None:
            reason = probe.refused_filesystem(probe.mount_of(path).filesystem)
        required = probe.required_alignment(fd)
        reason = reason or probe.refused_alignment(required)
        if reason or required is None:
            return reason, -1, 1
        direct_fd = -1
        try:
            direct_fd = os.open(path, flags | os.O_DIRECT | os.O_NONBLOCK)
            if not os.path.samestat(os.fstat(direct_fd), found):
                raise StorageError(errno.ESTALE, "open: the name was replaced meanwhile", path)
            if untried:
                os.preadv(direct_fd, [HostBuffer(ALIGNMENT).memoryview()], 0)
                self._direct_refusals[found.st_dev] = ""
        except OSError as error:
            if direct_fd >= 0:
                os.close(direct_fd)
            if error.errno not in probe.REFUSALS:
                raise
            attempt = "O_DIRECT at open" if direct_fd < 0 else "a direct read"
            reason = self._direct_refusals[found.st_dev] = (
                f"{attempt} was refused ({error.strerror})"
            )
            return reason, -1, 1
        return "", direct_fd, required[0]

    def _direct_refused(self, device: int, path: str, reason: str) -> None:
        """Remember that a device has refused a direct transfer."""
        self._direct_refusals[device] = reason
        self._report_buffered(path, reason)

    def _report_buffered(self, path: str, reason: str) -> None:
        """Warn once that transfers are buffered; raises `StorageError` if `direct` is True."""
        if self._wanted:
            raise StorageError(
                errno.EOPNOTSUPP, f"direct=True, but direct I/O is not available: {reason}", path
            )
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            message = (
                f"no direct I/O in {os.path.dirname(path) or '.'!r}: {reason}. Transfers go "
                f"through the page cache: they cost CPU time and memory, and are slower than the "
                f"drive."
            )
            warnings.warn(message, probe.DirectIOUnavailable, stacklevel=4)


def _metered(meter: Meter, move: Part) -> int:
    with meter.running():
        return move()
