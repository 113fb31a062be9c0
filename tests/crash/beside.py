"""A process that trains as fast as it can, for whoever reads its store meanwhile.

python -m tests.crash.beside        # serves children, as tests.forking says
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

from offload import DriveTuning
from tests.forking import serve
from tests.stores.training import Model, backward, optimizer_for, options

PLAN = "beside.json"
"""What is to be done: ``keep`` and ``drives``."""

STOP = "stop"
"""The name of a file: as soon as it is there the child ends."""

STARTED = "started"
"""The name of a file: there are checkpoints to look at."""


def store_of(directory: str, drives: int) -> list[str]:
    """Return the directories of the store."""
    return [f"{directory}/run{number}" for number in range(drives)]


def train_until_told(directory: str) -> None:
    """Seal each step; the first one is pinned, and stays."""
    plan = json.loads(Path(directory, PLAN).read_text())
    model = Model()
    drives = plan["drives"]
    tuning = DriveTuning(shares=(1,) * drives, direct=False, calibrate=False)
    settings = options(None, drives=tuning, reader_timeout_s=60.0)
    with optimizer_for(
        model, store_of(directory, drives), settings, keep=plan["keep"]
    ) as optimizer:
        for step in itertools.count(1):
            backward(model, step)
            optimizer.step()
            optimizer.checkpoint({"step": step}).result()
            if step == 1:
                optimizer.pin("first")
            if step == 3:
                Path(directory, STARTED).touch()
            if os.path.exists(f"{directory}/{STOP}"):
                break
    print(json.dumps({"steps": step}))


if __name__ == "__main__":
    serve(globals())
