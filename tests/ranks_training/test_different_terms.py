"""Ranks whose models or optimizers differ: one named error on all of them, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.limits import SHORT_AGREEMENT_S, UNREACHED_AGREEMENT_S, UNREACHED_S
from tests.ranks_training.rank_server import Jobs, Rank

Calls = list[list[Any]]
SEAL: Calls = [["step"], ["checkpoint"], ["result"]]
OPEN = "tests.ranks_training.differing:open_otherwise"

CASES = {
    "plain beside shards": ("fsdp2", "unwrap", "UnsupportedParameterError", "plain"),
    "more parameters": ("ddp", "layer", "RanksError", "param_groups[0]: 6 and 8"),
    "more parameters beside shards": ("fsdp2", "layer", "RanksError", "param_groups[0]: 6 and 8"),
    "dtype": ("ddp", "dtype", "UnsupportedParameterError", "torch.float32"),
    "dtype of shards": ("fsdp2", "dtype", "UnsupportedParameterError", "torch.float32"),
    "frozen shards": ("fsdp2", "freeze", "UnsupportedParameterError", "layers.0.bias"),
    "no model": ("ddp", "model", "RanksError", "differ in model="),
    "no model of shards": ("fsdp2", "model", "RanksError", "differ in model="),
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


def run(jobs: Jobs, folder: Path, kind: str, *calls: Calls) -> list[Rank]:
    """Run ranks, none of which may wait for the limit."""
    job = jobs.start(folder, [*calls], kind=kind, timeout_s=UNREACHED_AGREEMENT_S, given=True)
    ranks = job.wait(UNREACHED_S)
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.errors for rank in ranks]
    return ranks


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("kind", "change", "error", "words"), CASES.values(), ids=CASES)
def test_what_differs_is_named_by_the_constructor_of_all_ranks(
    jobs: Jobs, tmp_path: Path, kind: str, change: str, error: str, words: str, victim: int
) -> None:
    own: Calls = [["do", OPEN, change]]
    ranks = run(jobs, tmp_path, kind, *[own if r == victim else [["open"]] for r in range(2)])
    found = [rank.outcomes[-1] for rank in ranks]
    assert [one["error"] for one in found] == [error] * 2, found
    assert found[0]["message"] == found[1]["message"]
    if victim == 1:
        assert words in found[0]["message"]
    assert "rank 0" in found[0]["message"]
    assert "rank 1" in found[0]["message"]
    assert not (tmp_path / "run").exists()


def test_other_members_of_the_group_are_named_after_the_limit(jobs: Jobs, tmp_path: Path) -> None:
    own: Calls = [["do", "tests.ranks_training.differing:open_in_pair"]]
    # Rank 0 serves the key-value store, so it stays until all have raised.
    stay: Calls = [["await_file", f"raised-{rank}"] for rank in range(3)]
    calls = [[*own, ["touch", f"raised-{rank}"], *stay] for rank in range(3)]
    ranks = jobs.run(tmp_path, calls, kind="ddp", timeout_s=SHORT_AGREEMENT_S)
    for number, rank in enumerate(ranks):
        found = rank.of("do")
        assert found["error"] == "RanksError", found
        assert f"did not come within {SHORT_AGREEMENT_S:g} s" in found["message"]
        if number < 2:
            assert "the process group of ranks 0 to" in found["message"]
            assert "give all ranks of a group the same process_group=" in found["message"]
    assert not (tmp_path / "run").exists()


def test_parameters_that_differ_are_named_when_they_are_added_and_training_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    add = "tests.ranks_training.differing:add_layer"
    calls = [
        [["open"], *SEAL, ["do", add, 2 + rank], ["do", add, 4], *SEAL, ["verify"]]
        for rank in range(2)
    ]
    for rank in run(jobs, tmp_path, "ddp", *calls):
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert failed["error"] == "UnsupportedParameterError"
        assert "['added.weight', [2, 2]" in failed["message"]
        assert "['added.weight', [2, 3]" in failed["message"]
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []


def test_a_state_dict_with_another_tensor_on_one_rank_fails_the_seal_on_all(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Each rank would write its bytes to where its own model has them."""
    add = "tests.ranks_training.differing:add_entry"
    calls: list[Calls] = [[["do", add, f"one{rank}"], ["open"], *SEAL] for rank in range(2)]
    for rank in run(jobs, tmp_path, "fsdp2", *calls):
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert (failed["call"], failed["error"]) == ("result", "SealError")
        assert "rank 1 differs from rank 0 in the names, dtypes or shapes" in failed["message"]
    assert not [*(tmp_path / "run").glob("step-*")]


def test_shards_of_a_parameter_that_one_rank_has_not_stepped_fail_the_seal_on_all(
    jobs: Jobs, tmp_path: Path
) -> None:
    """With shards alone nothing is sent in a step, so only the seal can find it."""
    without: Calls = [["do", "tests.ranks_training.differing:step_without", "maybe.weight"]]
    on: Calls = [*SEAL[1:], ["restore"], *SEAL, ["verify"]]
    plain: Calls = [["open"], *SEAL, *SEAL[:1], *on]
    ranks = run(jobs, tmp_path, "fsdp2", plain, [["open"], *SEAL, *without, *on], plain)
    for rank in ranks:
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert (failed["call"], failed["error"]) == ("result", "SealError")
        assert "rank 0 and rank 1 have stepped 'maybe.weight' differently" in failed["message"]
        assert rank.of("restore")["value"][0] == 1
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []
