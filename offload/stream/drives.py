"""The drives of a store: their directories, backends, and shares of the state."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from gds import Backend, PosixBackend, probe
from gds.buffers.cuda import REMEDY
from gds.calibration import Calibration, calibrate, load_calibration, save_calibration
from gds.contract import Counters
from gds.errors import RefusedError
from offload.device.compute import COMPUTES
from offload.format.manifest import MAX_DIRECTORIES
from offload.format.names import CALIBRATION_NAME
from offload.journal import log_event
from offload.options import Options
from offload.stream.meter import Trace, TracedBackend
from offload.units import duration, rate, size

_OF_EACH = ("bytes_read", "bytes_written", "read_s", "write_s")

_MAX_SUM = 64
"""Maximal sum of measured shares. Finer shares would be more exact than the measurement."""

Directory: TypeAlias = str | bytes | os.PathLike[str]


def as_directories(directory: Directory | Sequence[Directory]) -> tuple[str, ...]:
    """Return the absolute paths that a ``directory=`` argument names, in its order.

    Raises:
        TypeError: A value is not a path.
        ValueError: The list is empty or too long, or names the same directory twice.
    """
    given: Any = directory
    is_one = isinstance(given, str | bytes | os.PathLike) or not isinstance(given, Iterable)
    given = [given] if is_one else [*given]
    for path in given:
        if not isinstance(path, str | bytes | os.PathLike):
            raise TypeError(f"directory must be a path, or a list of paths, got {path!r:.60}")
    paths = tuple(os.path.abspath(os.fsdecode(path)) for path in given)
    if not paths:
        raise ValueError("directory must be a path, or a list of at least one")
    if len(paths) > MAX_DIRECTORIES:
        raise ValueError(f"a store has at most {MAX_DIRECTORIES} directories, got {len(paths)}")
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ValueError(
                f"directory names the same directory twice, {seen[real]!r} and {path!r}: give one "
                "on each drive, or only one"
            )
        seen[real] = path
    return paths


class Drives:
    """The drives of a store, each with a backend that is tuned for it.

    Each backend has its own threads, so that a slow drive does not delay the others. A backend that
    the user passed in serves all drives.

    Args:
        directories: One directory on each drive.
        options: Options of the user.
        trace: Trace that records all transfers; None for no trace.
        device: Device of the parameters; None for host memory.

    Raises:
        ValueError: The number of shares in `options` is not the number of directories.
        gds.errors.RefusedError: The options place state on a device, and a library or the driver
            for that is missing.
    """

    def __init__(
        self,
        directories: Sequence[str],
        options: Options,
        trace: Trace | None,
        device: torch.device | None = None,
    ) -> None:
        shares = options.drives.shares
        if shares is not None and len(shares) != len(directories):
            raise ValueError(
                "DriveTuning(shares=...) needs one number for each directory, got "
                f"{len(shares)} for {len(directories)}: {', '.join(directories)}"
            )
        self.directories = directories
        """Directories of the store, one on each drive."""
        self._options = options
        self._calibrations: list[Calibration | None] = [None] * len(directories)
        self.untraced_backends: list[Backend] = (
            [options.backend]
            if options.backend
            else [new_backend(options, device) for _ in directories]
        )
        """Backends without the trace: one for each directory, or a single one for all."""
        traced = self.untraced_backends
        if trace is not None:
            traced = [TracedBackend(backend, trace) for backend in traced]
        self.backends = traced * len(directories) if options.backend else traced
        """Backends with the trace, one for each directory."""

    def move(self, directories: Sequence[str]) -> None:
        """Use equally many other directories from now on. Nothing has been measured yet."""
        self.directories = directories

    def shares(self) -> tuple[int, ...]:
        """Return the share of a new store's state for each drive, as small whole numbers.

        Shares are proportional to bandwidth. If there is more than one drive, bandwidths that are
        not known yet are measured now. If one stays unknown, the shares are equal.
        """
        if self._options.drives.shares is not None:
            return tuple(self._options.drives.shares)
        if len(self.directories) > 1:
            self.calibrate(MIN_STATE_BYTES)
        speeds = [found.mixed_gbps if found else 0.0 for found in self._calibrations]
        return proportional_shares(speeds if all(speeds) else [1.0] * len(speeds))

    def tune(self, state_bytes: int, frame_bytes: int) -> int:
        """Tune threads and request sizes for the drives; return the number of ring chunks."""
        self.calibrate(state_bytes)
        pairs = zip(self.untraced_backends, self._calibrations, strict=False)
        chunks = [apply_calibration(b, self._options, c, frame_bytes) for b, c in pairs]
        if self._options.ring_chunks is not None:
            return self._options.ring_chunks
        return sum(chunks)  # chunks take turns on the drives, and each needs enough

    def counters(self) -> Counters:
        """Return the sums of the backends' counters; seconds are those of the busiest one."""
        found = [backend.counters() for backend in self.untraced_backends]
        return Counters(
            bytes_read=sum(c.bytes_read for c in found),
            bytes_written=sum(c.bytes_written for c in found),
            num_reads=sum(c.num_reads for c in found),
            num_writes=sum(c.num_writes for c in found),
            num_syncs=sum(c.num_syncs for c in found),
            read_s=max(c.read_s for c in found),
            write_s=max(c.write_s for c in found),
        )

    def totals_of_each(self) -> dict[str, dict[str, float]]:
        """Return what each of several drives has done, and can do, by its directory.

        The numbers have the names that they have in `Stats`; rates that are not known are missing.
        The result is empty for one drive, and if one backend serves all.
        """
        found: dict[str, dict[str, float]] = {}
        if len(self.untraced_backends) == 1:
            return found
        drives = zip(self.directories, self.untraced_backends, self._calibrations, strict=True)
        for directory, backend, rates in drives:
            counters = backend.counters()
            totals = {name: float(getattr(counters, name)) for name in _OF_EACH}
            if rates is not None:
                totals |= {"drive_read_gbps": rates.read_gbps, "drive_write_gbps": rates.write_gbps}
            found[directory] = totals
        return found

    def rates(self) -> tuple[float, float, float]:
        """Return GB/s of all drives for reads, for writes, and for both at once; 0 if unknown."""
        known = [c for c in self._calibrations if c is not None]
        if len(known) < len(self._calibrations):
            return 0.0, 0.0, 0.0
        return (
            sum(c.read_gbps for c in known),
            sum(c.write_gbps for c in known),
            sum(c.mixed_gbps for c in known),
        )

    def size_bytes(self) -> int:
        """Return the total size of the file systems in bytes; 0 if it is not known."""
        return sum(map(probe.size_bytes, self.directories))

    def close(self) -> None:
        """Close the backends, except one that the user passed in."""
        if self._options.backend is None:
            with ExitStack() as closing:  # an error in one backend does not skip the others
                for backend in self.untraced_backends:
                    closing.callback(backend.close)

    def calibrate(self, state_bytes: int) -> None:
        """Measure the drives that have not been measured, if a state of this size is worth it."""
        for index, directory in enumerate(self.directories):
            if self._calibrations[index] is None and index < len(self.untraced_backends):
                self._calibrations[index] = find_calibration(
                    self.untraced_backends[index], directory, self._options, state_bytes
                )


def new_backend(options: Options, device: torch.device | None) -> Backend:
    """Return a backend for host memory, and for device memory if state may be on a device."""
    if options.placement == "device" or (options.placement == "auto" and _may_hold_state(device)):
        from gds.kvikio import KvikioBackend  # needs a driver and libraries that few machines have

        number = device.index if device is not None else None
        try:
            return KvikioBackend(memory="host", device=number, direct=options.drives.direct)
        except RefusedError as error:
            if options.placement == "device":
                raise
            logging.getLogger("offload").info("state is updated on the CPU: %s", error)
    return PosixBackend(direct=options.drives.direct)


def _may_hold_state(device: torch.device | None) -> bool:
    """Return whether state might be placed on a device, judged without use of the device."""
    if device is None or device.type not in COMPUTES:
        return False
    if importlib.util.find_spec("cupy") is None:
        logging.getLogger("offload").info(
            "state is updated on the CPU: without cupy it cannot be in device memory (%s)", REMEDY
        )
        return False
    return True


def proportional_shares(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return small whole numbers in nearly the same proportion as bandwidths, each at least 1."""
    if min(speeds) <= 0:
        raise ValueError(f"speeds must be positive, got {list(speeds)}")
    total = sum(speeds)
    # Uses the first sum for which no share is off by more than a twentieth, or else the best sum.
    best = math.inf, (1,) * len(speeds)
    for parts in range(len(speeds), max(_MAX_SUM, len(speeds)) + 1):
        shares = tuple(max(1, round(speed * parts / total)) for speed in speeds)
        error = max(
            abs(share / sum(shares) * total / speed - 1)
            for share, speed in zip(shares, speeds, strict=True)
        )
        if error < best[0]:
            best = error, shares
        if error <= 0.05:
            break
    divisor = math.gcd(*best[1])
    return tuple(share // divisor for share in best[1])


MIN_STATE_BYTES = 1 << 30
"""State size from which a calibration is worth the second or two that it takes."""

DEFAULT_RING_CHUNKS = 6
_DEFAULT_THREADS = 3
_UPDATE_CHUNKS = 2
"""Frames in the ring beyond those in flight to the drive, so that the drive stays busy while chunks
are updated."""


def find_calibration(
    backend: Backend, directory: str, options: Options, state_bytes: int
) -> Calibration | None:
    """Return the calibration of a directory, measuring it if the state is large enough.

    A backend that the user passed in is not tuned, so its directory is not measured.
    """
    if options.backend is not None or not isinstance(backend, PosixBackend):
        return None
    path = f"{directory}/{CALIBRATION_NAME}"
    found = load_calibration(path)
    if found is None and options.drives.calibrate and state_bytes >= MIN_STATE_BYTES:
        try:
            started = time.perf_counter()
            found = calibrate(directory)
            seconds = time.perf_counter() - started
            log_event(f"{directory}: {_measured(found, seconds, state_bytes)}")
            save_calibration(path, found)
        except (OSError, MemoryError) as error:
            # The defaults work as well, only slower. A broken drive will raise an error soon.
            logging.getLogger("offload").warning("%s was not calibrated: %s", directory, error)
    return None if found is None or found.reason else found


def _measured(found: Calibration, seconds: float, state_bytes: int) -> str:
    """Return what a calibration has found, for the log."""
    if found.reason:
        return f"not calibrated: {found.reason}"
    return (
        f"calibrated in {duration(seconds)} for {size(state_bytes)} of state: "
        f"reads {rate(found.read_gbps * 1e9)}, writes {rate(found.write_gbps * 1e9)}, "
        f"both at once {rate(found.mixed_gbps * 1e9)}"
    )


def apply_calibration(
    backend: Backend, options: Options, calibration: Calibration | None, frame_bytes: int
) -> int:
    """Set a backend's threads and request size; return the number of ring chunks.

    Options of the user take precedence over measured values.
    """
    if isinstance(backend, PosixBackend) and options.backend is None:
        asked, found = options.drives, calibration
        backend.tune(
            read_threads=asked.threads or (found.read_threads if found else _DEFAULT_THREADS),
            write_threads=asked.threads or (found.write_threads if found else _DEFAULT_THREADS),
            request_bytes=asked.request_bytes or (found.request_bytes if found else None),
        )
    if options.ring_chunks is not None:
        return options.ring_chunks
    if calibration is None:
        return DEFAULT_RING_CHUNKS
    return calibration.ring_chunks(frame_bytes) + _UPDATE_CHUNKS
