"""Ranks of one host whose parts are on several drives: found again, or an error on all ranks."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.rank_server import Jobs, Rank

LIST = ["a", "b"]


def opened(*directories: str, **how: Any) -> list[Any]:
    return ["open", {"directory": list(directories or LIST), **how}]


def begin(*directories: str) -> list[Any]:
    return [opened(*directories), ["step"], ["checkpoint"], ["result"]]


def again(*directories: str) -> list[Any]:
    return [opened(*directories), ["restore"], ["step"], ["checkpoint"], ["result"]]


def run_all(jobs: Jobs, folder: Path, calls: list[Any], size: int = 2, **case: Any) -> list[Rank]:
    """Run the same calls on all ranks; all must succeed."""
    ranks = jobs.run(folder, [calls] * size, **case)
    assert [rank.failed() for rank in ranks] == [[]] * size, [
        (one["call"], one["message"]) for rank in ranks for one in rank.outcomes if one["error"]
    ]
    assert [rank.status for rank in ranks] == [0] * size, [rank.errors for rank in ranks]
    return ranks


def refused(jobs: Jobs, folder: Path, *calls: list[Any], **case: Any) -> list[str]:
    """Let ranks open a store, which must fail on all of them in time; return the messages."""
    ranks = jobs.run(folder, [[one] for one in calls], **case)
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.errors for rank in ranks]
    assert all(rank.failed() for rank in ranks), [rank.outcomes for rank in ranks]
    return [rank.of("open")["message"] for rank in ranks]


def names(folder: Path) -> list[str]:
    """Return the owners and checkpoints in all directories of a test."""
    found = [*folder.glob("*/owner-*"), *folder.glob("*/step-*")]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_owners_are_dealt_over_the_drives_and_the_bits_are_those_of_one(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    run_all(jobs, one, [["open"], *begin()[1:]], 3, kind=kind)
    expected = run_all(jobs, one, [["open"], *again()[1:]], 3, kind=kind)
    run_all(jobs, several, begin(), 3, kind=kind)
    assert names(several) == ["a/owner-2", "a/step-00000001", "b/owner-1"]
    # The order of the list says nothing of where a store is.
    found = run_all(jobs, several, again("b", "a"), 3, kind=kind)
    assert [rank.of("restore")["value"] for rank in found] == [
        [1, {"step": 1, "rank": number}] for number in range(3)
    ]
    bits = [rank.of("step")["value"] for rank in found]
    assert bits == [rank.of("step")["value"] for rank in expected]
    assert names(several) == ["a/owner-2", "a/step-00000001", "a/step-00000002", "b/owner-1"]
    with offload.open_checkpoint(several / "a") as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.verify().ok
        assert [Path(part.path).parts[-3] for part in checkpoint.owners] == ["b", "a"]


def test_each_directory_is_measured_by_one_rank_and_no_two_at_a_time(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Rank 3 reads what rank 1 has measured in the directory that both have."""
    measure = ["do", "tests.ranks_training.drive_calls:measure_drives"]
    run_all(jobs, tmp_path, [measure, *begin()], 4)
    assert (tmp_path / "measured").read_text() == "0 a\n1 b\n"
    run_all(jobs, tmp_path, [measure, *again("b", "a")], 4)
    assert (tmp_path / "measured").read_text() == "0 a\n1 b\n"


def test_drives_that_have_changed_their_places_are_found_by_what_is_on_them(
    jobs: Jobs, tmp_path: Path
) -> None:
    run_all(jobs, tmp_path, begin())
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "c").rename(tmp_path / "b")
    found = run_all(jobs, tmp_path, again())
    assert [rank.of("result")["value"] for rank in found] == [2, 2]
    assert names(tmp_path) == ["a/owner-1", "b/step-00000001", "b/step-00000002"]
    with offload.open_checkpoint(tmp_path / "b", parts=[tmp_path / "a"]) as checkpoint:
        assert checkpoint.verify().ok


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("is_mounted", [False, True], ids=["missing", "empty"])
def test_a_drive_that_is_empty_or_missing_is_one_named_error_and_no_new_store(
    jobs: Jobs, tmp_path: Path, lost: str, *, is_mounted: bool
) -> None:
    run_all(jobs, tmp_path, begin())
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    if is_mounted:
        (tmp_path / lost).mkdir()
    before = names(tmp_path)
    for order in (LIST, LIST[::-1]):
        for message in refused(jobs, tmp_path, opened(*order), opened(*order)):
            missing = "the first directory" if lost == "a" else "parts of owner 1"
            assert missing in message
            assert "no rank sees" in message
    assert names(tmp_path) == before
    shutil.rmtree(tmp_path / lost, ignore_errors=True)
    (tmp_path / "elsewhere").rename(tmp_path / lost)
    run_all(jobs, tmp_path, again())


def test_what_does_not_belong_to_the_store_is_refused_and_left_alone(
    jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.txt").touch()
    for message in refused(jobs, tmp_path, opened(), opened()):
        assert "holds other files: 'thesis.txt'" in message
    (tmp_path / "b/thesis.txt").unlink()
    for message in refused(jobs, tmp_path, opened(), opened("a", "c")):
        assert "is not the directory of rank 0" in message
    for message in refused(jobs, tmp_path, opened(), opened("a")):
        assert "was given 1 directories and rank 0 2" in message
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["b"]
    run_all(jobs, tmp_path, begin())
    run_all(jobs, tmp_path, begin("c", "d"))
    for message in refused(jobs, tmp_path, opened("a", "d"), opened("a", "d")):
        assert "sees parts of several stores" in message
    for message in refused(jobs, tmp_path, opened("a", "c"), opened("a", "c")):
        assert "sees parts of several stores" in message
    shutil.copytree(tmp_path / "b", tmp_path / "e")
    for message in refused(jobs, tmp_path, opened("a", "b", "e"), opened("a", "b", "e")):
        assert "2 copies of the directory of owner 1" in message
    shutil.copytree(tmp_path / "a", tmp_path / "f")
    for message in refused(jobs, tmp_path, opened("a", "b", "f"), opened("a", "b", "f")):
        assert "2 copies of the first directory" in message
    run_all(jobs, tmp_path, again())


def test_what_a_run_without_a_checkpoint_has_left_is_no_copy(jobs: Jobs, tmp_path: Path) -> None:
    run_all(jobs, tmp_path, [opened()])
    assert names(tmp_path) == ["b/owner-1"]
    run_all(jobs, tmp_path, begin("b", "a"))
    assert names(tmp_path) == ["a/owner-1", "b/owner-1", "b/step-00000001"]
    run_all(jobs, tmp_path, again())
    assert not [*(tmp_path / "b/owner-1").glob("part-*")]


def test_a_fresh_start_keeps_the_owners_where_they_are(jobs: Jobs, tmp_path: Path) -> None:
    run_all(jobs, tmp_path, begin())
    calls = [opened("b", "a", fresh=True), *begin()[1:]]
    run_all(jobs, tmp_path, calls)
    assert names(tmp_path) == ["a/step-00000001", "b/owner-1"]


def test_a_damaged_part_on_another_drive_costs_that_checkpoint_only(
    jobs: Jobs, tmp_path: Path
) -> None:
    run_all(jobs, tmp_path, begin())
    run_all(jobs, tmp_path, again())
    newest = max((tmp_path / "b/owner-1").glob("part-*"), key=lambda path: path.stat().st_mtime)
    next(newest.glob("*exp_avg.safetensors")).unlink()
    for rank in run_all(jobs, tmp_path, again()):
        assert rank.of("restore")["value"][0] == 1
        assert rank.of("result")["value"] == 2


def test_a_drive_of_another_store_of_one_process_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    run_all(jobs, tmp_path, begin(), 1, kind="one")
    for message in refused(jobs, tmp_path, opened("c", "b"), opened("c", "b")):
        assert "number 2 of" in message
    run_all(jobs, tmp_path, again(), 1, kind="one")


def test_ranks_with_several_drives_go_on_from_one_process_with_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Its store is the first directory; other drives get their parts with the first step."""
    run_all(jobs, tmp_path, begin("a"), 1, kind="one")
    for rank in run_all(jobs, tmp_path, again()):
        assert rank.of("restore")["value"][0] == 1
    assert (tmp_path / "b" / "owner-1").is_dir()
    for rank in run_all(jobs, tmp_path, again()):
        assert rank.of("restore")["value"][0] == 2


def test_parts_of_former_owners_are_removed_from_all_drives(jobs: Jobs, tmp_path: Path) -> None:
    """Checkpoints of four ranks stay until retention withdraws them; then their parts go."""
    run_all(jobs, tmp_path, begin(), 4)
    assert [*(tmp_path / "b/owner-3").glob("part-*")]
    run_all(jobs, tmp_path, again(), 2)
    with offload.open_checkpoint(tmp_path / "a" / "step-00000001", parts=[tmp_path / "b"]) as one:
        assert one.verify().ok
    run_all(jobs, tmp_path, [*again(), *[["step"], ["checkpoint"], ["result"]] * 2], 2)
    parts = [*tmp_path.glob("*/owner-*/part-*")]
    assert {str(path.parent.relative_to(tmp_path)) for path in parts} == {"b/owner-1"}
    run_all(jobs, tmp_path, again(), 3)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_of_an_earlier_job_keeps_its_part(
    jobs: Jobs, tmp_path: Path, stopped: int
) -> None:
    """A new job says who holds what, and writes nothing there; when it is gone, all resume."""
    stays = [*begin(), ["await_file", "never"]]
    job = jobs.start(tmp_path, [stays, stays])
    for rank in range(2):
        job.until(rank, len(begin()))
    os.kill(job.pids[stopped], signal.SIGSTOP)
    job.kill(1 - stopped)
    try:
        for message in refused(jobs, tmp_path, opened(), opened()):
            assert "another process is writing" in message
            assert str(tmp_path / ("a" if stopped == 0 else "b/owner-1")) in message
    finally:
        job.kill(stopped)
    assert [rank.status for rank in job.wait()] == [-9, -9]
    for rank in run_all(jobs, tmp_path, again()):
        assert rank.of("restore")["value"][0] == 1


@pytest.mark.parametrize(
    ("victim", "kind", "text"),
    [
        (1, "sync", "b/owner-1/"),
        (1, "write_bytes", "b/owner-1/part-2/table.json"),
        (0, "rename", "step-"),
        (0, "sync_dir", "a"),
    ],
)
def test_a_rank_is_killed_and_all_resume_the_newest_durable_checkpoint(
    jobs: Jobs, tmp_path: Path, victim: int, kind: str, text: str
) -> None:
    begun = [*begin(), ["kill_at", kind, text, 2], ["train", 9, 1]]
    calls = [[one for one in begun if rank == victim or one[0] != "kill_at"] for rank in range(2)]
    ranks = jobs.run(tmp_path, calls)
    assert ranks[victim].status == -9
    assert ranks[1 - victim].has_come_to_its_end, ranks[1 - victim].errors
    durable = [one["value"] for rank in ranks for one in rank.outcomes if one["call"] == "sealed"]
    found = run_all(jobs, tmp_path, again("b", "a"))
    steps = {rank.of("restore")["value"][0] for rank in found}
    assert len(steps) == 1
    assert steps.pop() >= max(durable, default=1)
    with offload.open_checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.verify().ok
