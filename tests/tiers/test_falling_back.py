"""Copies that are not whole any more: an older one is restored by name, and pruning keeps it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import offload
from offload.errors import DamagedError
from offload.tiers import list_tier, prune_tier, pull, push
from tests.command_line import Run
from tests.ranks_training.rank_server import Jobs
from tests.stores.small import train
from tests.tiers import rank_jobs
from tests.tiers.copies import change, new_in, wait_for_uploads, whole
from tests.tiers.rank_jobs import Sent, case

STATE = "state/exp_avg.000000"


@pytest.fixture
def sent(store: Path, s3: str) -> str:
    """URL of a tier with the checkpoints of steps 2 and 3."""
    for number in (2, 3):
        push(store / f"step-0000000{number}", s3)
    return s3


def go_on(store: Path, tier: str) -> tuple[int, str]:
    """Restore and take a step, as often as a job would; return the step restored, and warnings."""
    with warnings.catch_warnings(record=True) as caught, new_in(store, tier) as optimizer:
        warnings.simplefilter("always")
        for _ in range(2):
            restored = optimizer.restore()
            assert restored is not None
            try:
                train(optimizer, 1)
            except DamagedError:
                continue
            wait_for_uploads(optimizer)
            return restored.step, "\n".join(str(one.message) for one in caught)
    raise AssertionError("the state of no copy has arrived")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model.safetensors", "last"), ("manifest.json", "middle"),
        ("train_state.safetensors", "short"), (STATE, "last"), (STATE, "missing"),
        ("COMPLETE.json", "middle"), ("COMPLETE.json", "missing"),
    ],
)  # fmt: skip
def test_the_copy_before_a_damaged_one_is_restored_by_name(
    sent: str, tmp_path: Path, name: str, how: str
) -> None:
    older, newest = list_tier(sent)
    change(sent, name, how)
    step, said = go_on(tmp_path / "new", sent)
    assert step == 2
    if (name, how) == ("COMPLETE.json", "missing"):
        return  # which is an upload that has not ended
    assert newest.url in said
    assert f"Restoring the copy before it, {older.url}" in said
    # The history that begins now is told apart from the copy that is damaged.
    with new_in(tmp_path / "third", sent) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 3
        optimizer.synchronize()
    assert [copy.identity.generation for copy in list_tier(sent)][-1] > newest.identity.generation


def test_a_job_that_is_started_again_does_not_begin_with_the_damaged_state(
    sent: str, tmp_path: Path
) -> None:
    """Else each start ends at the first step, in which the state arrives."""
    change(sent, STATE, "middle")
    optimizer = new_in(tmp_path / "new", sent)
    assert optimizer.restore() is not None
    with pytest.raises(DamagedError):
        train(optimizer, 1)
    with pytest.raises(DamagedError):
        optimizer.close()
    step, said = go_on(tmp_path / "new", sent)
    assert step == 2
    assert "Restoring the copy before it" in said


@pytest.mark.filterwarnings("ignore:.*Restoring the copy before it:RuntimeWarning")
def test_if_no_copy_is_whole_all_of_them_are_named(sent: str, tmp_path: Path) -> None:
    copies = list_tier(sent)
    change(copies[0].url, "train_state.safetensors", "last")
    change(sent, STATE, "missing")
    with new_in(tmp_path / "new", sent) as optimizer:
        for _ in range(2):
            with pytest.raises(
                DamagedError, match="no copy of a checkpoint here is whole"
            ) as error:
                optimizer.restore()
            assert all(copy.url in str(error.value) for copy in copies)


@pytest.mark.parametrize("name", ["model.safetensors", "owner-1/table.json"])
def test_ranks_restore_the_copy_before_a_damaged_one(
    jobs: Jobs, tmp_path: Path, s3: str, origin: Sent, name: str
) -> None:
    origin.into(s3, "replicas", 2)
    change(s3, name, "middle")
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    assert [rank["resumed"] for rank in found] == [1, 1]


@pytest.mark.parametrize(
    ("how", "verify"), [("missing", False), ("short", False), ("middle", False), ("middle", True)]
)
def test_pruning_does_not_remove_the_only_whole_copy(
    sent: str, tmp_path: Path, how: str, verify: bool
) -> None:
    *_, newest = list_tier(sent)
    change(sent, STATE, how)
    dry = prune_tier(sent, offload.LastK(1), verify=verify, dry_run=True)
    report = prune_tier(sent, offload.LastK(1), verify=verify)
    assert report == dry
    if how == "middle" and not verify:  # only reading tells
        assert report.kept[0].url == newest.url
        return
    assert [copy.marker and copy.marker.step for copy in report.kept] == [2]
    assert [copy.url for copy in report.left_alone] == [newest.url]
    said = "exp_avg" if how == "middle" else "The copy before it is that of --step 2"
    with pytest.raises(DamagedError, match=said):
        pull(sent, tmp_path / "damaged")
    assert pull(sent, tmp_path / "back", step=2).step == 2
    report = prune_tier(sent, offload.LastK(1), verify=verify, unfinished=True)
    assert [copy.url for copy in report.unfinished] == [newest.url]
    assert whole(sent) == [True]


def test_a_copy_that_is_not_whole_stays_if_there_is_no_other(
    store: Path, s3: str, run: Run
) -> None:
    push(store, s3)
    change(s3, STATE, "missing")
    status, out, _ = run("prune", s3, "--keep", "1", "--unfinished", "--verify")
    assert status == 0
    assert "left alone: not whole any more: state/exp_avg.000000: missing" in out
    assert "kept: none" in out
    assert "not whole" in run("ls", s3)[1]
