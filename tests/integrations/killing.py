"""Forks children that train with the Trainer, and that kill themselves where they are told.

Run as a program, because its parent process must be one that is safe to fork.

    python -m tests.integrations.killing DIRECTORY

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from offload.integrations.transformers import latest_checkpoint
from tests.dying import let_forks_die
from tests.integrations.training import Case


class KillAfter(TrainerCallback):
    """Kills its process when a step has been taken."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_within_save(step: int) -> None:
    """Kill this process when everything of a folder is written but the Trainer's own state."""
    save = TrainerState.save_to_json

    def saving(state: TrainerState, path: str) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, path)

    TrainerState.save_to_json = saving


def train(root: Path, life: int) -> dict[str, Any]:
    callbacks = [KillAfter(4)] if life == 0 else []
    if life == 1:
        kill_within_save(6)
    folder = latest_checkpoint(root / "out", root / "run")
    told = {"resumed": folder and Path(folder).name}
    (root / f"life-{life}.json").write_text(json.dumps(told))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Case({"gradient_accumulation_steps": 2}).run(root, *callbacks, resume=folder)
    given_up = [
        str(w.message).rpartition(": ")[2] for w in caught if "are withdrawn" in str(w.message)
    ]
    return {**told, "history": run.history, "given_up": given_up}


def live(root: Path, life: int) -> bool:
    """Let a child train; returns whether it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            (root / f"life-{life}.json").write_text(json.dumps(train(root, life)))
            status = 0
        except BaseException:  # noqa: BLE001  (a fork must not run its parent's code)
            traceback.print_exc()
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return False
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    raise RuntimeError(f"a child failed with status {status}")


def main() -> None:
    let_forks_die()
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    root.mkdir(parents=True)
    names = ["after step 4", "within the save of step 6", "at the end"]
    killed = [name for life, name in enumerate(names) if live(root, life)]
    told = [json.loads((root / f"life-{life}.json").read_text()) for life in range(3)]
    result = {
        "killed": killed,
        "resumed": [life["resumed"] for life in told],
        "given_up": [life.get("given_up", []) for life in told],
        "history": told[-1]["history"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
