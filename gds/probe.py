"""Probe of a directory: its file system, and whether direct I/O works, tried by a real transfer.

Flags are no proof. tmpfs accepts O_DIRECT and ignores it; other file systems accept the flag at
open and refuse the transfer. So only a real transfer decides.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gds import libc
from gds.buffers.host import HostBuffer
from gds.contract import ALIGNMENT
from gds.errors import RefusedError, StorageError

MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
"""File systems that live in memory: without a device to transfer to, and lost at power-off."""

KERNEL_FILESYSTEMS: Final = frozenset(
    {
        "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
        "efivarfs", "fusectl", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs",
        "selinuxfs", "sysfs", "tracefs",
    }
)  # fmt: skip
"""File systems that show objects of the kernel, and hold no files of users."""

REMOTE_FILESYSTEMS: Final = frozenset(
    {
        "9p", "acfs", "afs", "auristorfs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "fhgfs",
        "gfs2", "glusterfs", "gpfs", "hgfs", "kafs", "lustre", "ncpfs", "nfs", "nfs3", "nfs4",
        "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "shfs", "smb3", "smbfs", "vboxsf",
        "virtiofs", "vmhgfs", "wekafs",
    }
)  # fmt: skip
"""File systems whose files another machine serves. The host of a virtual machine counts as one."""

REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTBLK})
"""Errors by which a file system refuses a well-aligned direct transfer."""

NO_CLONES: Final = frozenset(
    {
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EINVAL,  # for example: only one of the two files is overwritten in place (btrfs)
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.ETXTBSY,
    }
)
"""Errors by which the kernel reports that two files cannot share space."""

_PROBE_BYTES: Final = 2 * ALIGNMENT
_CLONED_BYTES: Final = 1 << 16
"""Length of the range that the clone probe shares, in bytes: a multiple of the block size of every
file system. The range is a hole, so it takes no space."""


class DirectIOUnavailable(UserWarning):
    """Transfers go through the page cache although the caller had reason to expect direct I/O."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that holds a directory."""

    filesystem: str
    """Type of the file system, such as ``ext4``; ``unknown`` if ``/proc`` cannot be read."""

    mount_point: str
    """Directory that the file system is mounted on; empty if not known."""

    source: str
    """Mounted device or share, such as ``/dev/nvme0n1p1``; empty if not known."""

    volatile: bool
    """Whether the contents are lost at power-off, synced or not."""

    remote: bool = False
    """Whether another machine, or a program (FUSE), serves the files."""

    options: tuple[str, ...] = ()
    """Options of the mount, then options of the file system."""


@dataclass(frozen=True, slots=True)
class DirectIO:
    """Whether files take direct transfers, and how the transfers must be aligned."""

    supported: bool
    memory_alignment: int
    """Alignment of the memory's address, in bytes; 1 if `supported` is False."""

    offset_alignment: int
    """Alignment of offset and length, in bytes; 1 if `supported` is False."""

    reason: str = ""
    """Reason, for people, why direct transfers do not work; empty if `supported` is True."""


def no_direct_io(reason: str) -> DirectIO:
    """Return a result that says that direct I/O does not work, with the reason."""
    return DirectIO(False, 1, 1, reason)


def mount_of(path: str) -> Mount:
    """Return the mount that holds an existing file or directory.

    The type is ``unknown`` if ``/proc/self/mountinfo`` cannot be read.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            table = file.read()
    except OSError:
        return Mount("unknown", "", "", volatile=False)
    return find_mount(table, os.path.realpath(path), mount_id(path))


def mount_id(path: str) -> int | None:
    """Return a mount's number in ``/proc/self/mountinfo``, by a path in it; None if not known."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            return libc.mount_id(fd)
        finally:
            os.close(fd)
    return None


def mount_points(major: int, minor: int) -> list[str]:
    """Return the mount points of a block device's file systems; empty if they cannot be read."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split() for line in file]
    except OSError:
        return []
    number = f"{major}:{minor}"
    return [_unescape(fields[4]) for fields in lines if len(fields) > 4 and fields[2] == number]


def find_mount(table: str, path: str, mount_id: int | None = None) -> Mount:
    """Find the mount of a path in the text of a mountinfo table.

    Args:
        table: Text of ``/proc/self/mountinfo``.
        path: Absolute path without symbolic links.
        mount_id: The kernel's number of the mount. If it is None or not in the table, the result
            is the longest mount point that holds `path`. Of several mounts on that point it is
            the last, which covers the earlier ones. If none is found, the type is ``unknown``.
    """
    best: tuple[int, Mount] | None = None
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if not separator or len(fields) < 5 or len(tail) < 2:
            continue
        point, filesystem = _unescape(fields[4]), tail[0]
        options = tail[2].split(",") if len(tail) > 2 else []
        volatile = filesystem in MEMORY_FILESYSTEMS or (
            filesystem == "overlay" and "volatile" in options  # this option ignores every sync
        )
        everything = (*fields[5].split(","), *options) if len(fields) > 5 else tuple(options)
        # The type of a FUSE mount is fuse, fuseblk or fuse.<program>.
        is_fuse = filesystem.startswith("fuse") and filesystem != "fusectl"
        remote = is_fuse or filesystem in REMOTE_FILESYSTEMS
        mount = Mount(filesystem, point, _unescape(tail[1]), volatile, remote, everything)
        if mount_id is not None and fields[0] == str(mount_id):
            return mount
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and (best is None or len(point) >= best[0]):
            best = (len(point), mount)
    return best[1] if best else Mount("unknown", "", "", volatile=False)


def describe_remote(filesystem: str) -> str:
    """Return a message for people: who serves a remote file system, and what that implies."""
    who = "a program (FUSE)" if filesystem.startswith("fuse") else "another machine"
    return (
        f"files on {filesystem} are served by {who}, which decides whether locks exclude other "
        "writers and whether a sync makes data durable"
    )


def is_directory(path: str) -> bool:
    """Return True if a path is a directory, False if it is a regular file.

    Raises:
        FileNotFoundError: The path does not exist.
        RefusedError: The path is a device, a pipe or a socket. For a block device the message
            says what to name instead.
        StorageError: The system cannot examine the path.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT, "no such file or directory: create it, or name another", path
        ) from error
    except NotADirectoryError as error:
        raise FileNotFoundError(
            errno.ENOENT, "no such file or directory: a parent in this path is a file", path
        ) from error
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "cannot be examined", path) from error
    if stat.S_ISBLK(found.st_mode):
        raise RefusedError(
            f"{path} is a block device, but only files can be used: {_instead(found)}"
        )
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise RefusedError(f"{path} is neither a directory nor a regular file")
    return stat.S_ISDIR(found.st_mode)


def _instead(device: os.stat_result) -> str:
    points = mount_points(os.major(device.st_rdev), os.minor(device.st_rdev))
    if not points:
        return "mount its file system, and name a directory in it"
    return f"name a directory in {points[0]}, where it is mounted"


def kernel_view(place: str, filesystem: str) -> RefusedError:
    """Return the error for a place in one of `KERNEL_FILESYSTEMS`."""
    return RefusedError(
        f"{place} is {filesystem}, a view of the kernel without files on a drive: "
        "name a directory on a drive"
    )


def required_alignment(fd: int) -> tuple[int, int] | None:
    """Return the alignments that direct transfers on `fd` need.

    Returns:
        Alignment of memory, and alignment of offset and length, both in bytes, as the kernel
        reports them. If the kernel reports none, both are the block size of the device; if that is
        not known either, both are `ALIGNMENT`. None if the kernel says that this file takes no
        direct transfers.
    """
    told = libc.direct_alignment(fd)
    if told is not None:
        return told if all(told) else None
    device = os.fstat(fd).st_dev
    block = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{block}/queue", f"{block}/../queue"):  # for a disk, for a partition
        with contextlib.suppress(OSError, ValueError), open(f"{queue}/logical_block_size") as file:
            size = int(file.read())
            return size, size
    return ALIGNMENT, ALIGNMENT


def size_bytes(path: str) -> int:
    """Return the size, in bytes, of the file system that holds an existing path; 0 if not known."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def direct_io(directory: str) -> DirectIO:
    """Write and read back a small file in `directory` with O_DIRECT, and return the result.

    The file is removed afterwards. If the file system is too full to try, the result is that
    direct I/O is supported, because existing files may still be used.

    Raises:
        OSError: `directory` is not a directory, or its device fails.
    """
    filesystem = mount_of(directory).filesystem
    if filesystem in MEMORY_FILESYSTEMS:
        return no_direct_io(refused_filesystem(filesystem))
    try:
        return _probe(directory, filesystem)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Too full to try. Existing files can still be used: each is tried when it is opened.
            return DirectIO(True, ALIGNMENT, ALIGNMENT)
        # ENOENT also comes from special file systems without new files, such as /proc.
        is_special = error.errno == errno.ENOENT and os.path.isdir(directory)
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) and not is_special:
            raise
        return no_direct_io(f"no file can be made here to try it: {error.strerror}")


def _probe(directory: str, filesystem: str) -> DirectIO:
    """Return the result of a direct transfer to and from a scratch file."""
    with scratch_file(directory) as plain_fd:
        required = required_alignment(plain_fd)
        if refusal := refused_alignment(required):
            return no_direct_io(refusal)
        memory, offset = required or (ALIGNMENT, ALIGNMENT)
        try:
            fd = os.open(f"/proc/self/fd/{plain_fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return no_direct_io(f"{filesystem} refuses O_DIRECT at open: {error.strerror}")
        try:
            return _round_trip(fd, filesystem, memory, offset)
        finally:
            os.close(fd)


def can_clone(directory: str) -> bool:
    """Return whether files in `directory` can share space, tried with two scratch files."""
    try:
        with scratch_file(directory) as fd, scratch_file(directory) as source_fd:
            for each in (fd, source_fd):
                os.ftruncate(each, _CLONED_BYTES)
            libc.clone_range(fd, source_fd, 0, _CLONED_BYTES)
    except OSError:
        return False
    return True


def refused_alignment(required: tuple[int, int] | None) -> str:
    """Return why the result of `required_alignment` rules out direct transfers; empty if not."""
    if required is None:
        return "the kernel reports that files here do not support direct I/O"
    if max(required) > ALIGNMENT:
        return f"direct I/O here requires {max(required)}-byte alignment, more than {ALIGNMENT}"
    return ""


def refused_filesystem(filesystem: str) -> str:
    """Return the reason why this type of file system has no direct transfers; empty if it may."""
    if filesystem in MEMORY_FILESYSTEMS:
        return f"{filesystem} keeps files in memory: there is no device to transfer to"
    return ""


def _round_trip(fd: int, filesystem: str, memory: int, offset: int) -> DirectIO:
    """Return the result of a direct write and read, with alignments `memory` and `offset`."""
    sent, received = HostBuffer(_PROBE_BYTES), HostBuffer(_PROBE_BYTES)
    sent.memoryview()[:] = bytes(range(256)) * (_PROBE_BYTES // 256)
    try:
        written = os.pwritev(fd, [sent.memoryview()], 0)
        read = os.preadv(fd, [received.memoryview()], 0)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DirectIO(True, memory, offset)  # too full to try: trust the kernel's answer
        if error.errno not in REFUSALS:
            raise
        return no_direct_io(
            f"{filesystem} accepts O_DIRECT but refuses the transfer: {error.strerror}"
        )
    if (written, read) != (_PROBE_BYTES, _PROBE_BYTES):
        return no_direct_io(
            f"a direct transfer on {filesystem} moved {written} and {read} bytes only"
        )
    if sent.memoryview() != received.memoryview():
        return no_direct_io(
            f"a direct read on {filesystem} did not return what a direct write wrote"
        )
    return DirectIO(True, memory, offset)


@contextlib.contextmanager
def scratch_file(directory: str) -> Iterator[int]:
    """Yield the descriptor of a new, empty file, which is removed at the end of the context.

    The file has no name if the file system supports that, so that not even a crash leaves it
    behind.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    path = ""
    try:
        fd = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        path = os.path.join(directory, f".gds-probe-{secrets.token_hex(8)}")
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
        if path:
            os.unlink(path)


def _unescape(field: str) -> str:
    """Undo mountinfo's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
