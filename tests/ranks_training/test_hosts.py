"""Ranks on several hosts, each with drives of its own, which train into one store.

The hosts are directories of one machine; only what a rank says of its own running system is set by
the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.rank_server import Jobs, Rank

ROUND: list[Any] = [["step"], ["checkpoint"], ["result"]]


def on(host: str, *directories: str, **how: Any) -> list[Any]:
    """Return the calls with which a rank on a host opens its directories."""
    return [["host", host], ["open", {"directory": list(directories or [host]), **how}]]


def run_all(jobs: Jobs, folder: Path, calls: Sequence[list[Any]], **case: Any) -> list[Rank]:
    """Run ranks, which must all succeed."""
    ranks = jobs.run(folder, calls, **case)
    failed = [
        (number, one["call"], one["message"])
        for number, rank in enumerate(ranks)
        for one in rank.outcomes
        if one["error"]
    ]
    assert not failed, failed
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.errors for rank in ranks]
    return ranks


def refused(jobs: Jobs, folder: Path, calls: Sequence[list[Any]]) -> list[str]:
    """Let ranks open a store, which must fail on all of them in time; return the messages."""
    ranks = jobs.run(folder, calls, timeout_s=4.0)
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.errors for rank in ranks]
    assert all(rank.of("open")["error"] for rank in ranks), [rank.outcomes for rank in ranks]
    return [rank.of("open")["message"] for rank in ranks]


def names(folder: Path) -> list[str]:
    """Return the owners and checkpoints in all directories of a test."""
    found = [*folder.glob("*/owner-*"), *folder.glob("*/step-*")]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.parametrize("hosts", ["ab", "aab", "abb"])
def test_replicas_on_several_hosts_have_the_bits_of_one(
    jobs: Jobs, tmp_path: Path, hosts: str
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    begin, again = [*ROUND, *ROUND], [["restore"], *ROUND]
    size = len(hosts)
    run_all(jobs, one, [[["open"], *begin]] * size)
    expected = run_all(jobs, one, [[["open"], *again]] * size)
    run_all(jobs, several, [[*on(host), *begin] for host in hosts])
    found = run_all(jobs, several, [[*on(host), *again] for host in hosts])
    assert [rank.of("restore")["value"] for rank in found] == [
        [2, {"step": 2, "rank": number}] for number in range(size)
    ]
    bits = [rank.of("step")["value"] for rank in found]
    assert bits == [rank.of("step")["value"] for rank in expected]
    assert names(several) == sorted(
        [f"{host}/owner-{rank}" for rank, host in enumerate(hosts) if rank]
        + ["a/step-00000002", "a/step-00000003"]
    )
    model = "step-00000003/model.safetensors"
    assert (several / "a" / model).read_bytes()[4096:] == (one / "run" / model).read_bytes()[4096:]
    with offload.open_checkpoint(several / "a", parts=[several / "b"]) as checkpoint:
        assert checkpoint.verify().ok
        assert checkpoint.train_states == [{"step": 3, "rank": rank} for rank in range(size)]
