"""Choice of the path for reads and for writes, with the reasons against better paths. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from gds.check.gpu import Gpu
from gds.check.storage import Storage
from gds.paths import PATHS, PathName

Direction = Literal["read", "write"]
Directions = Literal["both", "read", "write"]
Requirement = Literal["gds", "bounce", "direct", "any"]

CONSIDERED: Final[tuple[PathName, ...]] = ("gds", "bounce", "direct", "buffered")
"""Paths to choose from, the best first. The last two are the paths of host memory. ``compat`` is
not among them: it makes training wait, and nothing takes it without being told."""

NOTHING: Final = 1
"""Exit status if no path is usable."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The path that would be used in one direction."""

    path: PathName | None
    """Name of the path; None if no path is usable."""

    why_not: dict[PathName, str]
    """Reason against each path that is not usable, for people."""

    direct: bool
    """Whether the path bypasses the page cache."""

    @property
    def exit_status(self) -> int:
        """The exit status that stands for the path."""
        return PATHS[self.path].exit_status if self.path else NOTHING

    def meets(self, requirement: Requirement) -> bool:
        """Return whether the path is at least as good as a requirement."""
        if self.path is None:
            return False
        if requirement == "direct":
            return self.direct
        if requirement == "any":
            return True
        return CONSIDERED.index(self.path) <= CONSIDERED.index(requirement)


def choose(direction: Direction, storage: Storage, gpu: Gpu) -> Choice:
    """Return the best path that works in one direction, with the reasons against the others."""
    access = _no_access(direction, storage)
    reasons: dict[PathName, str] = {
        "gds": _no_gds(direction, storage, gpu),
        "bounce": _no_bounce(gpu),
        "direct": "" if storage.direct.found.supported else storage.direct.found.reason,
        "buffered": "",
    }
    why_not = {name: access or reason for name, reason in reasons.items() if access or reason}
    usable = [name for name in CONSIDERED if name not in why_not]
    path = usable[0] if usable else None
    direct = path is not None and path != "buffered" and storage.direct.found.supported
    return Choice(path, why_not, direct)


def _no_access(direction: Direction, storage: Storage) -> str:
    """Return the reason why files cannot be accessed in a direction; empty if they can."""
    if direction == "read" and not storage.readable:
        return "this user may not read here"
    if direction == "write" and "ro" in storage.mount.options:
        return "mounted read-only"
    if direction == "write" and not storage.writable:
        return "this user may not write here"
    return ""


def _no_gds(direction: Direction, storage: Storage, gpu: Gpu) -> str:
    """Return the reasons against GPUDirect Storage in a direction; empty if it works."""
    works = gpu.cufile.reads if direction == "read" else gpu.cufile.writes
    if works:
        missing = [name for name in ("kvikio", "cupy") if not getattr(gpu, name)]
        return f"cuFile works, but {' and '.join(missing)} is not installed" if missing else ""
    if gpu.no_driver:
        return f"no CUDA driver: {gpu.no_driver}"
    reasons = [gpu.cufile.reason]
    if not gpu.nvidia_fs and gpu.p2pdma_off_reason:
        reasons.append("nvidia-fs is not loaded")
    if storage.gds_refusal:
        reasons.append(storage.gds_refusal)
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


def _no_bounce(gpu: Gpu) -> str:
    """Return the reason against copies through our own host memory; empty if they work."""
    if gpu.no_driver:
        return f"no CUDA driver: {gpu.no_driver}"
    return "" if gpu.cupy else "cupy is not installed"
