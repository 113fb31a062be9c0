"""Examination of kernel, memory and limits."""

from __future__ import annotations

import re
from typing import Final

from gds.check.finding import Finding
from gds.check.system import System

_DIOALIGN_SINCE: Final = (6, 1)
_ENOUGH_LOCKED_BYTES: Final = 64 << 20
MIB: Final = 1 << 20
GIB: Final = 1 << 30


def kernel_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a kernel release; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def machine_findings(system: System, *, has_driver: bool) -> list[Finding]:
    """Return the findings about the machine, which concern every path."""
    return [
        _kernel(system),
        _page(system),
        _huge_pages(system),
        _memory(system),
        _locked(system, has_driver=has_driver),
    ]


def _kernel(system: System) -> Finding:
    """Return the finding about the kernel's version."""
    release = system.kernel()
    if kernel_version(release) >= _DIOALIGN_SINCE:
        return Finding("machine", "kernel", release, "ok")
    return Finding(
        "machine",
        "kernel",
        release,
        "limits",
        "kernels before 6.1 do not report the alignment that direct transfers need: the block "
        "size of the device is used, or 4096",
    )


def _page(system: System) -> Finding:
    """Return the finding about the page size."""
    size = system.page_bytes()
    if size == 4096:
        return Finding("machine", "page size", f"{size} bytes", "ok")
    return Finding(
        "machine",
        "page size",
        f"{size} bytes",
        "limits",
        "files are laid out in blocks of 4096 bytes; KvikIO aligns to pages, so transfers that do "
        "not start on a page take its slower path",
    )


def _huge_pages(system: System) -> Finding:
    """Return the finding about transparent huge pages."""
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    text = (system.text(path) or "").strip()
    chosen = re.search(r"\[(\w+)\]", text)
    what = "huge pages"
    if chosen is None:
        return Finding(
            "machine",
            what,
            "not known",
            "limits",
            f"{path} does not exist: buffers stay on 4 KiB pages, and direct transfers reach the "
            "drive in many small pieces",
        )
    if chosen[1] == "never":
        return Finding(
            "machine",
            what,
            "never",
            "limits",
            "buffers stay on 4 KiB pages, and direct transfers reach the drive in many small "
            "pieces",
            f"echo madvise > {path}",
        )
    return Finding("machine", what, chosen[1], "ok")


def _memory(system: System) -> Finding:
    """Return the finding about the machine's memory."""
    found = dict(
        re.findall(r"^(\w+):\s+(\d+) kB", system.text("/proc/meminfo") or "", re.MULTILINE)
    )
    if "MemTotal" not in found:
        return Finding("machine", "memory", "not known", "limits", "/proc/meminfo cannot be read")
    total = int(found["MemTotal"]) << 10
    value = f"{total / GIB:.1f} GiB"
    if "MemAvailable" in found:
        value += f", {(int(found['MemAvailable']) << 10) / GIB:.1f} GiB available"
    return Finding("machine", "memory", value, "ok")


def _locked(system: System, *, has_driver: bool) -> Finding:
    """Return the finding about the limit of locked memory."""
    limit = system.locked_limit_bytes()
    value = "unlimited" if limit is None else f"{limit / MIB:g} MiB"
    if limit is None or limit >= _ENOUGH_LOCKED_BYTES or not has_driver:
        why = "" if limit is None or has_driver else "no POSIX path locks memory"
        return Finding("machine", "memlock limit", value, "ok", why)
    return Finding(
        "machine",
        "memlock limit",
        value,
        "limits",
        "memory registered for RDMA, and with some drivers page-locked memory, counts against it",
        "ulimit -l unlimited; for a container --ulimit memlock=-1",
    )
