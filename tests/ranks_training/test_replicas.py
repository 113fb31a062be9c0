"""Parameters and buffers that several ranks hold and that differ.

Parameters are refused by name, and never mixed. Of buffers checkpoints have those of rank 0, which
is said once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks_training.cases import (
    ROUND,
    SEAL,
    Calls,
    Case,
    do,
    errors,
    in_memory,
    of_each,
    require_success,
    run_cases,
    values,
)
from tests.ranks_training.rank_server import Jobs, Rank

STEP: Calls = [["backward"], ["update"]]
REFUSED: Calls = [["backward"], ["bits"], ["attempt"], ["bits"]]


def of(name: str, *arguments: Any) -> list[Any]:
    """Return a call of one of the functions of `odd_calls`."""
    return do(f"odd_calls:{name}", *arguments)


def refusals(rank: Rank) -> list[tuple[str, str, str]]:
    """Return each call that failed: its name, the error, and what follows "parameter"."""
    return [
        (one["call"], one["error"], one["message"].partition("parameter ")[2].partition(":")[0])
        for one in errors(rank)
    ]


def test_values_of_each_rank_are_refused_before_the_first_step(jobs: Jobs, tmp_path: Path) -> None:
    """Also before a checkpoint without a step; once they are equal, training goes on.

    The order counts without model=.
    """
    name = "layers.1.weight"
    calls: Calls = [
        of("ignore", name), ["open"], *REFUSED, *SEAL, ["attempt"], of("fill", name, 2.0),
        ["update"], *SEAL, ["verify"],
    ]  # fmt: skip
    reversed_order: Calls = [of("open_reversed"), ["backward"], ["attempt"]]
    cases: dict[str, Case] = {
        "ddp": ([calls] * 2, {"kind": "ddp"}),
        "fsdp2": ([calls] * 2, {"kind": "fsdp2"}),
        "reversed": ([reversed_order] * 2, {"kind": "ddp"}),
    }
    played = run_cases(jobs, tmp_path, cases, given=True)
    said = f"'{name}' has other values on rank 1 than on rank 0"
    for rank in (*played["ddp"], *played["fsdp2"]):
        assert refusals(rank) == [
            ("attempt", "RanksError", said),
            ("result", "SealError", said),
            ("attempt", "RanksError", said),
        ]
        before, after = values(rank, "bits")
        assert before == after
        assert rank.of("result")["value"] == 1
        assert rank.of("verify")["value"] == []
    for rank in played["reversed"]:
        (failed,) = errors(rank)
        assert "'group0.param0' (one of 2 parameters) has other values on" in failed["message"]
        assert "in the same order" in failed["message"]


def test_changes_of_one_rank_are_refused_and_those_of_all_are_not(
    jobs: Jobs, tmp_path: Path
) -> None:
    weight, both = "layers.0.weight", [0, 1]
    calls: Calls = [
        ["open"], *STEP, *SEAL,
        # A step refuses what one rank has changed; `restore` gives all ranks the same.
        of("change", weight, [1]), *REFUSED, ["restore"], *STEP, ["bits"], *SEAL,
        # A seal refuses also what torch has not counted, and so does the step after it.
        of("change", "frozen", [0], "data"), *STEP, *SEAL, ["backward"], ["attempt"],
        of("change", "frozen", [1], "data"), ["update"],
        of("change", "maybe.weight", [1]), *SEAL, of("change", "maybe.weight", [0]),
        # These are the same on all ranks.
        of("change", weight, both), *STEP, of("change", weight, both), *SEAL, *STEP,
        of("change", weight, [0], "broadcast"), *STEP, of("change", "frozen", both, "data"), *STEP,
        of("fill", weight, float("nan")), *STEP, *SEAL, ["verify"], ["bits"],
    ]  # fmt: skip
    ranks = run_cases(jobs, tmp_path, {"": ([calls] * 2, {})}, given=True)[""]
    said = "has other values on rank 1 than on rank 0"
    for rank in ranks:
        assert refusals(rank) == [
            ("attempt", "RanksError", f"'{weight}' {said}"),
            ("result", "SealError", f"'frozen' {said}"),
            ("attempt", "RanksError", f"'frozen' {said}"),
            ("result", "SealError", f"'maybe.weight' {said}"),
        ]
        before, after = values(rank, "bits")[:2]
        assert before == after
        assert rank.of("result")["value"] == 9
        assert rank.of("verify")["value"] == []
    first, second = (values(rank, "bits") for rank in ranks)
    assert first[2:] == second[2:]


def test_shards_that_are_replicated_are_compared_where_they_are_held(
    jobs: Jobs, tmp_path: Path
) -> None:
    held = {"hybrid": ("layers.0.weight", 1), "grid": ("maybe.weight", 2)}
    cases: dict[str, Case] = {}
    for kind, (name, _) in held.items():
        calls: Calls = [
            ["open"], *STEP, *SEAL, *STEP, of("change", name, [3]), ["backward"], ["attempt"],
            *SEAL, ["restore"], of("change", name, [0, 1, 2, 3]), *STEP, *SEAL, ["verify"],
        ]  # fmt: skip
        cases[kind] = ([calls] * 4, {"kind": kind})
    played = run_cases(jobs, tmp_path, cases, given=True, widths=[6, 8, 4])
    for kind, (name, other) in held.items():
        said = f"'{name}' has other values on rank 3 than on rank {other}"
        for rank in played[kind]:
            assert refusals(rank) == [
                ("attempt", "RanksError", said),
                ("result", "SealError", said),
            ]
            assert rank.of("result")["value"] == 2
            assert rank.of("verify")["value"] == []


WARN = of("step_warning")


def warned(rank: Rank) -> list[list[list[str]]]:
    """Return what each step has warned of."""
    return [found for found in values(rank, "do") if found]


def test_a_buffer_that_differs_is_named_once_by_the_writer(jobs: Jobs, tmp_path: Path) -> None:
    """`restore()` gives all ranks that of rank 0. What is the same or not stored is not named."""
    make, differs = of("add_buffers", True), [WARN, *SEAL, WARN, *SEAL]
    cases: dict[str, Case] = {
        "fsdp2": ([[make, ["open"], *differs]] * 2, {"kind": "fsdp2"}),
        "ddp": ([[[*make, False], ["open"], *differs]] * 2, {"kind": "ddp"}),
    }
    look: Calls = [make, ["open"], ["restore"], of("buffer_value")]
    for kind in ("fsdp2", "ddp"):
        cases[f"{kind}/again"] = ([look] * 2, {"kind": kind})
    silent: Calls = [["open"], WARN, *SEAL, WARN]
    for name, kind, how in (
        ("equal", "fsdp2", [False]),
        ("broadcast by ddp", "ddp", [True]),
        ("not persistent", "fsdp2", [True, True, False]),
    ):
        cases[name] = ([[of("add_buffers", *how), *silent]] * 2, {"kind": kind})
    # One that differs later is found by the next grant.
    later: Calls = [
        of("add_buffers", False), ["open"], WARN, of("change_buffer"), WARN, *SEAL, WARN,
    ]  # fmt: skip
    cases["later"] = ([later] * 2, {"kind": "fsdp2"})
    played = run_cases(jobs, tmp_path, cases, given=True)
    for kind in ("fsdp2", "ddp"):
        first, other = played[kind]
        ((text, filename),), *more = warned(first)
        assert text.startswith("the buffer 'own' has other values on rank 1 than on rank 0.")
        assert filename.endswith("tests/ranks_training/odd_calls.py"), "the user's own line"
        assert more == warned(other) == []
        assert of_each(played[kind], "result") == [2, 2]
        assert of_each(played[f"{kind}/again"], "do") == [0.0, 0.0]
    for name in ("equal", "broadcast by ddp", "not persistent"):
        assert [warned(rank) for rank in played[name]] == [[], []], name
    first, other = played["later"]
    assert values(first, "do")[:4] == [None, [], None, []]
    assert len(warned(first)) == 1
    assert warned(other) == []


def test_a_warning_that_is_an_error_refuses_the_step_on_all_ranks(
    jobs: Jobs, tmp_path: Path
) -> None:
    calls: Calls = [
        of("add_buffers", True, False), ["open"], ["backward"], ["strict", "attempt"], ["update"],
        ["bits"], *SEAL, ["verify"],
    ]  # fmt: skip
    cases = {"": ([calls] * 2, {}), "memory": in_memory(1)}
    played = run_cases(jobs, tmp_path, cases, kind="fsdp2", given=True)
    for rank, error in zip(played[""], ["RuntimeWarning", "RanksError"], strict=True):
        (failed,) = errors(rank)
        assert (failed["call"], failed["error"]) == ("strict", error)
        assert "the buffer 'own' has other values on rank 1" in failed["message"]
        assert rank.of("result")["value"] == 1
        assert rank.of("verify")["value"] == []
    assert of_each(played[""], "bits") == of_each(played["memory"], "step")


def test_an_extra_state_comes_back_on_all_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """It is that of rank 0, as buffers are, and the hooks of a load run on each rank."""
    cases: dict[str, Case] = {}
    look: Calls = [of("count", 0), ["open"], ["restore"], of("counted")]
    for kind in ("fsdp2", "ddp"):
        cases[kind] = ([[of("count", 5), ["open"], *ROUND]] * 2, {"kind": kind})
        cases[f"{kind}/again"] = ([look] * 2, {"kind": kind})
    for name, ranks in run_cases(jobs, tmp_path, cases, given=True).items():
        require_success(ranks)
        if "again" in name:
            assert of_each(ranks, "do") == [[5, 1], [5, 1]]
