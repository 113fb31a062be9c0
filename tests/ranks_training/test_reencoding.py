"""8-bit state in a cut that divides its blocks of 32: refused, or encoded anew if the user asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.blocks_of import eight_bit_state, encoded_anew
from tests.ranks_training.cases import (
    SEAL,
    Calls,
    contents,
    newest,
    of_each,
    require_success,
    run_all,
    run_cases,
)
from tests.ranks_training.rank_server import Jobs, Rank

RUN: dict[str, Any] = {
    "given": True,
    "widths": (40, 60, 50, 30),  # about 7,000 elements, so that there are several chunks of 1024
    "options": {"state_dtype": "int8"},
}
ASKED = ["restore", {"reencode": True}]
END: Calls = [*SEAL, ["whole"], ["close"]]
BEGUN: Calls = [["open"], ["step", 3], *END]
OPTION = {"options": {"state_dtype": "int8", "reencode": True}}


def run(jobs: Jobs, folder: Path, num: int, kind: str, *calls: Any, **how: Any) -> list[Rank]:
    """Run calls on some ranks, which must all succeed."""
    return run_all(jobs, folder, [[["open"], *calls]] * num, kind=kind, **{**RUN, **how})


def warnings_of(rank: Rank) -> list[str]:
    """Return what a rank has warned of state that is encoded anew."""
    return [said for one in rank.outcomes for said in one["warnings"] if "encoded anew" in said]


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "one"), (2, "fsdp2")), ((2, "tp"), (3, "ddp"))],
    ids=lambda ranks: f"{ranks[0]}-{ranks[1]}",
)
def test_each_value_changes_by_at_most_one_rounding_in_its_new_block(
    jobs: Jobs, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    first = run(jobs, tmp_path, *before, *BEGUN[1:])
    old = eight_bit_state(newest(tmp_path / "run"))
    ranks = run(jobs, tmp_path, *after, ASKED, *END)
    names = encoded_anew(old, eight_bit_state(newest(tmp_path / "run")))
    assert names, "this change divides blocks"
    assert ranks[0].of("whole")["value"] == first[0].of("whole")["value"]
    (said,) = warnings_of(ranks[0])
    assert f"the 8-bit state of {len(names)} parameters is encoded anew" in said
    assert "not bit-identical" in said
    assert not any(map(warnings_of, ranks[1:])), "said once"
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.verify().ok
    again = run(jobs, tmp_path, *after, ["restore"], ["step", 2], *END)
    assert not any(map(warnings_of, again)), "this is its cut now"
    assert again[0].of("result")["value"] == 5


def test_who_does_not_ask_is_refused_and_who_asks_gets_the_same_at_once_or_later(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The option allows it where no argument is given. A warning that is an error refuses it.

    Whether the new cut is sealed before the next step or not makes no difference to it.
    """
    cases = ("refused", "strict", "sealed", "stepped")
    begun = run_cases(jobs, tmp_path, {n: ([BEGUN] * 2, {"kind": "fsdp2"}) for n in cases}, **RUN)
    for ranks in begun.values():
        require_success(ranks)
    before = {name: contents(tmp_path / name) for name in ("refused", "strict")}
    plain: Calls = [["open"], ["restore"], ["close"]]
    told: Calls = [["open"], ["restore", {"reencode": False}], ["close"]]
    strict: Calls = [["open"], ["keep_error", "strict", "encode_anew"], ["close"]]
    played = run_cases(
        jobs,
        tmp_path,
        {
            "refused": ([plain], {}),
            "refused/option": ([told], OPTION),
            "strict": ([strict], {}),
            "sealed": ([[["open"], ASKED, *END]], {}),
            "sealed/again": ([[["open"], ["restore"], ["step"], *END]], {}),
            "stepped": ([[["open"], ["restore"], ["step"], *END]], OPTION),
        },
        **{**RUN, "kind": "one"},
    )
    for name in ("refused", "refused/option"):
        found = played[name][0].of("restore")
        assert found["error"] == "MismatchError"
        assert "8-bit state has one scale for 32" in found["message"]
        assert "call restore(reencode=True) on every rank" in found["message"]
    assert of_each(played["strict"], "keep_error") == ["RuntimeWarning"]
    for name, files in before.items():
        assert contents(tmp_path / name) == files, name
    for name in ("sealed", "stepped"):
        require_success(played[name])
        assert len(warnings_of(played[name][0])) == 1
    require_success(played["sealed/again"])
    left, right = (newest(tmp_path / name / "run") for name in ("sealed", "stepped"))
    names = [path.name for path in left.glob("exp*.safetensors")]
    assert len(names) == 4
    for name in [*names, "model.safetensors", "master.safetensors"]:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def test_ranks_that_ask_for_different_things_change_nothing(jobs: Jobs, tmp_path: Path) -> None:
    """A warning that is an error on one rank refuses it on all; the same ranks can ask again."""
    begun = {name: ([BEGUN] * 3, {"kind": "fsdp2"}) for name in ("differ", "strict")}
    for ranks in run_cases(jobs, tmp_path, begun, **RUN).values():
        require_success(ranks)
    before = {name: contents(tmp_path / name) for name in begun}
    asked = [[["open"], ["restore", {"reencode": rank == 1}], ["close"]] for rank in range(2)]
    strict: Calls = [["open"], ["keep_error", "strict", "encode_anew"], ASKED, *END]
    cases = {"differ": (asked, {}), "strict": ([strict] * 2, {})}
    played = run_cases(jobs, tmp_path, cases, kind="fsdp2", **RUN)
    for rank in played["differ"]:
        assert rank.of("restore")["error"] == "RanksError"
        assert "rank 1 for" in rank.of("restore")["message"]
        assert "with reencode=True" in rank.of("restore")["message"]
    assert contents(tmp_path / "differ") == before["differ"]
    require_success(played["strict"])
    assert of_each(played["strict"], "keep_error") == ["RuntimeWarning", "RanksError"]
    assert of_each(played["strict"], "result") == [3, 3]
    assert contents(tmp_path / "strict") != before["strict"]
