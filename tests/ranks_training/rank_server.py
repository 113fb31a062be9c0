"""A server that forks the ranks of jobs, so that torch is imported once and not by every rank.

    python -m tests.ranks_training.rank_server MODULE...   # serves jobs, which `Jobs` asks for

Each rank runs a list of calls, see `tests.ranks_training.calls`, and appends what came of each call
to a file. So a test also knows what a rank had done that was killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.dying import dying, let_forks_die

TIMEOUT_S: Final = 300.0
"""For a job, which takes seconds: a rank that takes so long hangs, and is killed."""

POLL_S: Final = 0.005

_ABORT: Final = "terminate called without an active exception"
"""Last line of a process that torch has aborted at its end; see `tests.kernel.test_endings`."""


@dataclass
class Rank:
    """What became of one rank."""

    status: int | None
    """Exit status, negative for a signal; None if the rank hung and was killed for it."""

    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """For each call that has ended: ``call``, ``value``, ``error`` and ``message``."""

    errors: str = ""
    """Standard error."""

    def of(self, call: str) -> dict[str, Any]:
        """Return the last outcome of a call."""
        return next(one for one in reversed(self.outcomes) if one["call"] == call)

    @property
    def has_come_to_its_end(self) -> bool:
        """Whether the program has ended by itself.

        Torch may abort a process that is about to end, if one of its threads is still at work.
        """
        aborted = self.status == -signal.SIGABRT and self.errors.rstrip().endswith(_ABORT)
        return self.status == 0 or aborted

    def failed(self) -> list[str]:
        """Return the names of the errors of all calls that failed."""
        return [one["error"] for one in self.outcomes if one["error"]]


class Job:
    """Ranks that run."""

    def __init__(self, jobs: Jobs, pids: list[int], folder: Path) -> None:
        self.pids = pids
        self._jobs = jobs
        self._folder = folder

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL. It is not reaped before `wait`, so the pid is still its own."""
        os.kill(self.pids[rank], signal.SIGKILL)

    def outcomes(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has done so far."""
        path = self._folder / f"outcomes-{self.pids[rank]}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, rank: int, num_outcomes: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a rank has made so many calls."""
        deadline = time.monotonic() + timeout_s
        while len(self.outcomes(rank)) < num_outcomes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has only done {self.outcomes(rank)}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[Rank]:
        """Wait until all ranks have ended; one that has not after the timeout is killed."""
        statuses = self._jobs.ask("wait", self.pids, timeout_s)
        return [
            Rank(status, self.outcomes(rank), self._errors(rank))
            for rank, status in enumerate(statuses)
        ]

    def _errors(self, rank: int) -> str:
        path = self._folder / f"errors-{self.pids[rank]}"
        return path.read_text() if path.exists() else ""  # it may have been killed before


class Jobs:
    """The tests' side: starts the server, and asks it for jobs.

    Args:
        modules: Modules that the server imports, so that its ranks have them.
    """

    def __init__(self, *modules: str) -> None:
        self._server = subprocess.Popen(
            dying([sys.executable, "-m", "tests.ranks_training.rank_server", *modules]),
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, calls: Sequence[Sequence[Any]], **case: Any) -> Job:
        """Start a job with one rank for each list of calls.

        Args:
            folder: Folder of the test; the store is ``folder/run``.
            calls: Calls of each rank: lists of a name and arguments.
            case: Fields of `tests.ranks_training.calls.Setting`; or ``program``, the module with
                another ``run_calls``.
        """
        return Job(self, self.ask("start", str(folder), calls, case), folder)

    def run(self, folder: Path, calls: Sequence[Sequence[Any]], **case: Any) -> list[Rank]:
        """Start a job and wait for its end."""
        return self.start(folder, calls, **case).wait()

    def ask(self, *request: Any) -> Any:
        """Send a request to the server, and return its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


def main() -> None:
    """Fork ranks on request. A rank returns from here as well, and ends like any program."""
    import torch

    from tests.ranks_training.calls import warm_up

    let_forks_die()
    torch.set_num_threads(1)
    warm_up()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collection with which Python ends looks only at what a rank has made itself
    for line in sys.stdin:
        match json.loads(line):
            case ["start", folder, calls, setting]:
                with socket.create_server(("127.0.0.1", 0)) as server:
                    port = server.getsockname()[1]
                pids = []
                for rank, own in enumerate(calls):
                    pid = os.fork()
                    if pid == 0:
                        _redirect(folder)
                        os.environ |= {
                            "WORLD_SIZE": str(len(calls)),
                            "RANK": str(rank),
                            "LOCAL_RANK": str(rank),
                            "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port),
                        }
                        program = setting.pop("program", "tests.ranks_training.calls")
                        run_calls = importlib.import_module(program).run_calls
                        run_calls(Path(folder), rank, len(calls), own, setting)
                        return
                    pids.append(pid)
                print(json.dumps(pids), flush=True)
            case ["wait", pids, timeout_s]:
                deadline = time.monotonic() + timeout_s
                print(json.dumps([_status(pid, deadline) for pid in pids]), flush=True)


def _redirect(folder: str) -> None:
    errors = os.open(f"{folder}/errors-{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)


def _status(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    main()
