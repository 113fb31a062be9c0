"""Complete examination of a directory, with its JSON form for scripts."""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass
from typing import Any, Final

from gds import probe
from gds.check.choice import CONSIDERED, NOTHING, Choice, Directions, Requirement, choose
from gds.check.finding import Finding
from gds.check.gpu import examine_gpu, gpu_findings
from gds.check.machine import machine_findings
from gds.check.storage import examine_storage, storage_findings
from gds.check.system import System
from gds.paths import PATHS
from gds.places import is_directory, kernel_view

SCHEMA: Final = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings about a directory, with the path for each direction."""

    directory: str
    """Path of the directory."""

    findings: tuple[Finding, ...]
    """Findings in the order of display."""

    reads: Choice
    """Path that reads would use."""

    writes: Choice
    """Path that writes would use."""

    def choices(self, directions: Directions = "both") -> tuple[Choice, ...]:
        """Return the choices for the given directions."""
        wanted = {"read": (self.reads,), "write": (self.writes,)}
        return wanted.get(directions, (self.reads, self.writes))

    def exit_status(
        self, requirement: Requirement | None = None, directions: Directions = "both"
    ) -> int:
        """Return the exit status of `gds check`.

        Args:
            requirement: Worst path that is acceptable; None requires nothing.
            directions: Directions to judge by.

        Returns:
            0 if all directions meet the requirement; otherwise the status of the worse direction.
        """
        choices = self.choices(directions)
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
            """Return a choice as JSON values."""
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

    Args:
        directory: Existing directory.
        system: Machine to examine; None is this machine.
        cufile_timeout_s: Time limit in seconds for each child process that uses CUDA.

    Raises:
        FileNotFoundError: The directory does not exist.
        NotADirectoryError: `directory` is a file.
        RefusedError: `directory` is a device, a pipe or a socket, or holds no files on a drive.
        OSError: The directory's device fails.
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
        *gpu_findings(gpu),
    )
    return Examination(
        directory=directory,
        findings=findings,
        reads=choose("read", storage, gpu),
        writes=choose("write", storage, gpu),
    )
