"""Find out which threads and request size suit a directory, and remember it beside the data.

The best values differ between a SATA disk, one NVMe drive and four of them, so they are measured:
`calibrate` moves real bytes through a real backend for a second or two. Its result is applied with
``backend.tune(**calibration.settings)`` and saved with `save_calibration`. `load_calibration` finds
it again as long as the data stays on the same device.

``python -m gds.calibration DIRECTORY`` prints the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import errno
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from gds import probe
from gds.backends.names import reporting
from gds.calibration.trials import BOTH, DEFAULT, MIB, UNIT_BYTES, Setting, choose, trials_in
from gds.contract import ALIGNMENT
from gds.errors import StorageError
from gds.small_files import read_small_file, write_small_file

FORMAT_VERSION: Final = 1
"""Version of the format of calibration files."""

_MOST_THREADS: Final = 64
_MOST_REQUEST_BYTES: Final = 1 << 30
_MOST_GBPS: Final = 10_000.0
_MOST_CHARACTERS: Final = 4096
_MOST_RING_CHUNKS: Final = 64

_FILL_SHARE: Final = 0.35
_COMPARE_SHARE: Final = 0.8
_REFUSALS: Final = probe.REFUSALS | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Settings(TypedDict):
    """Keyword arguments of `PosixBackend` and of its method `tune`."""

    read_threads: int
    write_threads: int
    request_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The best settings for a directory, with the measured rates; all values are checked."""

    read_threads: int
    """Number of reads, or parts of reads, to run at once; 1 to 64."""

    write_threads: int
    """Number of writes, or parts of writes, to run at once; 1 to 64."""

    request_bytes: int
    """Largest request to the kernel, in bytes; a multiple of 4096, at most 1 GiB."""

    read_gbps: float
    """Rate of reads alone, in GB/s (1e9 bytes); 0 if nothing was measured."""

    write_gbps: float
    """Rate of overwrites alone, into the drive or its cache and without syncs, in GB/s; 0 if
    nothing was measured."""

    mixed_gbps: float
    """Rate of reads and writes together, with as many bytes read as written at the same time, in
    GB/s; 0 if nothing was measured."""

    filesystem: str
    """Type of the file system, such as ``ext4``."""

    device: str
    """Number of the device, as ``major:minor``."""

    source: str
    """Mounted device or share, such as ``/dev/nvme0n1p1``."""

    measured: str
    """Time of the measurement, as ISO 8601 in UTC."""

    reason: str = ""
    """Reason, for people, why nothing was measured; empty if rates were measured."""

    format_version: int = FORMAT_VERSION
    """Version of the format of the calibration file."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a value that no measurement yields."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Compare names: annotations are strings in this module, and isinstance(True, int).
            if type(value).__name__ != field.type:
                raise ValueError(f"{field.name} must be {field.type}, got {value!r}")
            if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
                raise ValueError(f"{field.name} has {len(value)} characters, too many for a name")
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {self.format_version}, not {FORMAT_VERSION}")
        for name in ("read_threads", "write_threads"):
            if not 1 <= getattr(self, name) <= _MOST_THREADS:
                raise ValueError(f"{name} is {getattr(self, name)}, not 1 to {_MOST_THREADS}")
        if not 1 <= self.request_bytes <= _MOST_REQUEST_BYTES or self.request_bytes % ALIGNMENT:
            raise ValueError(
                f"request_bytes is {self.request_bytes}, not a multiple of {ALIGNMENT} up to "
                f"{_MOST_REQUEST_BYTES}"
            )
        for name in ("read_gbps", "write_gbps", "mixed_gbps"):
            rate = getattr(self, name)
            if not (rate == 0 if self.reason else 0 < rate <= _MOST_GBPS):
                raise ValueError(f"{name} is {rate}, which cannot be the rate of a drive")
        dt.datetime.fromisoformat(self.measured)

    @property
    def settings(self) -> Settings:
        """The arguments for `PosixBackend.tune`."""
        return {
            "read_threads": self.read_threads,
            "write_threads": self.write_threads,
            "request_bytes": self.request_bytes,
        }

    @property
    def depth_bytes(self) -> int:
        """Bytes that should be in flight in each direction to keep all threads busy."""
        return max(self.read_threads, self.write_threads) * self.request_bytes

    def ring_chunks(self, chunk_bytes: int) -> int:
        """Return the number of chunks that a ring needs to keep the drive busy; at most 64.

        The ring holds `depth_bytes` that are being read, as many that are being written, one chunk
        that is being updated, and one chunk that is being handed over.

        The size of a chunk is that of all arrays together.
        """
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
        return min(2 + 2 * -(-self.depth_bytes // chunk_bytes), _MOST_RING_CHUNKS)


def calibrate(directory: str, *, budget_s: float = 1.5, file_bytes: int = 256 * MIB) -> Calibration:
    """Measure which setting suits a directory; takes about `budget_s`, and 128 MiB of memory.

    The function writes and reads a scratch file with direct I/O, in short bursts. So the rates are
    those of a drive that is not yet busy, and other users of the drive affect them. If this is not
    possible (files in memory, no direct I/O, or less than four times `file_bytes` free), the result
    has the default settings, no rates, and a `reason`.

    Args:
        directory: Existing directory on the device to measure. Nothing is left in it.
        budget_s: Time of the measurement, in seconds. A slow drive gets fewer trials and a smaller
            file. The function may take longer by the duration of one request.
        file_bytes: Length of the scratch file in bytes, at least 16 MiB.

    Raises:
        StorageError: `directory` is not a directory, or its device fails.
        ValueError: `budget_s` or `file_bytes` is out of range.
    """
    if not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s must be positive, got {budget_s}")
    if file_bytes < 4 * UNIT_BYTES:
        raise ValueError(f"file_bytes must be at least {4 * UNIT_BYTES}, got {file_bytes}")
    started_s = time.perf_counter()
    with reporting("calibrate", directory):
        refusal = _refusal(directory, file_bytes)
        if refusal:
            return _described(directory, DEFAULT, reason=refusal)
    try:
        with trials_in(directory, file_bytes, _FILL_SHARE * budget_s) as trials:
            if trials.half_bytes == 0:
                speed = f"{trials.bytes_per_s / 1e6:.1f} MB/s"
                reason = (
                    f"writes reach {speed}, which is too slow to compare settings within "
                    f"{budget_s} s"
                )
                return _described(directory, DEFAULT, reason=reason)
            rounds = trials.compare(started_s + _COMPARE_SHARE * budget_s)
            chosen = choose(rounds) if rounds else DEFAULT
            share_s = (1 - _COMPARE_SHARE) * budget_s / 3
            read, write, mixed = (
                trials.rate(chosen, directions, share_s)
                for directions in (BOTH[:1], BOTH[1:], BOTH)
            )
    except StorageError as error:
        if error.errno not in _REFUSALS:
            raise
        return _described(directory, DEFAULT, reason=str(error)[:_MOST_CHARACTERS])
    return _described(directory, chosen, rates=(read, write, mixed))


def save_calibration(path: str, calibration: Calibration) -> None:
    """Write a calibration to a file, as a whole or not at all.

    A calibration with a `reason` is not written. The file is not synced: after a crash it may be
    missing or damaged, and then the directory is measured again.

    Raises:
        StorageError: The file could not be written.
    """
    if calibration.reason:
        return  # the obstacle may be gone the next time
    data = json.dumps(dataclasses.asdict(calibration), indent=2).encode() + b"\n"
    write_small_file(path, data, "a calibration")


def load_calibration(path: str) -> Calibration | None:
    """Return the calibration in a file, or None if it is invalid or from another device.

    The calibration must be that of the device that holds the file. The function never raises,
    because the remedy for any damage is to measure again.
    """
    try:
        found = Calibration(**json.loads(read_small_file(path)))
        here = _identity(os.path.dirname(path) or ".")
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    recorded = (found.device, found.source, found.filesystem)
    return found if recorded == here and not found.reason else None


def _identity(directory: str) -> tuple[str, str, str]:
    """Return device number, mount source and type of the file system that holds a directory."""
    number = os.stat(directory).st_dev
    mount = probe.mount_of(directory)
    return f"{os.major(number)}:{os.minor(number)}", mount.source, mount.filesystem


def _refusal(directory: str, file_bytes: int) -> str:
    """Return the reason why a directory cannot be measured; empty if it can."""
    found = probe.direct_io(directory)
    if not found.supported:
        return found.reason
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < 4 * file_bytes:
        return (
            f"only {free_bytes // MIB} MiB are free, less than four times the {file_bytes // MIB} "
            "MiB of a scratch file"
        )
    return ""


def _described(
    directory: str,
    setting: Setting,
    *,
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0),
    reason: str = "",
) -> Calibration:
    """Return a calibration of a directory; `rates` are in bytes per second."""
    device, source, filesystem = _identity(directory)
    read, write, mixed = (float(f"{rate / 1e9:.4g}") for rate in rates)
    return Calibration(
        read_threads=setting.threads,
        write_threads=setting.threads,
        request_bytes=setting.request_bytes,
        read_gbps=read,
        write_gbps=write,
        mixed_gbps=mixed,
        filesystem=filesystem,
        device=device,
        source=source,
        measured=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        reason=reason,
    )


def _for_people(found: Calibration) -> str:
    lines = [
        f"{found.filesystem} on {found.source or 'an unknown source'} ({found.device})",
        f"threads    {found.read_threads} for reads, {found.write_threads} for writes",
        f"requests   {found.request_bytes / MIB:g} MiB",
        f"in flight  {found.depth_bytes / MIB:g} MiB in each direction",
    ]
    if found.reason:
        return "\n".join([*lines, f"These are defaults, nothing was measured: {found.reason}"])
    lines += [
        f"reads      {found.read_gbps:.2f} GB/s",
        f"writes     {found.write_gbps:.2f} GB/s",
        f"mixed      {found.mixed_gbps:.2f} GB/s, half of it reads",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate a directory, print the result, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gds.calibration", description=__doc__)
    parser.add_argument("directory", help="directory to measure; no file is left in it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    try:
        found = calibrate(parsed.directory)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    as_json: dict[str, Any] = {**dataclasses.asdict(found), "depth_bytes": found.depth_bytes}
    sys.stdout.write((json.dumps(as_json, indent=2) if parsed.json else _for_people(found)) + "\n")
    return 0
