"""Other ranks on several hosts, which go on if each sees the directories that it needs.

The hosts are directories of one machine, as in `test_hosts`. Gradients are given, so every step has
the bits of one process that was never interrupted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.rank_server import Jobs, Rank
from tests.ranks_training.test_hosts import ROUND, names, on, run_all

SETTING: dict[str, Any] = {
    "kind": "fsdp2",
    "given": True,
    "widths": (8, 16, 4),
    "frozen_elements": 4,
}
"""All sizes are multiples of 4, so two shards of four ranks are one of two ranks."""

AGAIN = [["restore"], *ROUND, ["whole"], ["close"]]
FOUR = [on("a"), on("a"), on("b"), on("bc")]
"""Four ranks on three hosts."""

TWO = [on("a"), on("b", "b", "bc")]
"""Two ranks on two hosts; the drive of the third is mounted on the second."""

MORE = [on("a"), on("a"), on("b", "b", "bc"), on("b", "b", "bc")]
"""Four ranks on these two hosts."""


def expected(jobs: Jobs, folder: Path, last: int, **setting: Any) -> list[Any]:
    """Return what parameters are after each step in memory."""
    folder.mkdir()
    calls = [["open"], ["whole"], *[["step"], ["whole"]] * last]
    (rank,) = run_all(jobs, folder, [calls], **{**SETTING, "kind": "one", **setting}, is_plain=True)
    return [one["value"] for one in rank.outcomes if one["call"] == "whole"]


def go_on(jobs: Jobs, folder: Path, hosts: list[Any], last: int, **setting: Any) -> Any:
    """Let ranks continue, take a step and seal it; return their parameters."""
    calls = [[*host, *AGAIN] for host in hosts]
    ranks = run_all(jobs, folder, calls, **{**SETTING, **setting})
    for rank in ranks:
        assert (rank.of("restore")["value"] or [0])[0] == last - 1
        assert rank.of("result")["value"] == last
        assert rank.of("whole")["value"] == ranks[0].of("whole")["value"]
    return ranks[0].of("whole")["value"]


def verified(first: Path, *parts: Path) -> None:
    with offload.open_checkpoint(first, parts=parts) as checkpoint:
        report = checkpoint.verify()
        assert (report.ok, report.not_seen) == (True, ())


@pytest.mark.parametrize(
    "options",
    [{}, {"master": "split"}, {"state_dtype": "bfloat16"}],
    ids=["exact", "split", "bfloat16"],
)
def test_fewer_ranks_on_fewer_hosts_and_more_again(
    jobs: Jobs, tmp_path: Path, options: dict[str, Any]
) -> None:
    store = tmp_path / "hosts"
    store.mkdir()
    steps = expected(jobs, tmp_path / "plain", 5)
    if options:
        calls = [["open"], *[["step"], ["whole"]] * 5]
        (tmp_path / "one").mkdir()
        setting = {**SETTING, "kind": "one", "options": options}
        (rank,) = run_all(jobs, tmp_path / "one", [calls], **setting)
        steps[1:] = [one["value"] for one in rank.outcomes if one["call"] == "whole"]
    for last, hosts in enumerate([FOUR, TWO, TWO, MORE, TWO], 1):
        assert go_on(jobs, store, hosts, last, options=options) == steps[last], last
        verified(store / "a", store / "b", store / "bc")


def test_more_ranks_on_the_same_hosts(jobs: Jobs, tmp_path: Path) -> None:
    """Shards have the order of the ranks, so owners get new numbers in that order."""
    store = tmp_path / "hosts"
    store.mkdir()
    steps = expected(jobs, tmp_path / "plain", 6)
    two, four = [on("a"), on("b")], [on("a"), on("a"), on("b"), on("b")]
    for last, hosts in enumerate([two, four, four, two, two, four], 1):
        assert go_on(jobs, store, hosts, last) == steps[last], last
    verified(store / "a", store / "b")


def test_parts_that_no_checkpoint_names_are_removed_from_all_hosts(
    jobs: Jobs, tmp_path: Path
) -> None:
    go_on(jobs, tmp_path, FOUR, 1)
    assert names(tmp_path) == ["a/owner-1", "a/step-00000001", "b/owner-2", "bc/owner-3"]
    go_on(jobs, tmp_path, TWO, 2)
    assert [*tmp_path.glob("bc/owner-3/part-*")], "the checkpoint of step 1 needs it"
    verified(tmp_path / "a/step-00000001", tmp_path / "b", tmp_path / "bc")
    calls = [[*host, ["restore"], *ROUND * 3, ["close"]] for host in TWO]
    run_all(jobs, tmp_path, calls, **SETTING)
    left = {path.parent.relative_to(tmp_path) for path in tmp_path.glob("*/owner-*/part-*")}
    assert left == {Path("b/owner-2")}


@pytest.mark.parametrize(("after", "kind"), [(2, "fsdp2"), (3, "ddp"), (4, "fsdp2")])
def test_all_directories_on_one_host(jobs: Jobs, tmp_path: Path, after: int, kind: str) -> None:
    """Any number of ranks and any sharding goes on there; new parts are dealt over the list."""
    store = tmp_path / "hosts"
    store.mkdir()
    steps = expected(jobs, tmp_path / "plain", 3, widths=(5, 7, 3))
    go_on(jobs, store, [on("a"), on("a"), on("b")], 1, widths=(5, 7, 3))
    here = [["open", {"directory": ["a", "b"]}]]
    for last in (2, 3):
        found = go_on(jobs, store, [here] * after, last, widths=(5, 7, 3), kind=kind)
        assert found == steps[last]
    verified(store / "a", store / "b")


def test_a_rank_that_lacks_what_it_needs_is_named_and_nothing_changes(
    jobs: Jobs, tmp_path: Path
) -> None:
    go_on(jobs, tmp_path, FOUR, 1)
    before = contents(tmp_path)
    hosts = [on("a"), on("b", "b", "bc"), on("b", "b", "bc")]
    ranks = jobs.run(tmp_path, [[*host, ["restore"]] for host in hosts], **SETTING)
    for rank in ranks:
        assert rank.of("restore")["error"] == "RanksError", rank.outcomes
        assert "of these" in rank.of("restore")["message"]
        assert "name them in directory=" in rank.of("restore")["message"]
    assert contents(tmp_path) == before
    go_on(jobs, tmp_path, FOUR, 2)


def test_a_frozen_parameter_that_is_out_of_reach_changes_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    """All state is seen. Of five frozen elements, the second of two ranks needs the fourth."""
    setting = {**SETTING, "frozen_elements": 5}
    go_on(jobs, tmp_path, FOUR, 1, frozen_elements=5)
    before = contents(tmp_path)
    calls = [[*host, ["whole"], ["restore"], ["whole"], ["step"], ["close"]] for host in TWO]
    for rank in jobs.run(tmp_path, calls, **setting):
        assert rank.of("restore")["error"] == "RanksError"
        assert (
            "this one needs 'frozen' [3:5,], and its host sees 1 of these 2"
            in rank.of("restore")["message"]
        )
        first, last = (one["value"] for one in rank.outcomes if one["call"] == "whole")
        assert first == last
        assert "restore" in rank.of("step")["message"], "it would begin anew"
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files of checkpoints and parts."""
    return {path: path.read_bytes() for path in folder.rglob("*/*.*") if path.is_file()}


@pytest.mark.parametrize(
    ("victim", "what", "path", "goes_back"),
    [
        (0, "write", "exp_avg.safetensors", False),
        (1, "create", "owner-2", True),
        (1, "sync", "/model/shard", False),
        (0, "rename", "", True),
    ],
)
def test_a_rank_is_killed_while_the_new_cut_is_written(
    jobs: Jobs, tmp_path: Path, victim: int, what: str, path: str, goes_back: bool
) -> None:
    store = tmp_path / "hosts"
    store.mkdir()
    steps = expected(jobs, tmp_path / "plain", 4)
    go_on(jobs, store, FOUR, 1)
    go_on(jobs, store, FOUR, 2)
    calls = [[*host, *AGAIN] for host in TWO]
    calls[victim].insert(3, ["kill_at", what, path])
    ranks: list[Rank] = jobs.run(store, calls, **SETTING)
    assert ranks[victim].status == -9, ranks[victim].outcomes
    first = int(max(p.name for p in store.glob("a/step-*")).removeprefix("step-"))
    assert first in (2, 3), "nothing that was sealed is lost"
    hosts = MORE if goes_back else TWO
    assert go_on(jobs, store, hosts, first + 1) == steps[first + 1]
    verified(store / "a", store / "b", store / "bc")


def test_a_host_that_is_lost_for_good_is_an_error_that_names_its_owner(
    jobs: Jobs, tmp_path: Path
) -> None:
    go_on(jobs, tmp_path, FOUR, 1)
    shutil.rmtree(tmp_path / "bc")
    for rank in jobs.run(tmp_path, [[*on("a")], [*on("b")]], **SETTING):
        assert "owner 3, and no rank sees them" in rank.of("open")["message"]
