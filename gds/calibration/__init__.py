"""Which threads and request size suit a directory: measured, chosen, and kept beside the data.

This wing may know `backends`, `probe`, `contract` and `errors`.
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
