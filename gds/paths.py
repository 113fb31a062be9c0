"""The ways a byte can take between a drive and memory: one table, which every command reads.

A path that moves device memory is the KvikIO backend, told which of its own three to take; it is
imported when one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from gds._backend import Backend
from gds._errors import RefusedError
from gds._posix import PosixBackend

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

    make: Callable[[int], Backend]
    """Makes a backend that runs so many transfers at once."""


def _direct(threads: int) -> Backend:
    return PosixBackend(read_threads=threads, write_threads=threads, direct=True)


def _buffered(threads: int) -> Backend:
    return PosixBackend(read_threads=threads, write_threads=threads, direct=False)


def _device(path: DevicePath) -> Callable[[int], Backend]:
    def make(threads: int) -> Backend:
        from gds._kvikio import KvikioBackend  # needs a driver and libraries that few have

        return KvikioBackend(path=path, read_threads=threads, write_threads=threads)

    return make


PATHS: Final[dict[PathName, TransferPath]] = {
    path.name: path
    for path in (
        TransferPath(
            "gds", "GPUDirect Storage: between drive and GPU memory", "device", 0, _device("gds")
        ),
        TransferPath(
            "compat",
            "KvikIO in compatibility mode, through the host",
            "device",
            3,
            _device("compat"),
        ),
        TransferPath(
            "bounce", "POSIX into host memory, then a copy", "device", 4, _device("bounce")
        ),
        TransferPath("direct", "POSIX with O_DIRECT, past the page cache", "host", 4, _direct),
        TransferPath("buffered", "POSIX through the page cache", "host", 5, _buffered),
    )
}
"""Best first, for who has a GPU."""


def open_backend(name: PathName, threads: int, *, no_driver: str = "") -> Backend:
    """Return a new backend that takes the path `name`.

    Args:
        name: Of the path.
        threads: Transfers that it runs at once, in each direction.
        no_driver: Why there is no CUDA driver; empty where there is one.

    Raises:
        RefusedError: It cannot be taken here; says why, and what to do.
    """
    path = PATHS[name]
    if path.memory == "device" and no_driver:
        raise RefusedError(
            f"path {name!r} moves memory of a GPU, and there is no CUDA driver here: {no_driver}"
        )
    return path.make(threads)
