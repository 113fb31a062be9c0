"""Processes of a library's training, forked from one that has imported the library.

Importing a library takes longer than all that a small training does. The program of a library is a
module with `run`, which each rank calls with the arguments of the job.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch._dynamo  # noqa: F401  (which torch itself imports at an optimizer's first step)

import offload
from tests.limits import AGREEMENT_S
from tests.ranks_training.rank_server import Jobs

OPTIONS: Final = {"chunk_bytes": 4096, "drives": offload.DriveTuning(calibrate=False),
                  "agreement_timeout_s": AGREEMENT_S}  # fmt: skip
"""Settings of `offload.Options` of the ranks."""

TIMEOUT_S: Final = 120.0
"""For a job, which takes seconds: what takes so long hangs, and is killed."""


class RankJobs:
    """Jobs of the program of a library.

    Args:
        jobs: Server that has imported this module and the program.
        program: Module with ``run``.
    """

    def __init__(self, jobs: Jobs, program: str) -> None:
        self._jobs, self._program = jobs, program
        self.printed: list[str] = []
        """What each rank of the last job has printed."""

    def ask(self, root: Path, *, num_ranks: int = 2, **job: Any) -> list[dict[str, Any]]:
        """Run a job to its end, and return what each rank has said.

        Args:
            root: Directory of the job.
            num_ranks: Number of processes; one is told nothing of ranks.
            job: Arguments of the program's ``run``, or of `run_example`; and ``of_host``, the
                ranks on each host.

        Returns:
            For each rank its ``result``, ``error``, ``message`` and ``warnings``. A rank that was
            killed has said nothing.
        """
        root.mkdir(parents=True, exist_ok=True)
        calls = [[job] for _ in range(num_ranks)]
        started = self._jobs.start(root, calls, program=__name__, library=self._program)
        ended = started.wait(TIMEOUT_S)
        self.printed = [rank.errors for rank in ended]
        return [rank.outcomes[-1] if rank.outcomes else {} for rank in ended]

    def run(self, root: Path, **job: Any) -> list[Any]:
        """Run a job in which no rank fails, and return the result of each."""
        said = self.ask(root, **job)
        failed = [one.get("trace", "killed") for one in said if "result" not in one]
        assert not failed, "\n\n".join(failed)
        return [one["result"] for one in said]


def run_calls(
    folder: Path, rank: int, size: int, calls: Sequence[dict[str, Any]], setting: dict[str, str]
) -> None:
    """Run the job of a rank that a server has forked; see `tests.ranks_training.rank_server`."""
    del rank
    (job,) = calls
    os.environ["LOCAL_WORLD_SIZE"] = str(job.pop("of_host", size))
    if size == 1:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR"):
            del os.environ[name]
    run = run_example if "example" in job else importlib.import_module(setting["library"]).run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = {"result": run(folder, **job)}
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            outcome = {
                "error": type(error).__name__,
                "message": str(error),
                "trace": traceback.format_exc(),
            }
    said = outcome | {"warnings": [str(one.message) for one in caught]}
    Path(folder, f"outcomes-{os.getpid()}").write_text(json.dumps(said) + "\n")
    os._exit(0)


def run_example(root: Path, *, example: str, arguments: list[str], kill_after: str = "") -> None:
    """Run a script of `docs/examples`; what it prints is in the file ``output-RANK``.

    Args:
        root: Directory of the job.
        example: Name of the script.
        arguments: Its own.
        kill_after: Beginning of a line; the process is killed as soon as it has printed one.
    """
    del root
    path = str(Path(__file__).parents[2] / "docs/examples" / example)
    sys.stdout = _Output(kill_after)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


class _Output(io.TextIOBase):
    """What an example prints to."""

    def __init__(self, kill_after: str) -> None:
        self._kill_after = kill_after
        self._line = ""

    def write(self, text: str) -> int:
        os.write(1, text.encode())
        *complete, self._line = (self._line + text).split("\n")
        if self._kill_after and any(line.startswith(self._kill_after) for line in complete):
            os.kill(os.getpid(), signal.SIGKILL)
        return len(text)


def whole_sum(parameter: Any) -> float:
    """Return the sum of a parameter, of which this rank may have a shard."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return float(whole.detach().double().sum())
