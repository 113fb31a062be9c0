"""Calls of ranks whose drives are measured, for `Calls.do`."""

from __future__ import annotations

import fcntl
import os
import time

from gds.calibration import Calibration
from offload import DriveTuning
from offload.stream import tuning
from tests.ranks_training.calls import Calls


def measure_drives(calls: Calls) -> None:
    """Let any state be worth a calibration, and note which rank measures which directory.

    All directories of a test are on one drive, so measurements at the same time are an error.
    """
    folder = calls.directory.parent

    def calibrate(directory: str) -> Calibration:
        with open(folder / "measuring", "w") as lock, open(folder / "measured", "a") as notes:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.2)  # another rank, which must not measure now, would find the lock held
            notes.write(f"{calls.rank} {os.path.basename(directory)}\n")
        return measured(directory)

    measured = tuning.calibrate
    tuning.calibrate = calibrate
    tuning.MIN_STATE_BYTES = 1
    calls.setting.options |= {"backend": None, "drives": DriveTuning()}
