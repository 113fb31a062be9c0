"""Fitting transfers to the drive: a calibration of its directory, kept in the store."""

from __future__ import annotations

import logging

from gds import Backend, PosixBackend
from gds.calibration import Calibration, calibrate, load_calibration, save_calibration
from offload.format.names import CALIBRATION_NAME
from offload.options import Options

MIN_STATE_BYTES = 1 << 30
"""A smaller state is not worth the second or two that a calibration takes."""

DEFAULT_RING_CHUNKS = 6
_DEFAULT_THREADS = 3
_UPDATE_CHUNKS = 2
"""Of the ring, beside those that keep the drive busy: so it stays while others are updated."""


def find_calibration(
    backend: Backend, directory: str, options: Options, state_bytes: int
) -> Calibration | None:
    """Return what is known about a directory, measuring it if the state is large enough.

    Nothing is measured where settings could not be changed: on a backend that was passed in.
    """
    if options.backend is not None or not isinstance(backend, PosixBackend):
        return None
    path = f"{directory}/{CALIBRATION_NAME}"
    found = load_calibration(path)
    if found is None and options.drives.calibrate and state_bytes >= MIN_STATE_BYTES:
        try:
            found = calibrate(directory)
            save_calibration(path, found)
        except (OSError, MemoryError) as error:
            # The defaults serve as well, if more slowly; a drive that is broken shows itself soon.
            logging.getLogger("offload").warning("%s was not calibrated: %s", directory, error)
    return None if found is None or found.reason else found


def apply_calibration(
    backend: Backend, options: Options, calibration: Calibration | None, frame_bytes: int
) -> int:
    """Set a backend's threads and request size, and return how many chunks the ring is to have.

    What the options say goes before what was measured.

    Args:
        backend: Tuned if it can be.
        options: The user's.
        calibration: What was measured; None for the defaults.
        frame_bytes: What one chunk takes in the ring.
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
