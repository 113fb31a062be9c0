"""Processes of a library's training, forked from one that has imported the library.

Importing a library takes longer than all that a small training does. The program of a library is a
module with `run`, which each rank calls with the arguments of the job.

    python -m tests.integrations.rank_jobs tests.integrations.rank_accelerate   # serves jobs
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
import traceback
import warnings
from pathlib import Path
from typing import Any, Final

import offload
from tests.dying import dying, let_forks_die
from tests.limits import AGREEMENT_S

OPTIONS: Final = {"chunk_bytes": 4096, "drives": offload.DriveTuning(calibrate=False),
                  "agreement_timeout_s": AGREEMENT_S}  # fmt: skip
"""Settings of `offload.Options` of the ranks."""

TIMEOUT_S: Final = 120.0
"""For a job, which takes seconds: what takes so long hangs, and is killed."""


class RankJobs:
    """The tests' side of the server.

    Args:
        program: Module with ``run``.
    """

    def __init__(self, program: str) -> None:
        self._server = subprocess.Popen(
            dying([sys.executable, "-m", "tests.integrations.rank_jobs", program]),
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, root: Path, *, num_ranks: int = 2, **job: Any) -> list[dict[str, Any]]:
        """Run a job to its end, and return what each rank has said.

        Args:
            root: Directory of the job.
            num_ranks: Number of processes; one is told nothing of ranks.
            job: Arguments of the program's ``run``; and ``of_host``, the ranks on each host.

        Returns:
            For each rank its ``result``, ``error``, ``message`` and ``warnings``. A rank that was
            killed has said nothing.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        root.mkdir(parents=True, exist_ok=True)
        self._server.stdin.write(json.dumps([str(root), num_ranks, job]) + "\n")
        self._server.stdin.flush()
        answer: list[dict[str, Any]] = json.loads(self._server.stdout.readline())
        return answer

    def run(self, root: Path, **job: Any) -> list[Any]:
        """Run a job in which no rank fails, and return the result of each."""
        said = self.ask(root, **job)
        failed = [one.get("trace", "killed") for one in said if "result" not in one]
        assert not failed, "\n\n".join(failed)
        return [one["result"] for one in said]

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


def main() -> None:
    import torch
    import torch._dynamo  # which torch itself imports at an optimizer's first step

    let_forks_die()
    torch.set_num_threads(1)
    program = importlib.import_module(sys.argv[1])
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        root, num_ranks, job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        said = [Path(root, f"said-{rank}.json") for rank in range(num_ranks)]
        pids = []
        for rank, path in enumerate(said):
            path.unlink(missing_ok=True)
            if (pid := os.fork()) == 0:
                _redirect(Path(root, f"output-{rank}"))
                names = {
                    "WORLD_SIZE": num_ranks,
                    "LOCAL_WORLD_SIZE": job.pop("of_host", num_ranks),
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                if num_ranks > 1:
                    os.environ |= {name: str(value) for name, value in names.items()}
                path.write_text(json.dumps(_outcome(program, Path(root), job)))
                os._exit(0)
            pids.append(pid)
        _wait(pids)
        answers = [json.loads(path.read_text()) if path.exists() else {} for path in said]
        print(json.dumps(answers), flush=True)


def _outcome(program: Any, root: Path, job: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = {"result": program.run(root, **job)}
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            outcome = {
                "error": type(error).__name__,
                "message": str(error),
                "trace": traceback.format_exc(),
            }
    return outcome | {"warnings": [str(one.message) for one in caught]}


def whole_sum(parameter: Any) -> float:
    """Return the sum of a parameter, of which this rank may have a shard."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return float(whole.detach().double().sum())


def _redirect(path: Path) -> None:
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _wait(pids: list[int]) -> None:
    """Wait until all of them have ended. Those that hang are killed."""
    deadline = time.monotonic() + TIMEOUT_S
    left = {*pids}
    while left:
        for pid in sorted(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
