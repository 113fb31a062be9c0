"""Runs the examples as people do: to the end, and killed and run again.

Run as a program, because a process that has imported everything once can fork children which have
nothing to import: importing Lightning takes longer than all that they do.

    python -m tests.integrations.example_runs EXAMPLE DIRECTORY KILL_AT ARGUMENT...

Prints one JSON object: what the uninterrupted run printed, what the one that was killed had
printed, and what it printed when it was run again.
"""

from __future__ import annotations

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


def main() -> None:
    example, directory, kill_at, *arguments = sys.argv[1:]
    if "lightning" in Path(example).name:
        import lightning.pytorch  # noqa: F401  (once, for all children)
    whole = [f"--directory={directory}/whole", *arguments]
    parts = [f"--directory={directory}/parts", *arguments]
    lines = {
        "whole": run(example, whole),
        "killed": run(example, parts, kill_at=f"step {kill_at} "),
        "again": run(example, parts),
    }
    print(json.dumps(lines))


def run(example: str, arguments: list[str], *, kill_at: str | None = None) -> list[str]:
    """Return the lines that a process prints which runs an example.

    Args:
        example: Path of the script.
        arguments: Its own.
        kill_at: It is killed when it has printed a line that begins so.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        become(example, arguments, write)
    os.close(write)
    lines = []
    with open(read) as output:
        for line in output:
            lines.append(line.rstrip("\n"))
            if kill_at is not None and line.startswith(kill_at):
                os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != (0 if kill_at is None else -signal.SIGKILL):
        raise RuntimeError(f"{example} {arguments} ended with {status}")
    return lines


def become(example: str, arguments: list[str], output: int) -> NoReturn:
    """Run the example in this forked process, which ends with it."""
    status = 1
    try:
        os.dup2(output, 1)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # Lightning has advice on loaders and directories
        sys.argv = [example, *arguments]
        runpy.run_path(example, run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:  # noqa: BLE001  (it is the end of this process)
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
