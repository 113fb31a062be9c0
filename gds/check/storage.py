"""Examination of a directory's file system, mount, drives and direct I/O."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from gds import probe
from gds.check.machine import GIB, Finding, unless
from gds.check.system import Direct, System
from gds.contract import ALIGNMENT

LOCAL_GDS_FILESYSTEMS: Final = frozenset({"ext4", "xfs"})
"""Local file systems that GPUDirect Storage supports."""

REMOTE_GDS_FILESYSTEMS: Final = frozenset({"nfs", "nfs4", "lustre", "wekafs", "gpfs", "beegfs"})
"""Network file systems for which NVIDIA documents GPUDirect Storage, if the client supports it."""

_MOST_LEVELS: Final = 8


@dataclass(frozen=True, slots=True)
class Drive:
    """A block device without another block device below it."""

    name: str
    rotational: bool
    nvme: bool


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of a directory."""

    directory: str
    mount: probe.Mount
    block: str
    """Name of the block device under the file system; empty if there is none or it is not known."""

    mapped: bool
    """Whether the device mapper (LVM, dm-crypt) is between the file system and the drives."""

    drives: tuple[Drive, ...]
    direct: Direct
    readable: bool
    """Whether this user may list the directory and open files in it."""

    writable: bool
    """Whether this user may make files in the directory."""

    free_bytes: int

    @property
    def gds_refusal(self) -> str:
        """Reason, found without a GPU, why GPUDirect Storage cannot work here; empty if none is."""
        kind = self.mount.filesystem
        if not self.direct.found.supported:
            return f"direct I/O is not available: {self.direct.found.reason}"
        if kind in REMOTE_GDS_FILESYSTEMS:
            return ""
        if kind not in LOCAL_GDS_FILESYSTEMS:
            return f"{kind} is not a file system that it supports (ext4, XFS; some network ones)"
        if kind == "ext4" and "data=journal" in self.mount.options:
            return "ext4 with data=journal copies all data through the page cache"
        if self.mapped:
            return f"{self.block} is a device-mapper device, whose drives it cannot find"
        if self.drives and not all(drive.nvme for drive in self.drives):
            names = ", ".join(drive.name for drive in self.drives if not drive.nvme)
            return f"{names} is not an NVMe drive"
        return ""


def examine_storage(system: System, directory: str) -> Storage:
    """Examine the storage of a directory; raises `OSError` if the directory does not exist."""
    number = system.device(directory)
    table = system.text("/proc/self/mountinfo") or ""
    mount = probe.find_mount(table, os.path.realpath(directory), system.mount_id(directory))
    block = _block_device(system, number, mount.source)
    below = _drives(system, block) if block else ()
    return Storage(
        directory=directory,
        mount=mount,
        block=block,
        mapped=any(name.startswith("dm-") for name in _levels(system, block)) if block else False,
        drives=below,
        direct=system.direct(directory),
        readable=system.readable(directory),
        writable=system.writable(directory),
        free_bytes=system.free_bytes(directory),
    )


def storage_findings(system: System, storage: Storage) -> list[Finding]:
    """Return the findings about a directory's storage."""
    found = [_filesystem(storage), _mount(storage)]
    if storage.block:
        found.append(_device(system, storage))
    found += [_alignment(storage), _direct(storage), _gds(storage), _access(storage)]
    return found


def _filesystem(storage: Storage) -> Finding:
    mount = storage.mount
    what, value = "file system", f"{mount.filesystem} on {mount.source or 'an unknown source'}"
    why, do = "", ""
    if mount.volatile:
        why = "it keeps files in memory or ignores every sync, so files are lost at power-off"
        do = "use a directory on a drive"
    elif mount.remote:
        why = probe.describe_remote(mount.filesystem)
        do = "keep checkpoints and other data that must be durable in a directory on a local drive"
    elif mount.filesystem == "unknown":
        why = "/proc/self/mountinfo does not show which file system it is"
    return unless(why, "storage", what, value, do)


def _mount(storage: Storage) -> Finding:
    options = storage.mount.options
    shown = ",".join(dict.fromkeys(options)) or "not known"
    value = f"{storage.mount.mount_point or 'not known'} ({shown})"
    for option, why, do in (
        ("ro", "mounted read-only: nothing can be written", "mount it with rw"),
        (
            "data=journal",
            "all data goes through the journal and the page cache, and is written twice",
            "mount it with data=ordered",
        ),
        ("sync", "every write waits until it is durable", "mount it without sync"),
    ):
        if option in options:
            return Finding("storage", "mount", value, "limits", why, do)
    return Finding("storage", "mount", value, "ok")


def _device(system: System, storage: Storage) -> Finding:
    queue = f"{_block_folder(system, storage.block)}/queue"
    if not system.exists(queue):  # a partition has no queue, but its disk has one
        queue = f"{os.path.dirname(_block_folder(system, storage.block))}/queue"

    def limit(name: str) -> str:
        return (system.text(f"{queue}/{name}") or "").strip() or "?"

    scheduler = limit("scheduler")
    if "[" in scheduler:
        scheduler = scheduler.partition("[")[2].partition("]")[0]
    names = "+".join(drive.name for drive in storage.drives) or storage.block
    below = "" if names == storage.block else f" on {names}"
    value = (
        f"{storage.block}{below}, blocks of {limit('logical_block_size')} bytes, at most "
        f"{limit('max_sectors_kb')} KiB a request, {limit('nr_requests')} requests, scheduler "
        f"{scheduler}, cache {limit('write_cache')}"
    )
    why = ""
    # Hypervisors report any drive as rotational.
    if any(d.rotational and not d.name.startswith(("vd", "xvd")) for d in storage.drives):
        why = "a rotating disk: random requests wait for its head"
    return unless(why, "storage", "device", value, "use an SSD")


def _alignment(storage: Storage) -> Finding:
    reported = storage.direct.reported
    why = ""
    if reported is None:
        value = "nothing"
        why = (
            "neither the kernel (6.1 or newer does) nor the file system reports it: the block size "
            "is used"
        )
    elif not all(reported):
        value = "no direct I/O"
        why = "the kernel reports that files here do not support direct I/O"
    else:
        value = f"memory {reported[0]} bytes, offset and length {reported[1]} bytes"
        if max(reported) > ALIGNMENT:
            why = f"file layouts of this package align to {ALIGNMENT} bytes, which is not enough"
    return unless(why, "storage", "I/O alignment", value)


def _direct(storage: Storage) -> Finding:
    found, tried = storage.direct.found, f"({storage.direct.tried} tried)"
    if found.supported:
        return Finding("storage", "direct I/O", f"works {tried}", "ok")
    value, do = f"no {tried}", "use a directory on a local drive with ext4 or XFS"
    if storage.direct.tried == "nothing":
        value = f"not known {tried}"
        do = "name a directory that you may write to, or that has a file to read"
    return Finding("storage", "direct I/O", value, "limits", found.reason, do)


def _gds(storage: Storage) -> Finding:
    what, refusal = "GDS here", storage.gds_refusal
    if not refusal:
        return Finding("storage", what, "nothing found that prevents it", "ok")
    do = "for GDS: ext4 or XFS on a local NVMe drive, mounted with data=ordered"
    return Finding("storage", what, "no", "limits", f"{refusal}; POSIX I/O is not affected", do)


def _access(storage: Storage) -> Finding:
    free = f"{storage.free_bytes / GIB:.1f} GiB free"
    if storage.readable and storage.writable:
        return Finding("storage", "access", f"read and write, {free}", "ok")
    can = "read only" if storage.readable else "write only" if storage.writable else "none"
    why = f"this user may not {'write' if storage.readable else 'read'} here, or it is read-only"
    return Finding("storage", "access", f"{can}, {free}", "limits", why, "change the permissions")


def _block_folder(system: System, name: str) -> str:
    return system.resolved(f"/sys/class/block/{name}")


def _block_device(system: System, number: tuple[int, int], source: str) -> str:
    """Return the name of a block device; empty if it is not found."""
    by_number = f"/sys/dev/block/{number[0]}:{number[1]}"
    if system.exists(by_number):
        return os.path.basename(system.resolved(by_number))
    if source.startswith("/dev/"):  # btrfs has a private device number that /sys does not list
        for path in (source, system.resolved(source)):
            name = os.path.basename(path)
            if system.exists(f"/sys/class/block/{name}"):
                return name
    return ""


def _levels(system: System, name: str, level: int = 0) -> tuple[str, ...]:
    """Return the names of a block device and of all devices below it, upper ones first."""
    slaves = system.names(f"{_block_folder(system, name)}/slaves")
    if level == _MOST_LEVELS:
        return (name,)
    below = [found for slave in slaves for found in _levels(system, slave, level + 1)]
    return (name, *dict.fromkeys(below))


def _drives(system: System, name: str) -> tuple[Drive, ...]:
    found = {}
    for device in _levels(system, name):
        folder = _block_folder(system, device)
        if system.names(f"{folder}/slaves"):
            continue
        if system.exists(f"{folder}/partition"):
            folder = os.path.dirname(folder)  # use the disk in place of its partition
            if system.names(f"{folder}/slaves"):
                continue
        name = os.path.basename(folder)
        rotational = (system.text(f"{folder}/queue/rotational") or "").strip() == "1"
        found[name] = Drive(name, rotational, name.startswith("nvme"))
    return tuple(found.values())
