"""Copies that are not whole any more: an older one is restored by name, and pruning keeps it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import offload
from offload.errors import DamagedError
from offload.tiers import TierCopy, list_tier, prune_tier, pull, push, verify_tier
from offload.tiers.services.opening import open_objects
from tests.command_line import Run
from tests.ranks_training.rank_server import Jobs
from tests.stores.small import train
from tests.tiers import rank_jobs
from tests.tiers.test_arriving import optimizer_with
from tests.tiers.test_ranks_restore import case

DAMAGE = [
    (name, change)
    for name in ["model.safetensors", "manifest.json", "train_state.safetensors",
                 "state/exp_avg.000000", "COMPLETE.json"]
    for change in ["flip", "short", "missing"]
]  # fmt: skip


def damage(tier: str, copy: TierCopy, name: str, change: str) -> None:
    """Change an object of a copy."""
    with open_objects(tier) as objects:
        path = f"{copy.folder}/{name}"
        data = bytearray(objects.get(path, 1 << 20))
        data[-4 if name.endswith("safetensors") else len(data) // 2] ^= 1
        if change == "missing":
            objects.delete([path])
        else:
            objects.put(path, bytes(data) if change == "flip" else bytes(data[:-3]))


def go_on(store: Path, tier: str) -> tuple[int, str]:
    """Restore and take a step, as often as a job would; return the step restored, and warnings."""
    with warnings.catch_warnings(record=True) as caught, optimizer_with(store, tier) as optimizer:
        warnings.simplefilter("always")
        for _ in range(2):
            restored = optimizer.restore()
            assert restored is not None
            try:
                train(optimizer, 1)
            except DamagedError:
                continue
            assert optimizer._uploads is not None
            assert optimizer._uploads.wait(60)
            return restored.step, "\n".join(str(one.message) for one in caught)
    raise AssertionError("the state of no copy has arrived")


@pytest.mark.parametrize(("name", "change"), DAMAGE)
def test_the_copy_before_a_damaged_one_is_restored_by_name(
    store: Path, s3: str, tmp_path: Path, name: str, change: str
) -> None:
    push(store / "step-00000002", s3)
    push(store / "step-00000003", s3)
    older, newest = list_tier(s3)
    damage(s3, newest, name, change)
    step, said = go_on(tmp_path / "new", s3)
    assert step == 2
    if (name, change) == ("COMPLETE.json", "missing"):
        return  # which is an upload that has not ended
    assert newest.url in said
    assert f"Restoring the copy before it, {older.url}" in said
    # The history that begins now is told apart from the copy that is damaged.
    with optimizer_with(tmp_path / "third", s3) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 3
        optimizer.synchronize()
    assert [copy.identity.generation for copy in list_tier(s3)][-1] > newest.identity.generation


def test_a_job_that_is_started_again_does_not_begin_with_the_damaged_state(
    store: Path, s3: str, tmp_path: Path
) -> None:
    """Else each start ends at the first step, in which the state arrives."""
    push(store / "step-00000002", s3)
    push(store / "step-00000003", s3)
    damage(s3, list_tier(s3)[1], "state/exp_avg.000000", "flip")
    optimizer = optimizer_with(tmp_path / "new", s3)
    assert optimizer.restore() is not None
    with pytest.raises(DamagedError):
        train(optimizer, 1)
    with pytest.raises(DamagedError):
        optimizer.close()
    step, said = go_on(tmp_path / "new", s3)
    assert step == 2
    assert "Restoring the copy before it" in said


@pytest.mark.filterwarnings("ignore:.*Restoring the copy before it:RuntimeWarning")
def test_if_no_copy_is_whole_all_of_them_are_named(store: Path, s3: str, tmp_path: Path) -> None:
    push(store / "step-00000002", s3)
    push(store / "step-00000003", s3)
    copies = list_tier(s3)
    damage(s3, copies[0], "train_state.safetensors", "flip")
    damage(s3, copies[1], "state/exp_avg.000000", "missing")
    with optimizer_with(tmp_path / "new", s3) as optimizer:
        for _ in range(2):
            with pytest.raises(
                DamagedError, match="no copy of a checkpoint here is whole"
            ) as error:
                optimizer.restore()
            assert all(copy.url in str(error.value) for copy in copies)


@pytest.mark.parametrize("name", ["model.safetensors", "owner-1/table.json"])
def test_ranks_restore_the_copy_before_a_damaged_one(
    jobs: Jobs, tmp_path: Path, s3: str, name: str
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1, 2))
    *_, newest = list_tier(s3)
    damage(s3, newest, name, "flip")
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    assert [rank["resumed"] for rank in found] == [1, 1]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("change", ["missing", "short", "flip"])
def test_pruning_does_not_remove_the_only_whole_copy(
    store: Path, tier: str, tmp_path: Path, change: str, verify: bool
) -> None:
    for number in (1, 2, 3):
        push(store / f"step-0000000{number}", tier)
    *_, newest = list_tier(tier)
    damage(tier, newest, "state/exp_avg.000000", change)
    dry = prune_tier(tier, offload.LastK(1), verify=verify, dry_run=True)
    report = prune_tier(tier, offload.LastK(1), verify=verify)
    assert report == dry
    if change == "flip" and not verify:  # only reading tells
        assert report.kept[0].url == newest.url
        return
    assert [copy.marker and copy.marker.step for copy in report.kept] == [2]
    assert [copy.url for copy in report.left_alone] == [newest.url]
    assert pull(report.kept[0].url, tmp_path / "back").step == 2
    report = prune_tier(tier, offload.LastK(1), verify=verify, unfinished=True)
    assert [copy.url for copy in report.unfinished] == [newest.url]
    assert [one.ok for one in verify_tier(tier)] == [True]


def test_a_copy_that_is_not_whole_stays_if_there_is_no_other(
    store: Path, s3: str, run: Run, tmp_path: Path
) -> None:
    push(store, s3)
    damage(s3, list_tier(s3)[0], "state/exp_avg.000000", "missing")
    status, out, _ = run("prune", s3, "--keep", "1", "--unfinished", "--verify")
    assert status == 0
    assert "left alone: not whole any more: state/exp_avg.000000: missing" in out
    assert "kept: none" in out
    assert "not whole" in run("ls", s3)[1]


def test_pull_says_which_copy_is_whole(store: Path, s3: str, tmp_path: Path) -> None:
    push(store / "step-00000002", s3)
    push(store / "step-00000003", s3)
    damage(s3, list_tier(s3)[1], "state/exp_avg.000000", "short")
    with pytest.raises(DamagedError, match="The copy before it is that of --step 2"):
        pull(s3, tmp_path / "back")
    assert pull(s3, tmp_path / "back", step=2).step == 2
