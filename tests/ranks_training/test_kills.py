"""Ranks that are killed, stopped or told to end, and what others do to ranks that train.

All ranks resume one step, with its bits, and no acknowledged one is lost.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.limits import AGREEMENT_S
from tests.ranks_training.cases import (
    BEGIN,
    ROUND,
    Calls,
    durable,
    of_each,
    run_all,
    values,
)
from tests.ranks_training.rank_server import Job, Jobs, Rank

_AGAIN_S = 3.0
"""Seconds after which a signal is sent once more."""


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
    calls: Calls = [["open"], ["restore", {"verify": True}], ["bits"], *ROUND, ["verify"]]
    again = run_all(jobs, folder, [calls] * len(ranks), kind=kind)
    (step,) = {step for step, _ in of_each(again, "restore")}
    assert [state["rank"] for _, state in of_each(again, "restore")] == [*range(len(ranks))]
    assert step >= durable(ranks)
    assert of_each(again, "verify") == [[]] * len(ranks)
    in_memory: Calls = [["open"], ["step", step], ["step"]]
    plain = run_all(jobs, folder / "plain", [in_memory] * len(ranks), kind=kind, is_plain=True)
    assert of_each(again, "bits") == [values(rank, "step")[0] for rank in plain]
    assert of_each(again, "step") == of_each(plain, "step")


def training(jobs: Jobs, folder: Path, kind: str) -> Job:
    """Return two ranks that train and have sealed something."""
    calls: Calls = [*BEGIN, ["train", 100_000, 1]]
    job = jobs.start(folder, [calls] * 2, kind=kind, group_timeout_s=AGREEMENT_S)
    for rank in range(2):
        job.until(rank, len(BEGIN) + 2)
    return job


@pytest.mark.parametrize(("kind", "victim"), [("ddp", 0), ("fsdp2", 1)])
def test_a_rank_is_killed(jobs: Jobs, tmp_path: Path, kind: str, victim: int) -> None:
    job = training(jobs, tmp_path, kind)
    time.sleep(random.Random(f"{kind} {victim}").uniform(0, 0.3))
    job.kill(victim)
    ranks = job.wait()
    assert ranks[victim].status == -signal.SIGKILL
    assert ranks[1 - victim].has_come_to_its_end, ranks[1 - victim].errors
    assert ranks[1 - victim].of("train")["error"], "it went on as if nothing had happened"
    require_goes_on(jobs, tmp_path, kind, ranks)


def test_an_interrupt_ends_one_rank_and_the_other_raises_in_time(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = training(jobs, tmp_path, "ddp")
    end(job.pids[1], signal.SIGINT)
    ranks = job.wait()
    assert [rank.status for rank in ranks] == [0, -signal.SIGINT]
    assert ranks[0].of("train")["error"]
    require_goes_on(jobs, tmp_path, "ddp", ranks)


def test_a_second_job_is_refused_and_the_first_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.start(tmp_path, [[*BEGIN, ["await_file", "go"], *ROUND]] * 2)
    for rank in range(2):
        first.until(rank, len(BEGIN))
    for refused in jobs.run(tmp_path, [[["open"]], [["open"]], [["open"]]]):
        assert "another process is writing to this store" in refused.of("open")["message"]
    (tmp_path / "go").touch()
    ranks = first.wait()
    assert [rank.failed() for rank in ranks] == [[], []]
    require_goes_on(jobs, tmp_path, "ddp", ranks)


def test_no_part_is_written_again_while_the_rename_of_a_stopped_rank_may_still_come(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The others are in doubt, and write nothing; all ranks resume one step, with its bits.

    The key-value store is in another process than the one that is stopped for longer than the
    limit, as with torchrun; a campaign has the other place as well.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stop = ["at_step", "seal: rename run/.slot-N", "stop"]
    first: Calls = [*BEGIN, ["step"], stop, *ROUND[1:]]
    other: Calls = [*BEGIN, ["step"], *ROUND[1:], ["checkpoint"]]
    job = jobs.start(tmp_path, [first, other], kind="fsdp2", store_port=store.port)
    job.until(1, len(other))
    assert len(job.outcomes(0)) < len(first), "rank 0 was not stopped"
    os.kill(job.pids[0], signal.SIGCONT)
    ranks = job.wait()
    assert [rank.status for rank in ranks] == [0, 0], [rank.outcomes for rank in ranks]
    failed = [one for one in ranks[1].outcomes if one["error"]]
    assert [one["call"] for one in failed] == ["result", "checkpoint"]
    assert {one["error"] for one in failed} == {"InDoubtError"}
    require_goes_on(jobs, tmp_path, "fsdp2", ranks)
    names = [path.name for path in sorted((tmp_path / "run").glob("step-*"))]
    # The rename came, as rank 0 could not know that rank 1 had given up.
    assert names == ["step-00000002", "step-00000003"]
