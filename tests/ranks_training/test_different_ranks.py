"""Ranks that differ, or make different calls: one named error on all, at once; nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.limits import SHORT_AGREEMENT_S
from tests.ranks_training.cases import (
    AGAIN,
    BEGIN,
    ROUND,
    Calls,
    Case,
    do,
    errors,
    in_memory,
    of_each,
    require_success,
    run_cases,
)
from tests.ranks_training.rank_server import Jobs

TERMS = {
    "plain beside shards": ("fsdp2", "unwrap", "UnsupportedParameterError", "plain"),
    "more parameters": ("ddp", "layer", "RanksError", "param_groups[0]: 6 and 8"),
    "dtype of shards": ("fsdp2", "dtype", "UnsupportedParameterError", "torch.float32"),
    "frozen shards": ("fsdp2", "freeze", "UnsupportedParameterError", "layers.0.bias"),
    "no model": ("ddp", "model", "RanksError", "differ in model="),
    "groups": ("ddp", "groups", "RanksError", "differ in the number of parameter groups: 1 and 6"),
    "learning rate": ("fsdp2", "lr", "RanksError", "differ in param_groups[0]['lr']: 0.01 and 0.5"),
    "class": ("ddp", "class", "RanksError", "differ in the optimizer's class"),
    "keep": ("ddp", "keep", "RanksError", "differ in keep="),
    "state": ("ddp", "int8", "RanksError", "differ in Options(state_dtype=...)"),
    "overlap": ("ddp", "overlap", "RanksError", "differ in Options(overlap=...)"),
    "chunks": ("fsdp2", "chunk_bytes", "RanksError", "differ in Options(chunk_bytes=...)"),
    "buffer": ("fsdp2", "buffer", "RanksError", "differ in the buffer 'further'"),
    "torch": ("ddp", "torch", "RanksError", "torch 0.0.7"),
    "this package": ("fsdp2", "offload", "RanksError", "offload 0.0.7"),
}


def test_what_differs_is_named_by_the_constructor_of_all_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """No directory is made. Of rank 0, which decides, a few differences are enough."""
    cases: dict[str, Case] = {}
    for number, (name, (kind, change, _, _)) in enumerate(TERMS.items()):
        own = [do("odd_calls:open_otherwise", change)]
        cases[name] = ([[["open"]], own], {"kind": kind})
        if number % 4 == 0:
            cases[f"{name} on rank 0"] = ([own, [["open"]]], {"kind": kind})
    for name, ranks in run_cases(jobs, tmp_path, cases, given=True).items():
        _, _, error, words = TERMS[name.removesuffix(" on rank 0")]
        found = [rank.outcomes[-1] for rank in ranks]
        assert [one["error"] for one in found] == [error] * 2, (name, found)
        message = found[0]["message"]
        assert found[1]["message"] == message
        assert "rank 0" in message, name
        assert "rank 1" in message, name
        assert words in message or name.endswith("rank 0"), (name, message)
        assert not (tmp_path / name / "run").exists()


def test_other_members_of_the_group_are_named_after_the_limit(jobs: Jobs, tmp_path: Path) -> None:
    own = do("odd_calls:open_in_pair")
    # Rank 0 serves the key-value store, so it stays until all have raised.
    stay: Calls = [["await_file", f"raised-{rank}"] for rank in range(3)]
    calls = [[own, ["touch", f"raised-{rank}"], *stay] for rank in range(3)]
    ranks = jobs.run(tmp_path, calls, kind="ddp", timeout_s=SHORT_AGREEMENT_S)
    for number, rank in enumerate(ranks):
        found = rank.of("do")
        assert found["error"] == "RanksError", found
        assert f"did not come within {SHORT_AGREEMENT_S:g} s" in found["message"]
        if number < 2:
            assert "the process group of ranks 0 to" in found["message"]
            assert "give all ranks of a group the same process_group=" in found["message"]
    assert not (tmp_path / "run").exists()


def test_two_groups_of_two_ranks_do_not_disturb_each_other(jobs: Jobs, tmp_path: Path) -> None:
    """Each trains a model of its own, in a directory of its own."""
    calls = [[do("odd_calls:open_beside"), *ROUND, ["close"], ["begin", "end"]]] * 4
    ranks = jobs.run(tmp_path, calls, given=True)
    require_success(ranks)
    first, second, third, fourth = of_each(ranks, "step")
    assert (first, third) == (second, fourth)
    assert first != third
    assert of_each(ranks, "result") == [1] * 4
    assert sorted(path.parent.name for path in tmp_path.glob("pair-*/step-*")) == [
        "pair-0",
        "pair-1",
    ]


LATER: dict[str, tuple[str, Calls, Calls, str, str, str]] = {
    # Kind, calls of rank 0 and of rank 1 after a checkpoint; the call that fails on both, and how.
    "another checkpoint": (
        "ddp",
        [*ROUND, ["restore", 1, {"discard_newer": True}]],
        [*ROUND, ["restore"]],
        "restore",
        "RanksError",
        "step-00000001 and rank 1 for",
    ),
    "hyper-parameters": (
        "fsdp2",
        ROUND,
        [["set", {"lr": 1e-3}], *ROUND],
        "result",
        "SealError",
        "rank 1 differs from rank 0 in the hyper-parameters",
    ),
    "added parameters": (
        "ddp",
        [do("odd_calls:add_layer", 2)],
        [do("odd_calls:add_layer", 3)],
        "do",
        "UnsupportedParameterError",
        "['added.weight', [2, 2]",
    ),
    "a shard that is not stepped": (
        "fsdp2",
        ROUND,
        [do("odd_calls:step_without", "maybe.weight"), *ROUND[1:]],
        "result",
        "SealError",
        "rank 0 and rank 1 have stepped 'maybe.weight' differently",
    ),
}


def test_what_differs_later_fails_on_all_and_training_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    cases: dict[str, Case] = {}
    for name, (kind, first, second, *_) in LATER.items():
        cases[name] = ([[*BEGIN, *first], [*BEGIN, *second]], {"kind": kind})
        cases[f"{name}/again"] = ([[*AGAIN, ["verify"]]] * 2, {"kind": kind})
    # Each rank would write its bytes to where its own model has them.
    entry = [[do("odd_calls:add_entry", f"one{rank}"), *BEGIN] for rank in range(2)]
    cases["entry"] = (entry, {"kind": "fsdp2"})
    played = run_cases(jobs, tmp_path, cases, given=True)
    for rank in played["entry"]:
        (failed,) = errors(rank)
        assert (failed["call"], failed["error"]) == ("result", "SealError")
        assert "rank 1 differs from rank 0 in the names, dtypes or shapes" in failed["message"]
    assert not [*(tmp_path / "entry/run").glob("step-*")]
    for name, (_, _, _, call, error, words) in LATER.items():
        for rank in played[name]:
            (failed,) = errors(rank)
            assert (failed["call"], failed["error"]) == (call, error), (name, failed)
            assert words in failed["message"], (name, failed)
        again = played[f"{name}/again"]
        require_success(again)
        step = 2 if name == "another checkpoint" else 1
        assert of_each(again, "restore") == [[step, {"step": step, "rank": r}] for r in (0, 1)]
        assert of_each(again, "verify") == [[], []]


APART: dict[str, tuple[str, Calls, Calls, str]] = {
    # Kind, calls of rank 0 and of rank 1, and what both say.
    "checkpoint and step": (
        "ddp",
        [["checkpoint"], ["backward"], ["attempt"], ["keep_error", "result"]],
        [["backward"], ["attempt"], ["keep_error", "checkpoint"]],
        "rank 0 is in checkpoint(), rank 1 in step(): call checkpoint() on every rank",
    ),
    "checkpoint and restore": (
        "ddp",
        [["checkpoint"], ["result"]],
        [["restore"], ["keep_error", "pin", "best"]],
        "rank 0 is in checkpoint(), rank 1 in restore(): call checkpoint() on every",
    ),
    "restore and step": (
        "ddp",
        [["restore"]],
        [["backward"], ["attempt"]],
        "rank 0 is in restore(), rank 1 in step(): make the same calls in the same",
    ),
    "checkpoint twice": (
        "ddp",
        [["checkpoint"], ["checkpoint"]],
        [["checkpoint"], ["backward"], ["attempt"]],
        "rank 1 called step() while rank 0 called checkpoint(): make the same calls",
    ),
    # With FSDP2 no rank waits for another one in a step.
    "shards past a checkpoint": (
        "fsdp2",
        [["checkpoint"], ["touch", "begun"], ["result"]],
        [["await_file", "begun"], ["backward"], ["attempt"]],
        "in step(): call checkpoint() on every rank",
    ),
}


def test_ranks_in_different_calls_say_so_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """Each process stays until the other one has ended its calls; none waits for the limit."""
    cases: dict[str, Case] = {}
    for name, (kind, first, second, _) in APART.items():
        calls = [
            [*BEGIN, ["step"], *own, ["touch", f"done-{rank}"], ["await_file", f"done-{1 - rank}"]]
            for rank, own in enumerate((first, second))
        ]
        cases[name] = (calls, {"kind": kind})
        cases[f"{name}/again"] = ([AGAIN, AGAIN], {"kind": kind})
    played = run_cases(jobs, tmp_path, cases, given=True)
    for name, (*_, said) in APART.items():
        for rank in played[name]:
            (text,) = {one["message"] for one in errors(rank)}
            assert said in re.sub(r"(rank \d) on \S+", r"\1", text), (name, text)
            assert all(one["value"] for one in rank.outcomes if one["call"] == "keep_error"), name
        again = played[f"{name}/again"]
        require_success(again)
        step = 2 if name == "checkpoint twice" else 1
        assert of_each(again, "restore") == [[step, {"step": step, "rank": r}] for r in (0, 1)]
        assert of_each(again, "result") == [step + 1] * 2


def test_a_checkpoint_of_one_rank_only_is_none(jobs: Jobs, tmp_path: Path) -> None:
    alone: Calls = [["hurry"], *ROUND[1:], ["touch", "told"]]
    calls = [[*BEGIN, ["step"], *alone], [*BEGIN, ["step"], ["await_file", "told"]]]
    first, second = jobs.run(tmp_path, calls)
    assert first.failed() == ["SealError"]
    assert "rank 1 did not call checkpoint()" in first.of("result")["message"]
    assert second.failed() == []
    again = jobs.run(tmp_path, [AGAIN, AGAIN])
    require_success(again)
    assert [step for step, _ in of_each(again, "restore")] == [1, 1]


VAIN: list[tuple[list[Any], list[Any]]] = [
    (["restore", 99], ["restore"]),
    (["pin", "best", 99], ["pin", "best"]),
    (["unpin", "worst"], ["unpin", "best"]),
    (["load", "torch"], ["load", "reference"]),
]


def test_calls_that_one_rank_makes_in_vain_fail_on_all(jobs: Jobs, tmp_path: Path) -> None:
    begin: Calls = [*BEGIN, ["pin", "best"]]
    end: Calls = [["restore"], ["settle"], *ROUND, ["verify"]]
    calls = [
        [*begin, *[pair[number] for pair in VAIN], *end] for number in (1, 0)
    ]  # rank 1 makes them in vain
    cases: dict[str, Case] = {"vain": (calls, {}), "memory": in_memory(2, kind="fsdp2")}
    played = run_cases(jobs, tmp_path, cases, kind="fsdp2")
    ranks = played["vain"]
    for rank in ranks:
        assert [one["call"] for one in errors(rank)] == ["restore", "pin", "unpin", "load"]
    assert all("rank 1" in failed["message"] for failed in errors(ranks[0]))
    assert of_each(ranks, "result") == [2, 2]
    assert of_each(ranks, "verify") == [[], []]
    assert of_each(ranks, "step") == of_each(played["memory"], "step")
