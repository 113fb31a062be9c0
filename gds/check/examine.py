"""Complete examination of a directory, with its JSON form for scripts."""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass
from typing import Any, Final, Literal

from gds import probe
from gds.check.gpu import Gpu, examine_gpu, gpu_findings
from gds.check.machine import Finding, machine_findings
from gds.check.storage import Storage, examine_storage, storage_findings
from gds.check.system import System
from gds.paths import PATHS, PathName
from gds.probe import is_directory, kernel_view

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
    if gpu.no_driver:
        return f"no CUDA driver: {gpu.no_driver}"
    return "" if gpu.cupy else "cupy is not installed"


SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings about a directory, with the path for each direction."""

    directory: str
    findings: tuple[Finding, ...]
    reads: Choice
    writes: Choice

    def exit_status(
        self, requirement: Requirement | None = None, directions: Directions = "both"
    ) -> int:
        """Return the exit status of `gds check`.

        It is 0 if all directions meet the requirement; otherwise that of the worse direction.
        """
        wanted = {"read": [self.reads], "write": [self.writes]}
        choices = wanted.get(directions, [self.reads, self.writes])
        if requirement and all(choice.meets(requirement) for choice in choices):
            return 0
        if any(choice.path is None for choice in choices):
            return NOTHING
        return max(choice.exit_status for choice in choices)

    def to_json(
        self, requirement: Requirement | None = None, directions: Directions = "both"
    ) -> dict[str, Any]:
        """Return the examination as JSON values. Later versions only add keys."""

        def choice(chosen: Choice) -> dict[str, Any]:
            return {
                "path": chosen.path,
                "direct": chosen.direct,
                "why_not": {name: chosen.why_not.get(name, "") for name in CONSIDERED},
            }

        return {
            "schema": SCHEMA,
            "directory": self.directory,
            "reads": choice(self.reads),
            "writes": choice(self.writes),
            "backends": sorted(PATHS),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "required": requirement,
            "for": directions,
            "exit_status": self.exit_status(requirement, directions),
        }


def examine(
    directory: str, *, system: System | None = None, cufile_timeout_s: float = 10.0
) -> Examination:
    """Examine a directory and the machine. Files made for the trials are removed.

    `cufile_timeout_s` is the time limit in seconds for each child process that uses CUDA.

    Raises:
        FileNotFoundError: The directory does not exist.
        NotADirectoryError: `directory` is a file.
        RefusedError: `directory` is a device, a pipe or a socket, or holds no files on a drive.
    """
    system = system or System()
    if not is_directory(directory):
        raise NotADirectoryError(
            errno.ENOTDIR, "this is a file: name the directory that it is in", directory
        )
    storage = examine_storage(system, directory)
    if storage.mount.filesystem in probe.KERNEL_FILESYSTEMS:
        raise kernel_view(directory, storage.mount.filesystem)
    gpu = examine_gpu(system, storage, timeout_s=cufile_timeout_s)
    findings = (
        *machine_findings(system, has_driver=not gpu.no_driver),
        *storage_findings(system, storage),
        *gpu_findings(system, gpu),
    )
    return Examination(
        directory=directory,
        findings=findings,
        reads=choose("read", storage, gpu),
        writes=choose("write", storage, gpu),
    )
