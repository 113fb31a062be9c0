"""Machines that are not ours: a tree of files, and the answers that are no files."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gds import probe
from gds.check import System
from gds.check.system import Child, Direct

OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    "GCC version:  gcc version 13.3.0\n"
)
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42\n"

DEVICES = Child(
    0,
    "\n".join(
        json.dumps(line)
        for line in (
            {"stage": "libcuda.so.1"},
            {"stage": "cuInit"},
            {"version": 13000, "devices": [{"name": "NVIDIA H200", "bytes": 150_000_000_000}]},
            {"done": True},
        )
    ),
)


def cufile(*, reads: bool = True, writes: bool = True) -> Child:
    """What the child says when cuFile came to the end."""
    lines = ({"stage": "cuFileRead"}, {"reads": reads}, {"writes": writes}, {"done": True})
    return Child(0, "\n".join(json.dumps(line) for line in lines))


class Machine(System):
    """A machine made of files below a root, and of the answers that are no files."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        self.release = "6.8.0-45-generic"
        self.page = 4096
        self.locked: int | None = None
        self.variables: dict[str, str] = {}
        self.missing_libraries: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.devices = DEVICES
        self.cufile: Child | None = None
        """What trying cuFile gives; None fails the test that makes it be tried."""
        self.number = (259, 1)
        self.direct_io = Direct((512, 512), probe.DirectIO(True, 512, 512), "write and read")
        self.may_read = self.may_write = True
        self.tried: list[tuple[Sequence[str], Mapping[str, str]]] = []
        self.add("/proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
        self.add("/proc/modules", "nvme 1 0 - Live 0x0\n")
        self.add("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.add("/run/udev/control", "")

    def add(self, path: str, text: str) -> None:
        """Make a file."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def remove(self, path: str) -> None:
        """Take a file away."""
        (self.root / path.lstrip("/")).unlink()

    def mount(self, filesystem: str, source: str, *, options: str = "rw", more: str = "rw") -> None:
        """Mount a file system on ``/``."""
        self.add("/proc/self/mountinfo", f"22 1 259:1 / / {options} - {filesystem} {source} {more}")

    def disk(
        self,
        name: str,
        *,
        number: str = "259:0",
        partition: str = "",
        slaves: Sequence[str] = (),
        rotational: int = 0,
    ) -> None:
        """Add a block device, perhaps with a partition, perhaps made of others."""
        folder = f"/sys/devices/block/{name}"
        queue = {
            "rotational": str(rotational),
            "logical_block_size": "512",
            "max_sectors_kb": "1280",
            "nr_requests": "1023",
            "scheduler": "[none] mq-deadline",
            "write_cache": "write through",
        }
        for key, value in queue.items():
            self.add(f"{folder}/queue/{key}", value + "\n")
        for slave in slaves:
            self.add(f"{folder}/slaves/{slave}", "")
        self.link(f"/sys/class/block/{name}", folder)
        self.link(f"/sys/dev/block/{number}", folder)
        if partition:
            self.add(f"{folder}/{partition}/partition", "1\n")
            self.link(f"/sys/class/block/{partition}", f"{folder}/{partition}")
            self.link("/sys/dev/block/259:1", f"{folder}/{partition}")

    def link(self, path: str, target: str) -> None:
        """Make a relative symbolic link, as sysfs does."""
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(self.root / target.lstrip("/"), link.parent))

    # The answers that are no files.

    def kernel(self) -> str:
        return self.release

    def page_bytes(self) -> int:
        return self.page

    def locked_limit_bytes(self) -> int | None:
        return self.locked

    def environment(self, name: str) -> str | None:
        return self.variables.get(name)

    def library_error(self, name: str) -> str:
        return self.missing_libraries.get(name, "")

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def device(self, directory: str) -> tuple[int, int]:
        return self.number

    def mount_id(self, directory: str) -> int | None:
        return 22

    def readable(self, directory: str) -> bool:
        return self.may_read

    def writable(self, directory: str) -> bool:
        return self.may_write

    def direct(self, directory: str) -> Direct:
        return self.direct_io

    def child(self, script, arguments, *, timeout_s, environment=None):
        self.tried.append((arguments, environment or {}))
        if arguments[0] == "devices":
            return self.devices
        assert self.cufile is not None, "cuFile was tried where that is of no use"
        return self.cufile
