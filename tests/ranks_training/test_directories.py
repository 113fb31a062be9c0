"""Ranks of one host whose parts are on several drives, or in memory: found, or an error on all."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload
from gds import probe
from tests.ranks_training.cases import (
    ROUND,
    Calls,
    Case,
    do,
    errors,
    in_memory,
    names,
    of_each,
    opened,
    refused,
    require_success,
    run_all,
    run_cases,
    values,
)
from tests.ranks_training.rank_server import Jobs

OPEN = opened("a", "b")
OTHER_ORDER = opened("b", "a")


def test_owners_are_dealt_over_the_drives_and_the_bits_are_those_of_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The order of the list says nothing of where a store is."""
    cases: dict[str, Case] = {}
    for kind in ("ddp", "fsdp2"):
        for name, first, then in (("one", ["open"], ["open"]), ("several", OPEN, OTHER_ORDER)):
            cases[f"{name}-{kind}"] = ([[first, *ROUND]] * 3, {"kind": kind})
            cases[f"{name}-{kind}/again"] = ([[then, ["restore"], *ROUND]] * 3, {"kind": kind})
    played = run_cases(jobs, tmp_path, cases)
    for ranks in played.values():
        require_success(ranks)
    for kind in ("ddp", "fsdp2"):
        found = played[f"several-{kind}/again"]
        assert of_each(found, "restore") == [[1, {"step": 1, "rank": n}] for n in range(3)]
        assert of_each(found, "step") == of_each(played[f"one-{kind}/again"], "step")
        several = tmp_path / f"several-{kind}"
        assert names(several) == ["a/owner-2", "a/step-00000001", "a/step-00000002", "b/owner-1"]
        with offload.open_checkpoint(several / "a") as checkpoint:
            assert checkpoint.step == 2
            assert checkpoint.verify().ok
            assert [Path(part.path).parts[-3] for part in checkpoint.owners] == ["b", "a"]


LOST = [("a", False), ("a", True), ("b", False), ("b", True)]
"""Drives that are missing, or mounted and empty."""


def test_drives_that_change_places_or_are_lost_or_damaged(jobs: Jobs, tmp_path: Path) -> None:
    """Every part is found by what is in it; what no rank sees is one error, and no new store."""
    cases: dict[str, Case] = {
        "changed": ([[OPEN, *ROUND]] * 2, {}),
        "damaged": ([[OPEN, *ROUND, *ROUND]] * 2, {}),
        "fresh": ([[OPEN, *ROUND]] * 2, {}),
        "fresh/again": ([[opened("b", "a", fresh=True), *ROUND]] * 2, {}),
        "no checkpoint": ([[OPEN]] * 2, {}),
        "no checkpoint/again": ([[OTHER_ORDER, *ROUND]] * 2, {}),
        **{f"lost {lost}": ([[OPEN, *ROUND]] * 2, {}) for lost in LOST},
    }
    for ranks in run_cases(jobs, tmp_path, cases).values():
        require_success(ranks)
    assert names(tmp_path / "fresh") == ["a/step-00000001", "b/owner-1"], "owners stay"
    nothing = tmp_path / "no checkpoint"
    assert names(nothing) == ["a/owner-1", "b/owner-1", "b/step-00000001"]
    changed = tmp_path / "changed"
    for source, target in ("ac", "ba", "cb"):
        (changed / source).rename(changed / target)
    part = max((tmp_path / "damaged/b/owner-1").glob("part-*"), key=lambda p: p.stat().st_mtime)
    next(part.glob("*exp_avg.safetensors")).unlink()
    cases, before = {}, {}
    for lost, is_mounted in LOST:
        folder = tmp_path / f"lost {(lost, is_mounted)}"
        (folder / lost).rename(folder / "elsewhere")
        if is_mounted:
            (folder / lost).mkdir()
        before[folder] = names(folder)
        cases[folder.name] = ([[OPEN, OTHER_ORDER]] * 2, {})
    for name, ranks in run_cases(jobs, tmp_path, cases).items():
        missing = "the first directory" if "'a'" in name else "parts of owner 1"
        for rank in ranks:
            messages = [one["message"] for one in errors(rank)]
            assert len(messages) == 2, name
            assert all(missing in said and "no rank sees" in said for said in messages), name
    for (lost, _), folder in zip(LOST, before, strict=True):
        assert names(folder) == before[folder]
        shutil.rmtree(folder / lost, ignore_errors=True)
        (folder / "elsewhere").rename(folder / lost)
    again: Calls = [OPEN, ["restore"], *ROUND]
    there = ["changed", "damaged", "fresh", "no checkpoint", *[folder.name for folder in before]]
    for name, ranks in run_cases(jobs, tmp_path, {n: ([again] * 2, {}) for n in there}).items():
        require_success(ranks)
        assert [step for step, _ in of_each(ranks, "restore")] == [1, 1], name
    assert not [*(nothing / "b/owner-1").glob("part-*")], "what was left is no copy"
    assert names(changed) == ["a/owner-1", "b/step-00000001", "b/step-00000002"]
    with offload.open_checkpoint(changed / "b", parts=[changed / "a"]) as checkpoint:
        assert checkpoint.verify().ok


def test_what_does_not_belong_to_the_store_is_refused_and_left_alone(
    jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.txt").touch()
    lists: Calls = [opened("e", "f"), opened("e", "f")]
    other: Calls = [opened("e", "g"), opened("e")]
    first, second = run_cases(jobs, tmp_path, {"": ([[OPEN, *lists], [OPEN, *other]], {})})[""]
    for rank in (first, second):
        files, elsewhere, number = (one["message"] for one in errors(rank))
        assert "holds other files: 'thesis.txt'" in files
        assert "is not the directory of rank 0" in elsewhere
        assert "was given 1 directories and rank 0 2" in number
    (tmp_path / "b/thesis.txt").unlink()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["b"]
    begun: Calls = [OPEN, *ROUND, ["close"], opened("c", "d"), *ROUND, ["close"]]
    run_all(jobs, tmp_path, [begun] * 2)
    shutil.copytree(tmp_path / "b", tmp_path / "e")
    shutil.copytree(tmp_path / "a", tmp_path / "f")
    wrong = {
        ("a", "d"): "sees parts of several stores",
        ("a", "c"): "sees parts of several stores",
        ("a", "b", "e"): "2 copies of the directory of owner 1",
        ("a", "b", "f"): "2 copies of the first directory",
    }
    calls: Calls = [*[opened(*drives) for drives in wrong], OPEN, ["restore"], *ROUND]
    for rank in run_cases(jobs, tmp_path, {"": ([calls] * 2, {})})[""]:
        messages = [one["message"] for one in errors(rank)]
        assert [s in m for s, m in zip(wrong.values(), messages, strict=True)] == [True] * 4
        assert rank.of("restore")["value"][0] == 1


def test_a_stopped_rank_of_an_earlier_job_keeps_its_part(jobs: Jobs, tmp_path: Path) -> None:
    """A new job says who holds what, and writes nothing there; when it is gone, all resume."""
    stays = [OPEN, *ROUND, ["await_file", "never"]]
    job = jobs.start(tmp_path, [stays, stays])
    for rank in range(2):
        job.until(rank, len(stays) - 1)
    os.kill(job.pids[1], signal.SIGSTOP)
    job.kill(0)
    try:
        for message in refused(jobs, tmp_path, [[OPEN], [OPEN]]):
            assert "another process is writing" in message
            assert str(tmp_path / "b/owner-1") in message
    finally:
        job.kill(1)
    assert [rank.status for rank in job.wait()] == [-9, -9]
    again = run_all(jobs, tmp_path, [[OPEN, ["restore"], *ROUND]] * 2)
    assert [step for step, _ in of_each(again, "restore")] == [1, 1]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory."""
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)
    except OSError as error:
        pytest.skip(f"no writable /dev/shm: {error}")


def test_a_memory_directory_that_one_rank_cannot_use_is_refused_by_all(
    jobs: Jobs, tmp_path: Path, shm: Path
) -> None:
    """Then they go on with the same bits; several ranks must say how much each of them takes."""
    if probe.mount_of(str(tmp_path)).filesystem in probe.MEMORY_FILESYSTEMS:
        pytest.skip(f"{tmp_path} is memory")
    store = tmp_path / "store"
    store.mkdir()
    good, bad, unsized = (
        do("odd_calls:open_in_memory", str(path), size)
        for path, size in ((shm, 1 << 20), (tmp_path, 1 << 20), (shm, None))
    )
    then = [good, ["step"], ["step"], do("odd_calls:kept_bytes"), *ROUND[1:], ["verify"]]
    cases: dict[str, Case] = {}
    for kind in ("ddp", "fsdp2"):
        cases[kind] = ([[good, *then], [bad, *then]], {"kind": kind})
        cases[f"memory-{kind}"] = in_memory(2, kind=kind)
    cases["unsized"] = ([[unsized]] * 2, {})
    played = run_cases(jobs, store, cases)
    for kind in ("ddp", "fsdp2"):
        for number, rank in enumerate(played[kind]):
            (failed,) = errors(rank)
            assert failed is rank.outcomes[0]
            assert failed["error"] == ("RefusedError" if number else "RanksError")
            assert "whose files are not memory" in failed["message"]
            assert ("rank 1" in failed["message"]) == (number == 0)
            assert values(rank, "do")[-1] > 0
            assert rank.of("verify")["value"] == []
        assert of_each(played[kind], "step") == of_each(played[f"memory-{kind}"], "step")
    for rank in played["unsized"]:
        assert "2 ranks take memory" in rank.outcomes[0]["message"]
