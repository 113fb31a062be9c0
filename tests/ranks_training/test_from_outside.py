"""What others do to ranks that train: signals, a second job, and commands on the same store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import offload.cli
from tests.dying import dying
from tests.limits import AGREEMENT_S, UNREACHED_S
from tests.ranks_training.rank_server import Jobs, Rank

BEGIN: list[list[Any]] = [["open"], ["step"], ["checkpoint"], ["result"]]
AGAIN: list[list[Any]] = [["open"], ["restore"], ["step"], ["checkpoint"], ["result"], ["verify"]]

_AGAIN_S = 3.0
"""Seconds after which a signal is sent once more."""

COMMANDS = (["ls"], ["verify"], ["pin", "a"], ["prune", "--keep", "1"], ["show"], ["unpin", "a"])


def main() -> None:
    """Give commands on a store, over and over, until a file is there."""
    store, last = sys.argv[1:]
    while True:
        for name, *words in COMMANDS:
            where = [store, *words] if name != "show" else [store]
            sys.argv[:] = ["offload", name, *where]
            try:
                offload.cli.main()
                status: Any = 0
            except SystemExit as exited:
                status = exited.code or 0
            ended = Path(last).exists()  # from then on, nobody may be training any more
            print("##", name, status, "after the end" if ended else "", flush=True)
        if Path(last).exists():
            return


def end(pid: int, number: signal.Signals) -> None:
    """End a process by a signal. Python loses an interrupt that comes within a finalizer."""
    again_s = 0.0
    while not has_ended(pid):
        if time.monotonic() > again_s:
            os.kill(pid, number)
            again_s = time.monotonic() + _AGAIN_S
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if nobody has asked for its status yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


def require_goes_on(jobs: Jobs, folder: Path, kind: str, ranks: list[Rank]) -> None:
    """Check that all ranks resume one step that is not older than any acknowledged one."""
    durable = [one["value"] for rank in ranks for one in rank.outcomes if one["call"] == "sealed"]
    again = jobs.run(folder, [AGAIN] * len(ranks), kind=kind)
    steps = {rank.of("restore")["value"][0] for rank in again}
    assert len(steps) == 1
    assert steps.pop() >= max(durable, default=1)
    assert all(rank.of("verify")["value"] == [] for rank in again)


@pytest.mark.parametrize(("kind", "number"), [("ddp", signal.SIGINT), ("fsdp2", signal.SIGTERM)])
def test_a_signal_ends_one_rank_and_the_others_raise_in_time(
    jobs: Jobs, tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    calls = [*BEGIN, ["train", 100_000, 1]]
    job = jobs.start(tmp_path, [calls] * 3, kind=kind, group_timeout_s=AGREEMENT_S)
    job.until(1, len(BEGIN) + 2)
    end(job.pids[1], number)
    ranks = job.wait()
    assert [rank.status for rank in ranks] == [0, -number, 0]
    assert [bool(rank.of("train")["error"]) for rank in (ranks[0], ranks[2])] == [True, True]
    require_goes_on(jobs, tmp_path, kind, ranks)


def test_a_second_job_is_refused_and_the_first_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.start(tmp_path, [[*BEGIN, ["await_file", "go"], *BEGIN[1:]]] * 2)
    first.until(0, len(BEGIN))
    first.until(1, len(BEGIN))
    for rank in jobs.run(tmp_path, [[["open"]], [["open"]], [["open"]]]):
        assert "another process is writing to this store" in rank.of("open")["message"]
    (tmp_path / "go").touch()
    ranks = first.wait()
    assert [rank.failed() for rank in ranks] == [[], []]
    require_goes_on(jobs, tmp_path, "ddp", ranks)


def test_commands_beside_ranks_that_train(jobs: Jobs, tmp_path: Path) -> None:
    """Each command answers, and no rank notices."""
    run = str(tmp_path / "run")
    train = [*BEGIN, ["train", 40, 2], ["settle"], ["touch", "done"], ["verify"]]
    job = jobs.start(tmp_path, [train] * 2)
    job.until(0, len(BEGIN))
    script = "from tests.ranks_training.test_from_outside import main; main()"
    command = [sys.executable, "-c", script, run, str(tmp_path / "done")]
    done = subprocess.run(
        dying(command),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=UNREACHED_S,
        check=False,
    )
    ranks = job.wait()
    assert [rank.failed() for rank in ranks] == [[], []], [rank.outcomes for rank in ranks]
    assert all(rank.of("verify")["value"] == [] for rank in ranks)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    said = {tuple(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("##")}
    # No pruning while ranks train; a checkpoint may go while it is listed, pinned or verified.
    assert ("prune", "0") not in said
    answered = {line[:2] for line in said}
    assert {("ls", "0"), ("verify", "0")} <= answered, done.stdout + done.stderr
    require_goes_on(jobs, tmp_path, "ddp", ranks)
