"""A server that forks child processes for tests.

Importing torch and making its first optimizer takes seconds, so one process does it once and forks
a child for every request. A child is a process like any other: it ends as Python ends, with its
exit handlers, or by a signal.

A module that defines what its children can do calls `serve` if it is run as a program, which then
reads requests from standard input, a JSON list each.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tests.dying import dying, let_forks_die
from tests.stores.training import Reference

POLL_S: Final = 0.01

TIMEOUT_S: Final = 200.0
"""For a child, which takes a second: what takes so long hangs."""


@dataclass
class Ended:
    """How a child ended, and what it said."""

    status: int | None
    """As `os.waitpid` gives it; None if it had to be killed because it did not end."""

    output: str


class Children:
    """The tests' side: starts the server, and asks it for children.

    Args:
        module: Module that defines what children can do, and calls `serve` if it is run.
    """

    def __init__(self, module: str) -> None:
        self._server = subprocess.Popen(
            dying([sys.executable, "-m", module]),
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, work: Callable[[str], None], directory: Path) -> int:
        """Fork a child that does `work` in a directory; returns its process number."""
        return int(self._ask("start", work.__name__, str(directory)))

    def wait(self, pid: int, directory: Path, timeout_s: float = TIMEOUT_S) -> Ended:
        """Wait for a child to end; kills it if it has not after the timeout."""
        answer = self._ask("wait", pid, timeout_s)
        output = (directory / f"output-{pid}").read_text()
        return Ended(None if answer == "None" else int(answer), output)

    def run(self, work: Callable[[str], None], directory: Path) -> Ended:
        """Fork a child that does `work`, and wait for it."""
        return self.wait(self.start(work, directory), directory)

    def close(self) -> None:
        """End the server."""
        self._server.communicate()

    def _ask(self, *request: object) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline().strip()


def serve(works: Mapping[str, Callable[[str], None]]) -> None:
    """Fork children on request. A child returns from here as well, and ends like any program.

    Args:
        works: What a child can be asked to do, by name.
    """
    let_forks_die()
    torch.set_num_threads(1)
    Reference().after(1)  # the first optimizer of a process imports a second's worth of modules
    # The collection with which Python ends looks only at what a child has made itself. All that
    # was imported before would be a second of it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        match json.loads(line):
            case ["start", name, directory]:
                pid = os.fork()
                if pid == 0:
                    output = os.open(f"{directory}/output-{os.getpid()}", os.O_CREAT | os.O_WRONLY)
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                    warnings.simplefilter("error")
                    works[name](directory)
                    return
                print(pid, flush=True)
            case ["wait", pid, timeout_s]:
                print(_status(pid, timeout_s), flush=True)


def _status(pid: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
