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
from offload.errors import CheckpointError
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
    ranks = jobs.run(folder, calls)
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.errors for rank in ranks]
    assert all(rank.of("open")["error"] for rank in ranks), [rank.outcomes for rank in ranks]
    return [rank.of("open")["message"] for rank in ranks]


def names(folder: Path) -> list[str]:
    """Return the owners and checkpoints in all directories of a test."""
    found = [*folder.glob("*/owner-*"), *folder.glob("*/step-*")]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.parametrize(("hosts", "kind"), [("ab", "ddp"), ("abb", "ddp"), ("aabb", "hybrid")])
def test_replicas_on_several_hosts_have_the_bits_of_one(
    jobs: Jobs, tmp_path: Path, hosts: str, kind: str
) -> None:
    """A hybrid shards within each host, and replicates over the hosts."""
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    begin, again = [*ROUND, *ROUND], [["restore"], *ROUND]
    size = len(hosts)
    run_all(jobs, one, [[["open"], *begin]] * size, kind=kind)
    expected = run_all(jobs, one, [[["open"], *again]] * size, kind=kind)
    run_all(jobs, several, [[*on(host), *begin] for host in hosts], kind=kind)
    found = run_all(jobs, several, [[*on(host), *again] for host in hosts], kind=kind)
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


def test_ranks_that_have_changed_hosts_take_the_shares_that_are_there(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The writer is then not rank 0; each rank gets its own train state all the same."""
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    run_all(jobs, one, [[["open"], *ROUND]] * 2)
    expected = run_all(jobs, one, [[["open"], ["restore"], *ROUND, *ROUND]] * 2)
    run_all(jobs, several, [[*on(host), *ROUND] for host in "ab"])
    calls = [[*on(host), ["restore"], *ROUND, *ROUND] for host in "ba"]
    found = run_all(jobs, several, calls)
    assert [rank.of("restore")["value"] for rank in found] == [
        [1, {"step": 1, "rank": number}] for number in range(2)
    ]
    bits = [rank.of("step")["value"] for rank in found]
    assert bits == [rank.of("step")["value"] for rank in expected]
    assert names(several) == ["a/step-00000002", "a/step-00000003", "b/owner-1"]
    with offload.open_checkpoint(several / "a", parts=[several / "b"]) as checkpoint:
        assert checkpoint.verify().ok
        assert checkpoint.train_states == [{"step": 3, "rank": rank} for rank in range(2)]
    run_all(jobs, several, [[*on(host), ["restore"], *ROUND] for host in "ab"])


def test_a_host_that_is_missing_is_one_error_that_says_who_lacks_what(
    jobs: Jobs, tmp_path: Path
) -> None:
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ab"])
    before = names(tmp_path)
    for hosts in ("aa", "ac", "ca"):
        for message in refused(jobs, tmp_path, [on(host) for host in hosts]):
            assert "has parts of owner 1, and no rank sees them" in message
            assert f"rank {hosts.index('a')} on a sees the first directory" in message
            if "c" in hosts:
                assert f"rank {hosts.index('c')} on c sees nothing" in message
    for hosts in ("bb", "cb"):
        for message in refused(jobs, tmp_path, [on(host) for host in hosts]):
            assert "no rank sees the first directory of store" in message
            assert "rank 1 on b sees owner 1" in message
    assert names(tmp_path) == before
    found = run_all(jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "ab"])
    assert [rank.of("result")["value"] for rank in found] == [2, 2]


def test_what_runs_without_a_checkpoint_have_left_on_hosts_is_no_copy(
    jobs: Jobs, tmp_path: Path
) -> None:
    run_all(jobs, tmp_path, [on(host) for host in "ab"])
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ba"])
    assert names(tmp_path) == ["a/owner-1", "b/owner-1", "b/step-00000001"]
    found = run_all(jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "ba"])
    assert [rank.of("result")["value"] for rank in found] == [2, 2]
    found = run_all(jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "ab"])
    assert [rank.of("result")["value"] for rank in found] == [3, 3]


def test_hosts_with_several_drives_and_calls_besides_training(jobs: Jobs, tmp_path: Path) -> None:
    """Pins, an older checkpoint, other train states for the same step, and a fresh start."""
    calls = [
        *[*ROUND, *ROUND],
        ["pin", "best"],
        ["unpin", "best"],
        ["checkpoint", {"train_state": {"other": 1}}],
        ["result"],
        ["restore", 1, {"discard_newer": True}],
        *ROUND,
    ]
    directories = {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    hosts = "aabb"
    run_all(jobs, tmp_path, [[*on(host, *directories[host]), *calls] for host in hosts])
    assert names(tmp_path) == [
        "a0/step-00000001",
        "a0/step-00000002",
        "a1/owner-1",
        "b0/owner-2",
        "b1/owner-3",
    ]
    again = [["restore"], *ROUND]
    swapped = [[*on(host, *directories[host][::-1]), *again] for host in hosts]
    found = run_all(jobs, tmp_path, swapped)
    assert [rank.of("result")["value"] for rank in found] == [3] * 4
    fresh = [[*on(host, *directories[host], fresh=True), *ROUND] for host in hosts]
    run_all(jobs, tmp_path, fresh)
    assert "a0/step-00000001" in names(tmp_path)


@pytest.mark.parametrize(
    ("victim", "kind", "text"),
    [
        (1, "write_bytes", "b/owner-1/part-2/table.json"),
        (0, "rename", "step-"),
        (0, "sync_dir", "a"),
    ],
)
def test_a_rank_is_killed_and_the_hosts_resume_the_newest_durable_checkpoint(
    jobs: Jobs, tmp_path: Path, victim: int, kind: str, text: str
) -> None:
    begun = [*ROUND, ["kill_at", kind, text, 2], ["train", 9, 1]]
    calls = [
        on(host) + [one for one in begun if rank == victim or one[0] != "kill_at"]
        for rank, host in enumerate("ab")
    ]
    ranks = jobs.run(tmp_path, calls)
    assert ranks[victim].status == -9
    assert ranks[1 - victim].has_come_to_its_end, ranks[1 - victim].errors
    durable = [one["value"] for rank in ranks for one in rank.outcomes if one["call"] == "sealed"]
    found = run_all(jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "ab"])
    steps = {rank.of("restore")["value"][0] for rank in found}
    assert len(steps) == 1
    assert steps.pop() >= max(durable, default=1)
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        assert checkpoint.verify().ok


def test_a_damaged_part_on_another_host_costs_that_checkpoint_only(
    jobs: Jobs, tmp_path: Path
) -> None:
    run_all(jobs, tmp_path, [[*on(host), *ROUND, *ROUND] for host in "ab"])
    newest = max((tmp_path / "b/owner-1").glob("part-*"), key=lambda path: path.stat().st_mtime)
    next(newest.glob("*exp_avg.safetensors")).unlink()
    for rank in run_all(jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "ab"]):
        assert rank.of("restore")["value"][0] == 1
        assert rank.of("result")["value"] == 2


def test_each_host_says_which_parts_it_sees(jobs: Jobs, tmp_path: Path) -> None:
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ab"])
    part = str(tmp_path / "b/owner-1/part-1")
    (info,) = offload.list_checkpoints(tmp_path / "a", parts=[])
    assert (info.valid, info.not_seen) == (True, (part,))
    with offload.open_checkpoint(tmp_path / "a", parts=[]) as checkpoint:
        report = checkpoint.verify()
        assert (report.ok, report.not_seen) == (True, (part,))
    for look in (offload.list_checkpoints, offload.open_checkpoint):
        with pytest.raises(CheckpointError, match=r"owner-1/part-1 of generation 1\).*look there"):
            look(tmp_path / "b")


def test_a_fresh_start_on_more_ranks_than_the_store_has_owners(jobs: Jobs, tmp_path: Path) -> None:
    """The old checkpoint has no part of the rank that is new."""
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ab"])
    found = run_all(jobs, tmp_path, [[*on(host, fresh=True), *ROUND, *ROUND] for host in "abb"])
    assert [rank.of("result")["value"] for rank in found] == [2] * 3
    found = run_all(jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "abb"])
    assert [rank.of("restore")["value"][0] for rank in found] == [2] * 3


def test_the_space_of_frozen_parameters_is_a_warning_of_the_writer_alone(
    jobs: Jobs, tmp_path: Path
) -> None:
    freeze = ["do", "tests.ranks_training.far_calls:freeze_most"]
    found = run_all(jobs, tmp_path, [[freeze, *on(host), *ROUND] for host in "aab"])
    said = [rank.of("checkpoint")["warnings"] for rank in found]
    assert [len(warnings) for warnings in said] == [1, 0, 0], said
    assert "of frozen parameters and buffers" in said[0][0]
    assert str(tmp_path / "a") in said[0][0]


def test_a_host_without_the_checkpoints_never_shows_a_train_state_of_before(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Its checkpoints are known anew after each `pin`; a step is sealed again all the same."""
    look = ["do", "tests.ranks_training.far_calls:sealed_train_state"]
    generation = ["do", "tests.ranks_training.far_calls:generation"]
    other = ["checkpoint", {"train_state": {"other": 1}}]
    calls = [
        *[*ROUND, ["restore"], generation],
        *[other, look, ["pin", "best"], other, ["result"], generation],
        ["restore"],
    ]
    near, far = run_all(jobs, tmp_path, [[*on(host), *calls] for host in "ab"])
    for rank in (near, far):
        looked = [one["value"] for one in rank.outcomes if one["call"] == "do"]
        assert looked[0] == looked[2], "the same step was stored again"
        assert looked[1] == {"other": 1} if rank is near else "has not been sent here" in looked[1]
        assert rank.of("restore")["value"] == [1, {"other": 1}]
