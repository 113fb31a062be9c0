"""Findings of the examination, and those about kernel, memory and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from gds.check.system import System

_DIOALIGN_SINCE: Final = (6, 1)
_ENOUGH_LOCKED_BYTES: Final = 64 << 20
MIB: Final = 1 << 20
GIB: Final = 1 << 30

Verdict = Literal["ok", "limits", "missing"]
Section = Literal["machine", "storage", "gpu"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One property that was examined, with its value and a verdict."""

    section: Section
    what: str
    """Name of the property. It is short and stable, so that scripts can search for it."""

    value: str
    verdict: Verdict
    """``ok``; ``limits`` if the value makes some transfers slower or impossible; ``missing`` if a
    component is missing that a better path needs."""

    why: str = ""
    """Reason of the verdict, for people; may be empty if the verdict is ``ok``."""

    do: str = ""
    """Remedy, for people; empty if the verdict is ``ok`` or nothing can be done."""


def unless(
    why: str, section: Section, what: str, value: str, do: str = "", bad: Verdict = "limits"
) -> Finding:
    """Return a finding that is ``ok``, unless there is a reason `why` it is `bad`."""
    if why:
        return Finding(section, what, value, bad, why, do)
    return Finding(section, what, value, "ok")


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
    release, why = system.kernel(), ""
    if kernel_version(release) < _DIOALIGN_SINCE:
        why = (
            "kernels before 6.1 do not report the alignment that direct transfers need: the block "
            "size of the device is used, or 4096"
        )
    return unless(why, "machine", "kernel", release)


def _page(system: System) -> Finding:
    size, why = system.page_bytes(), ""
    if size != 4096:
        why = (
            "files are laid out in blocks of 4096 bytes; KvikIO aligns to pages, so transfers that "
            "do not start on a page take its slower path"
        )
    return unless(why, "machine", "page size", f"{size} bytes")


def _huge_pages(system: System) -> Finding:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", system.text(path) or "")
    small = "buffers stay on 4 KiB pages, and direct transfers reach the drive in many small pieces"
    if chosen is None:
        why = f"{path} does not exist: {small}"
        return Finding("machine", "huge pages", "not known", "limits", why)
    why = small if chosen[1] == "never" else ""
    return unless(why, "machine", "huge pages", chosen[1], f"echo madvise > {path}")


def _memory(system: System) -> Finding:
    found = dict(
        re.findall(r"^(\w+):\s+(\d+) kB", system.text("/proc/meminfo") or "", re.MULTILINE)
    )
    if "MemTotal" not in found:
        return Finding("machine", "memory", "not known", "limits", "/proc/meminfo cannot be read")
    value = f"{(int(found['MemTotal']) << 10) / GIB:.1f} GiB"
    if "MemAvailable" in found:
        value += f", {(int(found['MemAvailable']) << 10) / GIB:.1f} GiB available"
    return Finding("machine", "memory", value, "ok")


def _locked(system: System, *, has_driver: bool) -> Finding:
    limit = system.locked_limit_bytes()
    value = "unlimited" if limit is None else f"{limit / MIB:g} MiB"
    if limit is not None and not has_driver:
        return Finding("machine", "memlock limit", value, "ok", "no POSIX path locks memory")
    why = ""
    if limit is not None and limit < _ENOUGH_LOCKED_BYTES:
        why = (
            "memory registered for RDMA, and with some drivers page-locked memory, counts against "
            "it"
        )
    do = "ulimit -l unlimited; for a container --ulimit memlock=-1"
    return unless(why, "machine", "memlock limit", value, do)
