"""What a directory can really do: its file system, and whether direct I/O works there.

Flags lie: tmpfs accepts O_DIRECT and ignores it, others accept the flag at open and refuse the
transfer. So the last word has a real transfer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gds import libc
from gds.buffers.host import HostBuffer
from gds.contract import ALIGNMENT

MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
"""File systems that are memory: lost at power-off, and without a device to transfer to."""

REMOTE_FILESYSTEMS: Final = frozenset(
    {
        "9p", "acfs", "afs", "auristorfs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "fhgfs",
        "gfs2", "glusterfs", "gpfs", "hgfs", "kafs", "lustre", "ncpfs", "nfs", "nfs3", "nfs4",
        "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "shfs", "smb3", "smbfs", "vboxsf",
        "virtiofs", "vmhgfs", "wekafs",
    }
)  # fmt: skip
"""File systems whose files another machine serves, the host of a virtual one included."""

REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTBLK})
"""Errors by which a file system refuses a well-aligned direct transfer."""

NO_CLONES: Final = frozenset(
    {
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EINVAL,  # among others: files of which only one is overwritten in place (btrfs)
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.ETXTBSY,
    }
)
"""Errors by which the kernel says that it cannot let two files share space."""

_PROBE_BYTES: Final = 2 * ALIGNMENT
_CLONED_BYTES: Final = 1 << 16
"""Of a hole, so that it takes no space: a multiple of every file system's block."""


class DirectIOUnavailable(UserWarning):
    """Transfers go through the page cache, where the caller had reason to expect direct ones."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that holds a directory."""

    filesystem: str
    """Type, such as ``ext4``; ``unknown`` where ``/proc`` cannot be read."""

    mount_point: str
    source: str
    volatile: bool
    """Whether its contents are lost at power-off, synced or not."""

    remote: bool = False
    """Whether another machine, or a program (FUSE), serves its files."""

    options: tuple[str, ...] = ()
    """Those of the mount, then those of the file system."""


@dataclass(frozen=True, slots=True)
class DirectIO:
    """Whether files take direct transfers, and how these must be aligned."""

    supported: bool
    memory_alignment: int
    """Bytes, for the address of the memory; 1 where `supported` is False."""

    offset_alignment: int
    """Bytes, for offset and length; 1 where `supported` is False."""

    reason: str = ""
    """Why not, for people; empty where `supported` is True."""


def no_direct_io(reason: str) -> DirectIO:
    """Return the answer "no", for a reason."""
    return DirectIO(False, 1, 1, reason)


def mount_of(path: str) -> Mount:
    """Return the mount that holds an existing file or directory."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            table = file.read()
    except OSError:
        return Mount("unknown", "", "", volatile=False)
    number: int | None = None
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            number = libc.mount_id(fd)
        finally:
            os.close(fd)
    return find_mount(table, os.path.realpath(path), number)


def mount_points(major: int, minor: int) -> list[str]:
    """Return where the file systems of a device are mounted; none where that cannot be read."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split() for line in file]
    except OSError:
        return []
    number = f"{major}:{minor}"
    return [_unescape(fields[4]) for fields in lines if len(fields) > 4 and fields[2] == number]


def find_mount(table: str, path: str, mount_id: int | None = None) -> Mount:
    """Find the mount of an absolute, resolved `path` in the text of a mountinfo table.

    The kernel's `mount_id` decides where it is known. Otherwise the longest mount point that is a
    parent of `path` does, and among equals the last, which covers the earlier ones.
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
        remote = is_remote(filesystem)
        mount = Mount(filesystem, point, _unescape(tail[1]), volatile, remote, everything)
        if mount_id is not None and fields[0] == str(mount_id):
            return mount
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and (best is None or len(point) >= best[0]):
            best = (len(point), mount)
    return best[1] if best else Mount("unknown", "", "", volatile=False)


def is_remote(filesystem: str) -> bool:
    """Return whether files on this type of file system are served by another machine or a program.

    What is mounted through FUSE is called ``fuse``, ``fuseblk`` or ``fuse.<program>``.
    """
    return filesystem in REMOTE_FILESYSTEMS or (
        filesystem.startswith("fuse") and filesystem != "fusectl"
    )


def describe_remote(filesystem: str) -> str:
    """Say who serves the files of a remote file system, and what follows, for people."""
    who = "a program (FUSE)" if filesystem.startswith("fuse") else "another machine"
    return (
        f"{filesystem} has its files served by {who}: what a lock keeps out, and what a sync has "
        "made durable, is decided there"
    )


def required_alignment(fd: int) -> tuple[int, int] | None:
    """Return the alignments in bytes, of memory and of offsets, for direct transfers on `fd`.

    Asks the kernel; where it does not tell, the block device; where there is none, `ALIGNMENT`.
    Returns None where the kernel says that this file takes no direct transfers.
    """
    told = libc.direct_alignment(fd)
    if told is not None:
        return told if all(told) else None
    device = os.fstat(fd).st_dev
    block = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{block}/queue", f"{block}/../queue"):  # a disk, a partition of one
        with contextlib.suppress(OSError, ValueError), open(f"{queue}/logical_block_size") as file:
            size = int(file.read())
            return size, size
    return ALIGNMENT, ALIGNMENT


def size_bytes(path: str) -> int:
    """Return the size of the file system that holds an existing path; 0 if that is not known."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def direct_io(directory: str) -> DirectIO:
    """Write and read back a small file in `directory` with O_DIRECT, and say how that went.

    Leaves nothing behind. Raises `OSError` where `directory` is not one, or its device fails.
    """
    filesystem = mount_of(directory).filesystem
    if filesystem in MEMORY_FILESYSTEMS:
        return no_direct_io(refused_filesystem(filesystem))
    try:
        return _probe(directory, filesystem)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Too full to try, but files that are there can be used: each is tried when opened.
            return DirectIO(True, ALIGNMENT, ALIGNMENT)
        # /proc says that the new file's name is not there.
        is_special = error.errno == errno.ENOENT and os.path.isdir(directory)
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) and not is_special:
            raise
        return no_direct_io(f"no file can be made here to try it: {error.strerror}")


def _probe(directory: str, filesystem: str) -> DirectIO:
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
    """Try whether files in `directory` can share space. Leaves nothing behind."""
    try:
        with scratch_file(directory) as fd, scratch_file(directory) as source_fd:
            for each in (fd, source_fd):
                os.ftruncate(each, _CLONED_BYTES)
            libc.clone_range(fd, source_fd, 0, _CLONED_BYTES)
    except OSError:
        return False
    return True


def refused_alignment(required: tuple[int, int] | None) -> str:
    """Say why `required` (see `required_alignment`) rules direct transfers out; empty if not."""
    if required is None:
        return "the kernel says that files here take no direct transfers"
    if max(required) > ALIGNMENT:
        return f"direct I/O here asks for {max(required)}-byte alignment, more than {ALIGNMENT}"
    return ""


def refused_filesystem(filesystem: str) -> str:
    """Say why a file system of this type has no direct transfers; empty where it may have."""
    if filesystem in MEMORY_FILESYSTEMS:
        return f"{filesystem} keeps files in memory: there is no device to transfer to"
    return ""


def _round_trip(fd: int, filesystem: str, memory: int, offset: int) -> DirectIO:
    sent, received = HostBuffer(_PROBE_BYTES), HostBuffer(_PROBE_BYTES)
    sent.memoryview()[:] = bytes(range(256)) * (_PROBE_BYTES // 256)
    try:
        written = os.pwritev(fd, [sent.memoryview()], 0)
        read = os.preadv(fd, [received.memoryview()], 0)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DirectIO(True, memory, offset)  # too full to try: the kernel's word stands
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
    """Yield the descriptor of a new, empty file that is gone afterwards.

    It has no name where the file system can do that, so that not even a crash leaves one behind.
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
