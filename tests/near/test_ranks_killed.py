"""One of two clients, or of their servers, is killed in a step or a seal: all resume one step.

It is not older than any that a rank was told of, and the bits are those of training in memory.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.limits import SHORT_AGREEMENT_S
from tests.near.proxy import Fate, Proxy, Way
from tests.near.ranks import BLOB, SETTING, WHEN, WHO, killed, opened, plain, run
from tests.near.servers import Server
from tests.ranks_training.cases import Calls, durable, of_each
from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("who", WHO)
def test_they_resume_one_step_with_its_bits(
    jobs: Jobs, servers: list[Server], tmp_path: Path, who: str, when: str
) -> None:
    run = f"{who}-{when}".replace(" ", "-")
    killed(jobs, servers, tmp_path / run, who, when, seed=run)


def test_a_checkpoint_that_one_server_alone_has_is_withdrawn(
    jobs: Jobs, servers: list[Server], urls: list[str], tmp_path: Path
) -> None:
    proxy = Proxy(servers[1].socket)
    name = urls[1].rpartition("/")[2]

    def lose(_: Way, kind: int) -> Fate:
        """End the server when it is about to be told of its second checkpoint."""
        if kind != BLOB or not (servers[1].runs / name / "step-00000001").exists():
            return "pass"
        servers[1].kill()
        return "cut"

    proxy.rule = lose
    calls: Calls = [["step"], ["checkpoint"], ["result"], ["step"], ["checkpoint"], ["result"]]
    ranks = jobs.run(tmp_path, opened([urls[0], proxy.url(name)], calls), **SETTING)
    proxy.close()
    servers[1].start()
    assert [rank.failed() for rank in ranks] == [["SealError"]] * 2
    kept = [{path.name for path in (one.runs / name).glob("step-*")} for one in servers]
    assert kept == [{"step-00000001", "step-00000002"}, {"step-00000001"}]
    again = run(jobs, tmp_path, opened(urls, [["restore"], ["step"]]))
    assert of_each(again, "restore") == [[1, {"step": 1, "rank": rank}] for rank in range(2)]
    assert of_each(again, "step") == [bits[1] for bits in plain(jobs, tmp_path, 2)]
    for server in servers:
        assert [path.name for path in (server.runs / name).glob("step-*")] == ["step-00000001"]


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
