"""One of two clients, or of their servers, is killed in a step or a seal: all resume one step.

It is not older than any that a rank was told of, and the bits are those of training in memory.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.limits import SHORT_AGREEMENT_S
from tests.near.ranks import SETTING, WHEN, WHO, killed, opened, run
from tests.near.servers import Server
from tests.ranks_training.cases import Calls, durable
from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("who", WHO)
def test_they_resume_one_step_with_its_bits(
    jobs: Jobs, servers: list[Server], tmp_path: Path, who: str, when: str
) -> None:
    run = f"{who}-{when}".replace(" ", "-")
    killed(jobs, servers, tmp_path / run, who, when, seed=run)


def test_a_stopped_server_is_named_on_all_ranks(
    jobs: Jobs, servers: list[Server], tmp_path: Path
) -> None:
    urls = [server.url("stopped") for server in servers]
    begin: Calls = [["step"], ["checkpoint"], ["result"], ["train", 100_000, 1]]
    setting = {**SETTING, "timeout_s": SHORT_AGREEMENT_S}
    job = jobs.start(tmp_path, opened(urls, begin), **setting)
    for rank in range(2):
        job.until(rank, len(begin) + 2)
    servers[1].process.send_signal(signal.SIGSTOP)
    ranks = job.wait()
    servers[1].process.send_signal(signal.SIGCONT)
    for one in ranks:
        assert (
            f"could not hear from the server at {servers[1].socket}" in one.of("train")["message"]
        )
    assert "rank 1" in ranks[0].of("train")["message"]
    again = run(jobs, tmp_path, opened(urls, [["restore"], ["step"]]))
    assert again[0].of("restore")["value"][0] >= durable(ranks)
