"""Calibration: measures which threads and request size suit a directory, and stores the result.

This wing may know `backends`, `contract`, `errors`, `probe` and `small_files`.
"""

from gds.calibration.calibration import (
    Calibration,
    Settings,
    calibrate,
    load_calibration,
    save_calibration,
)

__all__ = [
    "Calibration",
    "Settings",
    "calibrate",
    "load_calibration",
    "save_calibration",
]
