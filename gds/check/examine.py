"""All of the examination, and what a script gets of it."""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass
from typing import Any, Final

from gds.check.choice import CONSIDERED, NOTHING, Choice, Directions, Requirement, choose
from gds.check.finding import Finding
from gds.check.gpu import examine_gpu, gpu_findings
from gds.check.machine import machine_findings
from gds.check.storage import examine_storage, storage_findings
from gds.check.system import System
from gds.paths import PATHS
from gds.places import is_directory

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, and what would be used."""

    directory: str
    findings: tuple[Finding, ...]
    reads: Choice
    writes: Choice

    def choices(self, directions: Directions = "both") -> tuple[Choice, ...]:
        """Return what would be used in the directions that are of interest."""
        wanted = {"read": (self.reads,), "write": (self.writes,)}
        return wanted.get(directions, (self.reads, self.writes))

    def exit_status(
        self, requirement: Requirement | None = None, directions: Directions = "both"
    ) -> int:
        """Return the status of the worse direction; 0 where both meet what is required."""
        choices = self.choices(directions)
        if requirement and all(choice.meets(requirement) for choice in choices):
            return 0
        if any(choice.path is None for choice in choices):
            return NOTHING
        return max(choice.exit_status for choice in choices)

    def to_json(
        self, requirement: Requirement | None = None, directions: Directions = "both"
    ) -> dict[str, Any]:
        """Return everything as JSON values; keys are only ever added."""

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
    """Find out what a directory and the machine can do. Leaves nothing behind.

    Args:
        directory: An existing one.
        system: The machine; None is this one.
        cufile_timeout_s: Seconds for each child process that touches CUDA.

    Raises:
        FileNotFoundError: There is no such directory.
        NotADirectoryError: It is a file.
        RefusedError: It is a device, a pipe or a socket.
        OSError: Its device fails.
    """
    system = system or System()
    if not is_directory(directory):
        raise NotADirectoryError(
            errno.ENOTDIR, "this is a file: name the directory that it is in", directory
        )
    storage = examine_storage(system, directory)
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
