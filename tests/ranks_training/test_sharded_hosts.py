"""FSDP2 over several hosts: each rank has its shard of the model on its own host.

The hosts are directories of one machine, as in `test_hosts`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import offload
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_hosts import ROUND, names, on, run_all


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_shards_over_hosts_have_the_bits_of_one_host(
    jobs: Jobs, tmp_path: Path, hosts: str
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    begin, again = [*ROUND, *ROUND], [["restore"], *ROUND]
    size = len(hosts)
    run_all(jobs, one, [[["open"], *begin]] * size, kind="fsdp2")
    expected = run_all(jobs, one, [[["open"], *again]] * size, kind="fsdp2")
    run_all(jobs, several, [[*on(host), *begin] for host in hosts], kind="fsdp2")
    found = run_all(jobs, several, [[*on(host), *again] for host in hosts], kind="fsdp2")
    assert [rank.of("restore")["value"] for rank in found] == [
        [2, {"step": 2, "rank": number}] for number in range(size)
    ]
    bits = [rank.of("step")["value"] for rank in found]
    assert bits == [rank.of("step")["value"] for rank in expected]
    assert names(several) == sorted(
        [f"{host}/owner-{rank}" for rank, host in enumerate(hosts) if rank]
        + ["a/step-00000002", "a/step-00000003"]
    )
    with offload.open_checkpoint(several / "a", parts=[several / "b"]) as checkpoint:
        report = checkpoint.verify()
        assert (report.ok, report.not_seen) == (True, ())
