"""Interface to the machine: `gds check` reads every fact through this module.

Tests use another root directory with the files of another machine, and override the few methods
that do not read files.
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
    """The end of a child process, with its output."""

    status: int | None
    """Exit status, negative for a signal; None if the process was killed after its time limit."""

    output: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Direct:
    """Result of the trial of direct I/O in a directory."""

    reported: tuple[int, int] | None
    """Alignment of memory, and of offset and length, in bytes, as ``statx`` reports it. (0, 0)
    means that there is no direct I/O, None that it is not reported."""

    found: probe.DirectIO
    tried: Literal["write and read", "read", "nothing"]
    """Kind of the transfer. If no file can be made, an existing file is read."""


class System:
    """This machine. `root` replaces ``/`` for ``/proc``, ``/sys``, ``/etc`` and ``/run``."""

    def __init__(self, root: str = "/") -> None:
        """Examine the machine whose files are in the directory `root`."""
        self._root = root.rstrip("/")

    # Files.

    def text(self, path: str) -> str | None:
        """Return the content of a text file, at most 1 MiB of it, or None if it cannot be read."""
        try:
            with open(self._root + path, "rb") as file:
                return file.read(_MOST_TEXT_BYTES).decode(errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory, sorted; empty if it cannot be read."""
        try:
            return tuple(sorted(os.listdir(self._root + path)))
        except OSError:
            return ()

    def exists(self, path: str) -> bool:
        """Return whether a path exists."""
        return os.path.exists(self._root + path)

    def resolved(self, path: str) -> str:
        """Return a path with all symbolic links resolved."""
        root = os.path.realpath(self._root or "/").rstrip("/")
        return os.path.realpath(self._root + path).removeprefix(root) or "/"

    # Process and installed software.

    def kernel(self) -> str:
        """Return the release of the kernel, such as ``6.8.0-45-generic``."""
        return os.uname().release

    def page_bytes(self) -> int:
        """Return the size of a page of memory, in bytes."""
        return resource.getpagesize()

    def locked_limit_bytes(self) -> int | None:
        """Return how many bytes of memory this process may lock; None is no limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def environment(self, name: str) -> str | None:
        """Return an environment variable, or None if it is not set."""
        return os.environ.get(name)

    def library_error(self, name: str) -> str:
        """Load a shared library, and return the error; empty if it is loaded."""
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return str(error)
        return ""

    def version(self, distribution: str) -> str | None:
        """Return the version of an installed Python package, or None; it is not imported."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    # Directory.

    def device(self, directory: str) -> tuple[int, int]:
        """Return major and minor number of a directory's device."""
        number = os.stat(directory).st_dev
        return os.major(number), os.minor(number)

    def mount_id(self, directory: str) -> int | None:
        """Return a directory's mount number in ``/proc/self/mountinfo``; None if not known."""
        return probe.mount_id(directory)

    def readable(self, directory: str) -> bool:
        """Return whether this user may list a directory and open files in it."""
        return os.access(directory, os.R_OK | os.X_OK)

    def writable(self, directory: str) -> bool:
        """Return whether this user may make a file in a directory."""
        return os.access(directory, os.W_OK | os.X_OK)

    def free_bytes(self, directory: str) -> int:
        """Return the free bytes of a directory's file system for an unprivileged user."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def direct(self, directory: str) -> Direct:
        """Try direct I/O, with a new file or, if none can be made, with an existing one.

        A new file is removed afterwards.
        """
        if self.writable(directory):
            with contextlib.suppress(OSError):  # for example no inode is free: read a file instead
                with probe.scratch_file(directory) as fd:
                    reported = libc.direct_alignment(fd)
                return Direct(reported, probe.direct_io(directory), "write and read")
        return _direct_read(directory)

    # Child processes.

    def child(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Run a Python script in a child process, and kill it if it takes too long.

        It runs in a temporary directory, which is removed with the logs that libraries write into
        it. A process that is stuck in a driver and survives SIGKILL is left behind.
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
    """Try direct I/O with the first readable, non-empty file of a directory."""
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
        reported, required = libc.direct_alignment(fd), probe.required_alignment(fd)
    finally:
        os.close(fd)
    reason = probe.refused_filesystem(probe.mount_of(path).filesystem)
    reason = reason or probe.refused_alignment(required)
    if reason or required is None:
        return Direct(reported, probe.no_direct_io(reason), "read")
    try:
        fd = os.open(path, flags | os.O_DIRECT)
        try:
            os.preadv(fd, [HostBuffer(ALIGNMENT).memoryview()], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in probe.REFUSALS:
            raise
        return Direct(
            reported, probe.no_direct_io(f"a direct read fails: {error.strerror}"), "read"
        )
    return Direct(reported, probe.DirectIO(True, *required), "read")
