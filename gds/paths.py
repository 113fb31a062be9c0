"""The ways a byte can take between a drive and memory: one table, which every command reads.

A path that moves device memory is taken by the KvikIO backend, which is told which of its own three
to take. `gds.opening` makes the backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

DevicePath = Literal["gds", "compat", "bounce"]
"""How device memory is moved."""

PathName = Literal["gds", "compat", "bounce", "direct", "buffered"]


@dataclass(frozen=True, slots=True)
class TransferPath:
    """One way, and who takes it."""

    name: PathName

    title: str
    """For people."""

    memory: Literal["host", "device"]
    """Where the other end is."""

    exit_status: int
    """Of `gds check` where this is what would be used."""


PATHS: Final[dict[PathName, TransferPath]] = {
    path.name: path
    for path in (
        TransferPath("gds", "GPUDirect Storage: between drive and GPU memory", "device", 0),
        TransferPath("compat", "KvikIO in compatibility mode, through the host", "device", 3),
        TransferPath("bounce", "POSIX into host memory, then a copy", "device", 4),
        TransferPath("direct", "POSIX with O_DIRECT, past the page cache", "host", 4),
        TransferPath("buffered", "POSIX through the page cache", "host", 5),
    )
}
"""Best first, for who has a GPU."""
