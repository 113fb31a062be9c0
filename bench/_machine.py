"""Description of the machine, storage and versions of a result, without names of host or user."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from gds import probe

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("torch", "numpy", "safetensors", "xxhash")


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, kernel, and the present load of the machine."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _kilobytes("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "transparent_hugepages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "load_average": list(os.getloadavg()),
    }


def describe_storage(directory: str) -> dict[str, Any]:
    """Return file system, mount and device of a directory, and whether it supports direct I/O."""
    mount = probe.mount_of(directory)
    direct = probe.direct_io(directory)
    number = os.stat(directory).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if (block / "partition").exists():
        block = block.resolve().parent
    queue = block / "queue"
    return {
        "filesystem": mount.filesystem,
        "mount_point": mount.mount_point,
        "device": mount.source,
        "model": _text(block / "device/model"),
        "direct": direct.supported,
        "direct_reason": direct.reason,
        "scheduler": _text(queue / "scheduler"),
        "rotational": _text(queue / "rotational"),
        "logical_block_bytes": _text(queue / "logical_block_size"),
        "write_cache": _text(queue / "write_cache"),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, this project and libraries; missing libraries are left out."""
    import offload

    found = {"python": platform.python_version(), "ssd-offload": offload.__version__}
    commit = _commit()
    if commit:
        found["commit"] = commit
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    fio = shutil.which("fio")
    if fio:
        found["fio"] = _output([fio, "--version"])
    return found


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (VmRSS)."""
    return _kilobytes("/proc/self/status", "VmRSS")


def peak_bytes() -> int:
    """Return the peak of resident memory since `reset_peak` in bytes (VmHWM)."""
    return _kilobytes("/proc/self/status", "VmHWM")


def reset_peak() -> bool:
    """Reset `peak_bytes` to the present memory, and return whether the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def io_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to storage, by the kernel."""
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines() if line
    )
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def _commit() -> str:
    """Return the abbreviated commit of this checkout, with ``+`` if files differ from it."""
    commit = _output(["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return ""
    changed = _output(
        ["git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no", "offload", "gds"]
    )
    return commit + ("+" if changed else "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _kilobytes(path: str, name: str) -> int:
    value = _field(path, name).split()
    return int(value[0]) << 10 if value else 0
