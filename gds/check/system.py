"""The boundary to the machine: everything that `gds check` learns, it learns from here.

Tests give it another root, with the files of a machine that is not theirs, and override the few
answers that are no files.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gds import libc, probe
from gds.buffers.host import HostBuffer
from gds.contract import ALIGNMENT

_MOST_TEXT_BYTES: Final = 1 << 20
_MOST_OUTPUT_BYTES: Final = 1 << 20
_MOST_ENTRIES: Final = 256
_KILL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """How a child process ended."""

    status: int | None
    """Exit status, negative for a signal; None where it had to be killed."""

    output: str
    """Standard output, up to then."""

    error: str = ""
    """Standard error."""


@dataclass(frozen=True, slots=True)
class Direct:
    """What became of the attempt at direct I/O in a directory."""

    told: tuple[int, int] | None
    """Alignment of memory and of offsets in bytes, as ``statx`` tells; (0, 0) is a refusal, None
    is silence."""

    found: probe.DirectIO
    """What a real transfer showed."""

    tried: Literal["write and read", "read", "nothing"]
    """What was done. Without permission to make a file, an existing one is read."""


class System:
    """This machine; its files in ``/proc``, ``/sys``, ``/etc`` and ``/run`` are those in `root`."""

    def __init__(self, root: str = "/") -> None:
        self._root = root.rstrip("/")

    # Files.

    def text(self, path: str) -> str | None:
        """Return the contents of a small file, or None if it cannot be read."""
        try:
            with open(self._root + path, "rb") as file:
                return file.read(_MOST_TEXT_BYTES).decode(errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory, sorted; none if it cannot be read."""
        try:
            return tuple(sorted(os.listdir(self._root + path)))
        except OSError:
            return ()

    def exists(self, path: str) -> bool:
        """Say whether there is something."""
        return os.path.exists(self._root + path)

    def resolved(self, path: str) -> str:
        """Return where the links of `path` lead."""
        root = os.path.realpath(self._root or "/").rstrip("/")
        return os.path.realpath(self._root + path).removeprefix(root) or "/"

    # The process and what is installed.

    def kernel(self) -> str:
        """Return the release of the kernel."""
        return os.uname().release

    def page_bytes(self) -> int:
        """Return the size of a page of memory."""
        return resource.getpagesize()

    def locked_limit_bytes(self) -> int | None:
        """Return how much memory this process may lock; None is no limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def environment(self, name: str) -> str | None:
        """Return an environment variable."""
        return os.environ.get(name)

    def library_error(self, name: str) -> str:
        """Say why a shared library cannot be loaded; empty where it can, and now is."""
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return str(error)
        return ""

    def version(self, distribution: str) -> str | None:
        """Return the version of an installed Python distribution; it is not imported."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    # A directory.

    def device(self, directory: str) -> tuple[int, int]:
        """Return major and minor number of the device; raises `OSError` for no such directory."""
        number = os.stat(directory).st_dev
        return os.major(number), os.minor(number)

    def mount_id(self, directory: str) -> int | None:
        """Return the number of the mount in ``/proc/self/mountinfo``; None if not known."""
        with contextlib.suppress(OSError):
            fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
            try:
                return libc.mount_id(fd)
            finally:
                os.close(fd)
        return None

    def readable(self, directory: str) -> bool:
        """Say whether files can be found there."""
        return os.access(directory, os.R_OK | os.X_OK)

    def writable(self, directory: str) -> bool:
        """Say whether a file could be made there."""
        return os.access(directory, os.W_OK | os.X_OK)

    def free_bytes(self, directory: str) -> int:
        """Return what an unprivileged user can still allocate."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def direct(self, directory: str) -> Direct:
        """Try direct I/O: on a new file, or on one that is there. Leaves nothing behind."""
        if self.writable(directory):
            with contextlib.suppress(OSError):  # not even space for an inode: read something
                with probe.scratch_file(directory) as fd:
                    told = libc.direct_alignment(fd)
                return Direct(told, probe.direct_io(directory), "write and read")
        return _direct_read(directory)

    # Other programs.

    def child(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Run a Python script in a process of its own, and kill it if it takes too long.

        It runs in a temporary directory, so that logs which libraries drop there are gone
        afterwards. One that not even SIGKILL ends (stuck in a driver) is left behind.

        Args:
            script: Path of the file.
            arguments: For it.
            timeout_s: Seconds that it may take.
            environment: Variables to add to those of this process.
        """
        with (
            tempfile.TemporaryDirectory(prefix="gds-check-") as directory,
            open(os.path.join(directory, "output"), "w+b") as output,
            open(os.path.join(directory, "error"), "w+b") as error,
        ):
            process = subprocess.Popen(
                [sys.executable, script, *arguments],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error,
                env={**os.environ, **(environment or {})},
            )
            status: int | None = None
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if status is None:
                    process.kill()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_KILL_S)
            texts = []
            for file in (output, error):
                file.seek(0)
                texts.append(file.read(_MOST_OUTPUT_BYTES).decode(errors="replace"))
            return Child(status, *texts)


def _direct_read(directory: str) -> Direct:
    """Try direct I/O on the first file that can be read."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
            if not entry.is_file(follow_symlinks=False) or not os.access(entry.path, os.R_OK):
                continue
            if entry.stat(follow_symlinks=False).st_size == 0:
                continue
            return _direct_read_of(entry.path)
    reason = "no file can be made here, and there is none to read: nothing was tried"
    return Direct(None, probe.no_direct_io(reason), "nothing")


def _direct_read_of(path: str) -> Direct:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        told, required = libc.direct_alignment(fd), probe.required_alignment(fd)
    finally:
        os.close(fd)
    reason = probe.refused_filesystem(probe.mount_of(path).filesystem)
    reason = reason or probe.refused_alignment(required)
    if reason or required is None:
        return Direct(told, probe.no_direct_io(reason), "read")
    try:
        fd = os.open(path, flags | os.O_DIRECT)
        try:
            os.preadv(fd, [HostBuffer(ALIGNMENT).memoryview()], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in probe.REFUSALS:
            raise
        return Direct(told, probe.no_direct_io(f"a direct read fails: {error.strerror}"), "read")
    return Direct(told, probe.DirectIO(True, *required), "read")
