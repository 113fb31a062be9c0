"""Processes that want to write to a store in which another one trains.

python -m tests.crash.second_writers      # serves them, as tests.forking says
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Final

from offload import DriveTuning
from offload.errors import OffloadError
from tests.forking import serve
from tests.stores.training import Model, backward, optimizer_for, options

SHARES: Final = (1, 1)
STEPS: Final = 4


def directories(directory: str) -> list[str]:
    """Return those of the store that is meant: ``run``, and ``other`` where that is there."""
    found = [f"{directory}/run", f"{directory}/other"]
    return [path for path in found if path.endswith("run") or os.path.isdir(path)]


def train_as_well(directory: str) -> None:
    """Train in the store with other gradients, if it can be opened; say what became of it."""
    store, model = directories(directory), Model()
    changes = {"drives": DriveTuning(shares=SHARES)} if len(store) > 1 else {}
    try:
        optimizer = optimizer_for(model, store, options(**changes))
        found = optimizer.restore()
        first = found.step + 1 if found else 1
        for step in range(first, first + STEPS):
            backward(model, step, history=7)
            optimizer.step()
            optimizer.checkpoint({"by": "the second"}).result()
        optimizer.close()
    except OffloadError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print(f"trained to step {step}")


def start_below_new_directories(directory: str) -> None:
    """Wait for others to be ready as well, then open a store in a directory of one's own."""
    model = Model()
    Path(f"{directory}/ready-{os.getpid()}").touch()
    while not os.path.exists(f"{directory}/go"):
        time.sleep(0.0005)
    optimizer_for(model, f"{directory}/new/runs/{os.getpid()}", options()).close()
    print("opened")


def lock_as_before(directory: str) -> None:
    """Lock the store as versions did that knew of LOCK only, and wait to be killed."""
    fd = os.open(f"{directory}/run/LOCK", os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        answer = "refused"
    else:
        answer = "locked"
    Path(f"{directory}/announcements").write_text(answer)  # a fifo: waits for its reader
    signal.pause()


if __name__ == "__main__":
    serve(globals())
