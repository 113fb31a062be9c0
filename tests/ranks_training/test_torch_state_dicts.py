"""State of several ranks in and out by torch's own functions for state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.cases import Case, do, of_each, require_success, run_cases, values
from tests.ranks_training.exchange_calls import WIDTHS, load, plain
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_readers import FP32, call, loaded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BESIDE: dict[str, tuple[int, str, dict[str, Any]]] = {
    "flat": (2, "fsdp2", {"flat": True}),
    "amsgrad": (2, "fsdp2", {"amsgrad": True}),
    "momentum": (2, "fsdp2", {"optimizer": "SGD", "momentum": 0.9}),
    "unstepped": (2, "fsdp2", {"skip": "maybe"}),
    "full": (3, "fsdp2", {"full": True}),
    "saved ddp": (2, "ddp", {}),
    "saved fsdp2": (2, "fsdp2", {}),
    "tensor-parallel": (2, "tp", {}),
    "saved fsdp-tp": (4, "grid", {}),
    "hsdp": (4, "hybrid", {}),
}
"""Ranks, kind and arguments of each training with torch's state dicts."""


@pytest.fixture(scope="module")
def beside(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what ranks say of each training, and the folder of those that they have saved."""
    folder = tmp_path_factory.mktemp("beside")
    found: dict[str, Any] = {"folder": folder}
    for size in (2, 3, 4):
        cases: dict[str, Case] = {}
        for name, (num, kind, how) in BESIDE.items():
            out = {"out": str(folder / f"dcp {name}")} if name.startswith("saved") else {}
            if num == size:
                cases[name] = ([[call("beside_torch", **out, **how)]] * size, {"kind": kind})
        played = run_cases(jobs, folder, cases, widths=WIDTHS, **FP32)
        for name, ranks in played.items():
            require_success(ranks)
            found[name] = of_each(ranks, "do")
    return found


def test_each_rank_has_the_state_that_torchs_optimizer_would_have(beside: dict[str, Any]) -> None:
    for name in BESIDE:
        for found in beside[name]:
            assert found["different"] == "", name
            assert found["stepped"], name
            assert found["empty"], name


def test_dcp_saves_it_and_torchs_own_optimizer_goes_on_to_the_same_bits(
    jobs: Jobs, beside: dict[str, Any], tmp_path: Path
) -> None:
    saved = {name: str(beside["folder"] / f"dcp {name}") for name in beside if "saved" in name}
    loads = {name: call("load", path, num=2, is_ours=False) for name, path in saved.items()}
    for name, found in loaded(jobs, tmp_path, 3, loads).items():
        assert [one["digest"] for one in found] == [plain(5)] * 3, name
    assert load(None, saved["saved fsdp-tp"], kind="one", num=2, is_ours=False)["digest"] == plain(
        5
    )


@pytest.mark.parametrize("size", [2, 4])
def test_state_of_torchs_own_optimizer_is_loaded(jobs: Jobs, tmp_path: Path, size: int) -> None:
    """The whole state also goes into another store, and what is not held is refused."""
    given: dict[str, tuple[str, dict[str, Any]]] = {"hybrid": ("hybrid", {})}
    there: dict[str, tuple[str, str]] = {"hybrid": ("hybrid", "float32")}
    if size == 2:
        given = {
            "ddp": ("ddp", {}),
            "fsdp2": ("fsdp2", {}),
            "from rank 0": ("fsdp2", {"full": True}),
            "flat": ("fsdp2", {"flat": True}),
        }
        there = {kind: (kind, "bfloat16") for kind in ("ddp", "fsdp2")}
    cases: dict[str, Case] = {
        name: ([[call("from_torch", **how)]] * size, {"kind": kind, **FP32})
        for name, (kind, how) in given.items()
    }
    for name, (kind, dtype) in there.items():
        setting = {"kind": kind, "dtype": dtype}
        cases[f"there {name}"] = ([[call("there_and_back")]] * size, setting)
    ask = do("odd_calls:ask_for_the_state")
    cases["not held"] = ([[["open"], ["step"], ask, ["step"]]] * size, {"kind": "fsdp2"})
    played = run_cases(jobs, tmp_path, cases, widths=WIDTHS)
    assert [rank.failed() for rank in played.pop("not held")] == [["KeyError"]] * size
    for name, ranks in played.items():
        require_success(ranks)
        for found in of_each(ranks, "do"):
            if not name.startswith("there"):
                assert found == plain(5), name
                continue
            assert found["found"] == found["expected"], name
            has_masters = any(key.startswith("master") for key in found["expected"])
            assert has_masters == (there[name.removeprefix("there ")][1] == "bfloat16")


def test_whole_tensors_are_loaded_and_other_shards_are_refused_on_all_ranks(
    jobs: Jobs, tmp_path: Path
) -> None:
    """State of another cut is held before the first step."""
    cases: dict[str, Case] = {
        "cut": ([[call("train")]] * 2, {"kind": "ddp"}),
        "cut/other": ([[call("held_after_restore")]] * 2, {"kind": "fsdp2"}),
        "shards": ([[call("other_shards")]] * 2, {"kind": "fsdp2"}),
    }
    played = run_cases(jobs, tmp_path, cases, widths=WIDTHS, **FP32)
    for ranks in played.values():
        require_success(ranks)
    assert of_each(played["cut/other"], "do") == [plain(3)] * 2
    for number, rank in enumerate(played["shards"]):
        ((shards, bad, is_same),) = values(rank, "do")
        assert "redistribute it" in shards
        assert "MismatchError" in shards
        assert "num_steps" in bad
        assert number == 0 or "rank 0" in bad
        assert is_same == "True"
