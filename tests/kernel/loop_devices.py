"""Real file systems of a few hundred MiB, on loop devices; they go when the test has ended."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAKE: Final = {
    "ext4": (64 << 20, ["mkfs.ext4", "-q", "-F", "-m", "0"]),
    "xfs": (320 << 20, ["mkfs.xfs", "-q", "-f"]),  # less is refused
    "btrfs": (256 << 20, ["mkfs.btrfs", "-q", "-f"]),
}
"""Bytes and command of each: a sparse image, so that only what is written takes space."""

_SHUTDOWN: Final = 0x8004587D  # EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
_NO_LOG_FLUSH: Final = 2


@functools.cache
def why_not(filesystem: str = "ext4") -> str:
    """Say why no file system of a type can be made and mounted here; empty if one can."""
    if os.geteuid() != 0:
        return "only root can mount file systems"
    missing = [name for name in ("losetup", "mount", MAKE[filesystem][1][0]) if not _found(name)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with tempfile.TemporaryDirectory() as directory, mounted(filesystem, Path(directory)):
            return ""
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip()
        return f"{filesystem} cannot be mounted here: {error.cmd[0]} failed: {said}"


@dataclass
class Mounted:
    """A file system on a loop device."""

    path: Path
    """Where it is mounted."""

    device: str
    options: Sequence[str]

    def fill(self, *, leave_bytes: int = 0) -> Path:
        """Reserve all space that is free, but for some; returns the file that holds it."""
        filler = self.path / "filler"
        fd = os.open(filler, os.O_CREAT | os.O_WRONLY)
        size, step = 0, 1 << 28
        while step >= 4096:
            if self.free_bytes() - step < leave_bytes:
                step //= 2
                continue
            try:
                os.posix_fallocate(fd, size, step)
            except OSError:
                step //= 2
            else:
                size += step
        os.fsync(fd)
        os.close(fd)
        os.sync()
        return filler

    def free_bytes(self) -> int:
        """Return what may still be allocated."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def lose_power(self) -> None:
        """Stop the file system at once: nothing that is not on the device will ever be."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def mount_again(self) -> None:
        """Unmount it and mount it, as after a reboot."""
        with self.away():
            pass

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Unmount it for the body."""
        unmount(self.path)
        try:
            yield
        finally:
            _call("mount", *self.options, self.device, self.path)


@contextlib.contextmanager
def mounted(
    filesystem: str,
    directory: Path,
    *,
    mount_options: Sequence[str] = (),
    sector_bytes: int = 512,
    size_bytes: int | None = None,
) -> Iterator[Mounted]:
    """Make a file system in an image in a directory, and mount it there for the body."""
    default_bytes, make = MAKE[filesystem]
    image, point = directory / f"{filesystem}.img", directory / filesystem
    with image.open("wb") as file:
        file.truncate(size_bytes or default_bytes)
    point.mkdir()
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink)
        undo.callback(point.rmdir)
        device = _call("losetup", "--show", "-f", "-b", str(sector_bytes), image).strip()
        undo.callback(_call, "losetup", "-d", device)
        _call(*make, device)
        options = [argument for option in mount_options for argument in ("-o", option)]
        _call("mount", *options, device, point)
        undo.callback(_unmount, point)
        yield Mounted(point, device, options)


def unmount(point: Path) -> None:
    """Unmount what nobody uses any more; the kernel may take a moment to notice."""
    deadline = time.monotonic() + 60
    while True:
        try:
            _call("umount", point)
            return
        except subprocess.CalledProcessError as error:
            if "busy" not in error.stderr or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _unmount(point: Path) -> None:
    try:
        _call("umount", point)
    except subprocess.CalledProcessError:  # a test that failed still has files open
        _call("umount", "--lazy", point)


def _found(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None


def _call(*command: str | Path) -> str:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
