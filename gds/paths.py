"""Table of the paths between a drive and memory, which every command reads.

The KvikIO backend takes the three paths of device memory, and is told which of them to take.
`gds.opening` makes the backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

DevicePath = Literal["gds", "compat", "bounce"]
PathName = Literal["gds", "compat", "bounce", "direct", "buffered"]


@dataclass(frozen=True, slots=True)
class TransferPath:
    """One path between a drive and memory."""

    name: PathName
    title: str
    memory: Literal["host", "device"]
    exit_status: int
    """Exit status of `gds check` if this path is the one that would be used."""


PATHS: Final[dict[PathName, TransferPath]] = {
    path.name: path
    for path in (
        TransferPath("gds", "GPUDirect Storage: between drive and GPU memory", "device", 0),
        TransferPath("compat", "KvikIO in compatibility mode, ordered with training", "device", 3),
        TransferPath("bounce", "POSIX into page-locked memory, then a copy", "device", 3),
        TransferPath("direct", "POSIX with O_DIRECT, past the page cache", "host", 4),
        TransferPath("buffered", "POSIX through the page cache", "host", 5),
    )
}
"""All paths by name, from best to worst for a user with a GPU."""
