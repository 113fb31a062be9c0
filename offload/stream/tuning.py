"""Tuning of transfers for a drive: a calibration of its directory, kept in the store."""

from __future__ import annotations

import logging
import time

from gds import Backend, PosixBackend
from gds.calibration import Calibration, calibrate, load_calibration, save_calibration
from offload.format.names import CALIBRATION_NAME
from offload.journal import log_event
from offload.options import Options
from offload.units import duration, rate, size

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
