"""8-bit state in a cut that divides its blocks of 32: refused, or encoded anew if the user asks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.blocks_of import eight_bit_state, encoded_anew
from tests.ranks_training.rank_server import Jobs, Rank

WIDTHS = (40, 60, 50, 30)
"""Layers of about 7,000 elements together, so that there are several chunks of 1024."""

INT8 = {"state_dtype": "int8"}
ASKED = ["restore", {"reencode": True}]
SEAL: list[list[Any]] = [["checkpoint"], ["result"], ["whole"], ["close"]]


def run(jobs: Jobs, folder: Path, num: int, kind: str, *calls: Any, **options: Any) -> list[Rank]:
    """Run calls on some ranks, which must all succeed."""
    ranks = jobs.run(
        folder,
        [[["open"], *calls]] * num,
        given=True,
        kind=kind,
        widths=WIDTHS,
        options={**INT8, **options},
    )
    for rank in ranks:
        assert not rank.failed(), [one for one in rank.outcomes if one["error"]]
        assert rank.has_come_to_its_end, rank.errors
    return ranks


def newest(folder: Path) -> Path:
    return max((folder / "run").glob("step-*"))


def warnings_of(rank: Rank) -> list[str]:
    return [said for one in rank.outcomes for said in one["warnings"] if "encoded anew" in said]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "fsdp2"), (1, "one")),
        ((1, "one"), (2, "fsdp2")),
        ((2, "fsdp2"), (3, "fsdp2")),
        ((2, "tp"), (3, "ddp")),
        ((3, "ddp"), (2, "tp")),
    ],
    ids=lambda ranks: f"{ranks[0]}-{ranks[1]}",
)
def test_each_value_changes_by_at_most_one_rounding_in_its_new_block(
    jobs: Jobs, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    first = run(jobs, tmp_path, *before, ["step", 3], *SEAL)
    old = eight_bit_state(newest(tmp_path))
    ranks = run(jobs, tmp_path, *after, ASKED, *SEAL)
    names = encoded_anew(old, eight_bit_state(newest(tmp_path)))
    assert names, "this change divides blocks"
    assert ranks[0].of("whole")["value"] == first[0].of("whole")["value"]
    (said,) = warnings_of(ranks[0])
    assert f"the 8-bit state of {len(names)} parameters is encoded anew" in said
    assert "not bit-identical" in said
    assert not any(map(warnings_of, ranks[1:])), "said once"
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.verify().ok
    again = run(jobs, tmp_path, *after, ["restore"], ["step", 2], *SEAL)
    assert not any(map(warnings_of, again)), "this is its cut now"
    assert again[0].of("result")["value"] == 5


def test_a_first_step_encodes_what_a_checkpoint_would(jobs: Jobs, tmp_path: Path) -> None:
    """Whether the new cut is sealed before the next step or not makes no difference to it."""
    run(jobs, tmp_path, 2, "fsdp2", ["step", 3], *SEAL)
    shutil.copytree(tmp_path, tmp_path / "other")
    run(jobs, tmp_path, 1, "one", ASKED, ["step"], *SEAL)
    run(jobs, tmp_path / "other", 1, "one", ASKED, *SEAL)
    run(jobs, tmp_path / "other", 1, "one", ["restore"], ["step"], *SEAL)
    names = [path.name for path in newest(tmp_path).glob("exp*.safetensors")]
    assert len(names) == 4
    for name in [*names, "model.safetensors", "master.safetensors"]:
        left, right = (newest(folder) / name for folder in (tmp_path, tmp_path / "other"))
        assert left.read_bytes() == right.read_bytes(), name


@pytest.mark.parametrize("how", ["argument", "option"])
def test_blocks_that_are_not_divided_keep_their_bytes(jobs: Jobs, tmp_path: Path, how: str) -> None:
    """Ranks with replicas divide state between blocks, so there is nothing to encode anew."""
    restore = ASKED if how == "argument" else ["restore"]
    options = {} if how == "argument" else {"reencode": True}
    run(jobs, tmp_path, 3, "ddp", ["step", 2], *SEAL)
    for first, (num, kind) in ((2, (1, "one")), (4, (2, "ddp")), (6, (1, "one"))):
        ranks = run(jobs, tmp_path, num, kind, restore, ["step", 2], *SEAL, **options)
        assert not any(map(warnings_of, ranks))
        assert ranks[0].of("restore")["value"][0] == first
    (tmp_path / "alone").mkdir()
    run(jobs, tmp_path / "alone", 1, "one", ["step", 8], *SEAL)
    for path in newest(tmp_path / "alone").glob("*.safetensors"):
        if path.name != "train_state.safetensors":
            assert path.read_bytes() == (newest(tmp_path) / path.name).read_bytes(), path.name


def test_the_option_allows_it_where_no_argument_is_given(jobs: Jobs, tmp_path: Path) -> None:
    run(jobs, tmp_path, 2, "fsdp2", ["step", 2], *SEAL)
    before = contents(tmp_path)
    refused = [["open"], ["restore", {"reencode": False}], ["close"]]
    setting: dict[str, Any] = {"given": True, "widths": WIDTHS}
    options = {**INT8, "reencode": True}
    (rank,) = jobs.run(tmp_path, [refused], kind="one", options=options, **setting)
    assert rank.of("restore")["error"] == "MismatchError"
    assert contents(tmp_path) == before
    (rank,) = run(jobs, tmp_path, 1, "one", ["restore"], *SEAL, reencode=True)
    assert len(warnings_of(rank)) == 1


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files of checkpoints and parts."""
    run = folder / "run"
    return {path: path.read_bytes() for path in run.rglob("*/*.*") if path.is_file()}


def test_ranks_that_ask_for_different_things_change_nothing(jobs: Jobs, tmp_path: Path) -> None:
    run(jobs, tmp_path, 3, "fsdp2", ["step", 2], *SEAL)
    before = contents(tmp_path)
    calls = [[["open"], ["restore", {"reencode": rank == 1}], ["close"]] for rank in range(2)]
    ranks = jobs.run(tmp_path, calls, given=True, kind="fsdp2", widths=WIDTHS, options=INT8)
    for rank in ranks:
        assert rank.of("restore")["error"] == "RanksError"
        assert "rank 1 for" in rank.of("restore")["message"]
        assert "with reencode=True" in rank.of("restore")["message"]
    assert contents(tmp_path) == before
    run(jobs, tmp_path, 2, "fsdp2", ASKED, ["step"], *SEAL)


@pytest.mark.parametrize(("num", "kind"), [(3, "fsdp2"), (1, "one")])
def test_a_warning_that_is_an_error_refuses_it_on_all_ranks(
    jobs: Jobs, tmp_path: Path, num: int, kind: str
) -> None:
    run(jobs, tmp_path, 2, "fsdp2", ["step", 2], *SEAL)
    before = contents(tmp_path)
    strictly = ["do", "tests.ranks_training.reencoding_calls:restore_strictly"]
    ranks = jobs.run(
        tmp_path,
        [[["open"], strictly, ASKED, *SEAL[:2], ["close"]]] * num,
        given=True,
        kind=kind,
        widths=WIDTHS,
        options=INT8,
    )
    errors = [rank.of("do")["value"] for rank in ranks]
    assert errors == ["RuntimeWarning", *["RanksError"] * (num - 1)]
    for rank in ranks:
        assert rank.failed() == []
        assert rank.of("result")["value"] == 2
    assert contents(tmp_path) != before


@pytest.mark.parametrize(
    ("num", "kind", "what", "path"),
    [(1, "one", "write", "exp_avg.safetensors"), (3, "fsdp2", "rename", "")],
)
def test_a_rank_is_killed_while_state_is_encoded_anew(
    jobs: Jobs, tmp_path: Path, num: int, kind: str, what: str, path: str
) -> None:
    run(jobs, tmp_path, 2, "fsdp2", ["step", 2], ["checkpoint"], ["result"], ["step"], *SEAL)
    shutil.copytree(tmp_path, tmp_path / "undisturbed")
    done = run(jobs, tmp_path / "undisturbed", num, kind, ASKED, ["step"], *SEAL)
    go_on: list[list[Any]] = [["open"], ASKED, ["step"], *SEAL]
    killed = [["open"], ASKED, ["kill_at", what, path], *go_on[2:]]
    setting: dict[str, Any] = {"given": True, "kind": kind, "widths": WIDTHS, "options": INT8}
    ranks = jobs.run(tmp_path, [killed, *[go_on] * (num - 1)], **setting)
    assert ranks[0].status == -9, ranks[0].outcomes
    assert newest(tmp_path).name == "step-00000003"
    again = run(jobs, tmp_path, num, kind, *go_on[1:])
    assert again[0].of("whole")["value"] == done[0].of("whole")["value"]
    left, right = (eight_bit_state(newest(at)) for at in (tmp_path, tmp_path / "undisturbed"))
    for key, elements in left.items():
        assert (elements.values == right[key].values).all(), key
