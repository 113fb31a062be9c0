"""One process and ranks take over from each other what they have in several directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload
from bench._ranks_reshape import Change, KilledRecuts
from tests.limits import AGREEMENT_S
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_reshape import STEPS, expected, job, succeeded
from tests.stores.files import flip_on_disk

THREE = ["a", "b", "c"]


def calls(directories: list[str], *more: Any) -> list[Any]:
    seal = [["step", STEPS], ["checkpoint"], ["result"], ["whole"], ["close"]]
    return [["open", {"directory": directories}], ["restore"], *(more or seal)]


def go_on(
    jobs: Jobs, folder: Path, num: int, kind: str, directories: list[str], **setting: Any
) -> Any:
    """Let ranks continue from the newest checkpoint, step, and seal; return their parameters."""
    ranks = succeeded(job(jobs, folder, num, kind, calls(directories), **setting))
    return ranks[0].of("whole")["value"]


def parts(folder: Path) -> list[str]:
    """Return the parts of one process, and those of owners, in all directories."""
    found = [*folder.glob("*/part-*"), *folder.glob("*/owner-*/part-*")]
    return sorted(str(path.relative_to(folder)) for path in found)


CHAIN = [
    (3, "ddp", ["a", "b", "c"]),
    (1, "one", ["a", "c", "b"]),
    (2, "fsdp2", ["c", "b", "a"]),
]
"""Numbers of ranks, kinds, and directories."""


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}], ids=["exact", "bfloat16"])
def test_a_chain_has_the_bits_of_one_process_that_was_never_interrupted(
    jobs: Jobs, tmp_path: Path, options: dict[str, Any]
) -> None:
    is_plain, last = not options, STEPS * len(CHAIN)
    steps = expected(jobs, tmp_path / "whole", last, is_plain=is_plain, options=options)
    for number, (num, kind, directories) in enumerate(CHAIN):
        found = go_on(jobs, tmp_path, num, kind, directories, options=options)
        assert found == steps[STEPS * (number + 1) - 1], (number, num, kind)
        others = [tmp_path / name for name in directories if name != "a"]
        with offload.open_checkpoint(tmp_path / "a", parts=others) as checkpoint:
            assert checkpoint.verify().ok
            assert checkpoint.step == STEPS * (number + 1)
    assert len([*tmp_path.glob("a/step-*")]) == 2, "an old one stays"


def test_what_nobody_needs_is_removed_on_all_drives(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 2, "fsdp2", ["a", "b"])
    assert parts(tmp_path) == ["b/owner-1/part-1"]
    more = [["step"], ["checkpoint"], ["result"]] * 3
    succeeded(job(jobs, tmp_path, 1, "one", calls(["a", "b"], *more, ["close"])))
    assert all(name.startswith("b/part-") for name in parts(tmp_path))
    assert parts(tmp_path)
    succeeded(job(jobs, tmp_path, 2, "fsdp2", calls(["b", "a"], *more, ["close"])))
    assert all(name.startswith("b/owner-1/") for name in parts(tmp_path))
    go_on(jobs, tmp_path, 1, "one", ["a", "b"])


def test_old_checkpoints_stay_until_a_new_one_is_sealed(jobs: Jobs, tmp_path: Path) -> None:
    """A job that ends after a step, without a checkpoint, has changed nothing that counts."""
    go_on(jobs, tmp_path, 3, "ddp", THREE)
    before = parts(tmp_path)
    step = [["step"], ["whole"]]
    (one,) = succeeded(job(jobs, tmp_path, 1, "one", calls(THREE, *step)))
    assert {*before} <= {*parts(tmp_path)}
    again = succeeded(job(jobs, tmp_path, 3, "ddp", calls(["c", "a", "b"], *step)))
    assert [rank.of("restore")["value"][0] for rank in (one, *again)] == [STEPS] * 4
    assert {str(rank.of("whole")["value"]) for rank in (one, *again)} == {
        str(one.of("whole")["value"])
    }


@pytest.mark.parametrize(("first", "then"), [((2, "ddp"), (1, "one")), ((1, "one"), (2, "ddp"))])
def test_a_full_drive_is_found_before_anything_is_changed(
    jobs: Jobs, tmp_path: Path, first: tuple[int, str], then: tuple[int, str]
) -> None:
    go_on(jobs, tmp_path, *first, ["a", "b"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("[ab]/*/*")}
    full = [["open", {"directory": ["a", "b"]}], ["fill_drive", 4096], ["restore"]]
    for rank in job(jobs, tmp_path, *then, full):
        assert rank.failed() == ["StoreFullError"]
        assert "first step writes a new slot" in rank.of("restore")["message"]
    now = {path: path.stat().st_mtime_ns for path in before}
    assert now == before
    go_on(jobs, tmp_path, *then, ["a", "b"])


@pytest.mark.parametrize(("first", "then"), [((2, "ddp"), (1, "one")), ((1, "one"), (2, "ddp"))])
def test_a_missing_directory_is_named(
    jobs: Jobs, tmp_path: Path, first: tuple[int, str], then: tuple[int, str]
) -> None:
    go_on(jobs, tmp_path, *first, ["a", "b"])
    for rank in job(jobs, tmp_path, *then, [["open", {"directory": ["a"]}]]):
        assert rank.failed() == ["StoreError"] or rank.failed() == ["RanksError"]
        assert "owner-1" in rank.of("open")["message"] or "/b" in rank.of("open")["message"]
    if then[1] == "one":
        (rank,) = job(jobs, tmp_path, *then, [["open", {"directory": ["b", "a"]}]])
        assert "put that one first" in rank.of("open")["message"]
    go_on(jobs, tmp_path, *then, ["a", "b"])


def test_ranks_list_what_one_process_has_spread_over_the_drives(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 1, "one", ["a", "b"])
    listed = ["do", "tests.ranks_training.dict_calls:listed"]
    step = [listed, ["step"], ["checkpoint"], ["result"], listed, ["close"]]
    for rank in succeeded(job(jobs, tmp_path, 2, "ddp", calls(["b", "a"], *step))):
        found = [one["value"] for one in rank.outcomes if one["call"] == "do"]
        assert [[step for step, _ in each] for each in found] == [[STEPS], [STEPS, STEPS + 1]]
        assert all(nbytes for each in found for _, nbytes in each)


def test_damage_on_another_drive_is_found_and_the_checkpoint_before_is_taken(
    jobs: Jobs, tmp_path: Path
) -> None:
    for _ in range(2):
        go_on(jobs, tmp_path, 1, "one", ["a", "b"])
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        part = Path(checkpoint.manifest.parts[0].name)
    file = tmp_path / "b" / part / "exp_avg.safetensors"
    flip_on_disk(file, file.stat().st_size - 5)
    step = [["step"]]
    ranks = job(jobs, tmp_path, 2, "ddp", calls(["a", "b"], *step))
    said = [one["message"] for rank in ranks for one in rank.outcomes]
    assert any(str(file) in message and "damaged" in message for message in said), said
    again = succeeded(job(jobs, tmp_path, 2, "ddp", calls(["a", "b"])))
    assert all(rank.of("restore")["value"][0] == STEPS for rank in again)


DRIVES = ("a", "b")


@pytest.mark.parametrize(
    "change",
    [Change(2, "fsdp2", 1, "one", DRIVES), Change(1, "one", 2, "ddp", DRIVES)],
    ids=lambda change: change.label,
)
def test_nothing_is_lost_when_the_change_is_killed(
    jobs: Jobs, tmp_path: Path, change: Change
) -> None:
    killed = KilledRecuts(jobs, tmp_path / "all", change, AGREEMENT_S)
    steps = killed.labels()
    for part in (" b/owner-N/part-N", " b/part-N"):
        assert any(label.endswith(part) for _, label in steps), part
    assert any(label == "seal: rename a/step-N" for _, label in steps), "withdrawn at the end"
    chosen = steps[3 :: len(steps) // 4]
    for number, (rank, label) in enumerate(chosen):
        victims = killed.victims()[number % len(killed.victims())]
        killed.kill_at(rank, label, victims, goes_back=number % 2 == 1)
    assert killed.tally.problems == []
    assert killed.tally.counts["trials"] == killed.tally.counts["resumed"] == len(chosen)
