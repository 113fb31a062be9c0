"""Runs the examples as people do: to the end, and killed and run again.

Run as a program, because a process that has imported everything once can fork children which have
nothing to import: importing Lightning takes longer than all that they do.

    python -m tests.integrations.example_runs DIRECTORY EXAMPLE...

Prints one JSON object: for each example what the uninterrupted run printed, what the one that was
killed had printed, and what it printed when it was run again.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # which torch itself imports at an optimizer's first step

from tests.dying import let_forks_die

ARGUMENTS = {
    "plain_loop.py": ["--steps=12", "--every=4", "--batch=2"],
    "nanogpt_loop.py": ["--steps=12", "--every=4", "--dtype=float16", "--scale=1e7"],
    "lightning_loop.py": ["--epochs=3", "--steps=4"],
}
STEPS, KILLED_AT = 12, 9


def main() -> None:
    let_forks_die()
    directory, *examples = sys.argv[1:]
    if any("lightning" in Path(example).name for example in examples):
        import lightning.pytorch  # noqa: F401  (once, for all children)
    print(json.dumps({example: live_and_die(example, directory) for example in examples}))


def live_and_die(example: str, directory: str) -> dict[str, list[str]]:
    name = Path(example).name
    whole, parts = (
        [f"--directory={directory}/{name}-{run}", *ARGUMENTS[name]] for run in ("whole", "parts")
    )
    return {
        "whole": run(example, whole),
        "killed": run(example, parts, kill_at=f"step {KILLED_AT} "),
        "again": run(example, parts),
    }


def run(example: str, arguments: list[str], *, kill_at: str | None = None) -> list[str]:
    """Return the lines that a process prints which runs an example.

    Args:
        example: Path of the script.
        arguments: Its own.
        kill_at: It is killed in the moment in which it has printed a line that begins so.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        become(example, arguments, Output(write, kill_at))
    os.close(write)
    with open(read) as output:
        lines = output.read().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != (0 if kill_at is None else -signal.SIGKILL):
        raise RuntimeError(f"{example} {arguments} ended with {status}")
    return lines


class Output(io.TextIOBase):
    """What an example prints to."""

    def __init__(self, descriptor: int, kill_at: str | None) -> None:
        self.descriptor = descriptor
        self.kill_at = kill_at
        self.line = ""

    def write(self, text: str) -> int:
        os.write(self.descriptor, text.encode())
        *complete, self.line = (self.line + text).split("\n")
        if self.kill_at is not None and any(line.startswith(self.kill_at) for line in complete):
            os.kill(os.getpid(), signal.SIGKILL)
        return len(text)


def become(example: str, arguments: list[str], output: Output) -> NoReturn:
    """Run the example in this forked process, which ends with it."""
    status = 1
    try:
        sys.stdout = output
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # Lightning has advice on loaders and directories
        sys.argv = [example, *arguments]
        runpy.run_path(example, run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001  (it is the end of this process)
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
