"""State of several ranks in and out by torch's own functions for state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_dcp_load import plain
from tests.ranks_training.test_readers import WIDTHS, trained

CALLS = "tests.ranks_training.dict_calls"
FP32 = {"dtype": "float32", "widths": WIDTHS}


def values(jobs: Jobs, folder: Path, num_ranks: int, kind: str, call: list[Any]) -> list[Any]:
    """Let ranks make one call; return what each of them says."""
    folder.mkdir(exist_ok=True)
    found = []
    call = ["do", f"{CALLS}:{call[0]}", *call[1:]]
    for rank in jobs.run(folder, [[call]] * num_ranks, kind=kind, **FP32):
        assert rank.failed() == [], rank.of("do")["message"]
        found.append(rank.of("do")["value"])
    return found


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp-3": (3, "", {}),
    "fsdp2-3-flat": (3, "fsdp2", {"flat": True}),
    "fsdp2-3-amsgrad": (3, "fsdp2", {"amsgrad": True}),
    "fsdp2-2-momentum": (2, "fsdp2", {"optimizer": "SGD", "momentum": 0.9}),
    "fsdp2-2-unstepped": (2, "fsdp2", {"skip": "maybe"}),
    "fsdp2-3-full": (3, "fsdp2", {"full": True}),
    "tensor-parallel-2": (2, "tp", {}),
    "fsdp-and-tensor-parallel-4": (4, "fsdp-tp", {}),
    "hsdp-4": (4, "hsdp", {}),
}
"""Ranks, layout and arguments of each training."""


@pytest.mark.parametrize(("num_ranks", "layout", "how"), CASES.values(), ids=CASES)
def test_each_rank_has_the_state_that_torchs_optimizer_would_have(
    jobs: Jobs, tmp_path: Path, num_ranks: int, layout: str, how: dict[str, Any]
) -> None:
    kind = "" if layout else "ddp"
    call = ["beside_torch", layout, "", how]
    for found in values(jobs, tmp_path, num_ranks, kind, call):
        assert found["different"] == ""
        assert found["stepped"]
        assert found["empty"]


SAVED: dict[str, tuple[int, str, int, str]] = {
    "fsdp2-2-to-3": (2, "fsdp2", 3, "fsdp2"),
    "ddp-2-to-fsdp2-2": (2, "", 2, "fsdp2"),
    "fsdp-and-tensor-parallel-to-one": (4, "fsdp-tp", 1, "one"),
}


@pytest.mark.parametrize(("saved_by", "layout", "loaded_by", "into"), SAVED.values(), ids=SAVED)
def test_dcp_saves_it_and_torchs_own_optimizer_goes_on_to_the_same_bits(
    jobs: Jobs, tmp_path: Path, saved_by: int, layout: str, loaded_by: int, into: str
) -> None:
    out = str(tmp_path / "dcp")
    kind = "" if layout else "ddp"
    values(jobs, tmp_path / "saved", saved_by, kind, ["beside_torch", layout, out])
    loads = ["load_saved", out, WIDTHS, into, 2]
    for found in values(jobs, tmp_path / "loaded", loaded_by, "one", loads):
        assert found == plain(5)


@pytest.mark.parametrize(
    ("num_ranks", "layout", "how"),
    [
        (2, "", {}),
        (3, "fsdp2", {}),
        (2, "fsdp2", {"full": True}),
        (2, "fsdp2", {"flat": True}),
        (4, "hsdp", {}),
    ],
    ids=["ddp", "fsdp2", "fsdp2-from-rank-0", "fsdp2-flat", "hsdp"],
)
def test_state_of_torchs_own_optimizer_is_loaded(
    jobs: Jobs, tmp_path: Path, num_ranks: int, layout: str, how: dict[str, Any]
) -> None:
    kind = "" if layout else "ddp"
    for found in values(jobs, tmp_path, num_ranks, kind, ["from_torch", layout, how]):
        assert found == plain(5)


@pytest.mark.parametrize(("num_ranks", "layout"), [(2, ""), (3, "fsdp2"), (4, "hsdp")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_state_goes_into_another_store(
    jobs: Jobs, tmp_path: Path, num_ranks: int, layout: str, dtype: str
) -> None:
    setting = {"kind": "" if layout else "ddp", "dtype": dtype, "widths": WIDTHS}
    call = ["do", f"{CALLS}:there_and_back", layout]
    for rank in jobs.run(tmp_path, [[call]] * num_ranks, **setting):
        assert rank.failed() == [], rank.of("do")["message"]
        found = rank.of("do")["value"]
        assert found["found"] == found["expected"]
        masters = [name for name in found["expected"] if name.startswith("master")]
        assert bool(masters) == (dtype == "bfloat16")


def test_state_of_another_cut_is_held_before_the_first_step(jobs: Jobs, tmp_path: Path) -> None:
    trained(jobs, tmp_path, 3, {"kind": "ddp", "dtype": "float32"}, {})
    for found in values(jobs, tmp_path, 2, "", ["held_after_restore", "fsdp2"]):
        assert found == plain(3)


def test_whole_tensors_are_loaded_and_other_shards_are_refused_on_all_ranks(
    jobs: Jobs, tmp_path: Path
) -> None:
    found = values(jobs, tmp_path, 2, "", ["other_shards", "fsdp2"])
    for number, (shards, bad, is_same) in enumerate(found):
        assert "redistribute it" in shards
        assert "MismatchError" in shards
        assert "num_steps" in bad
        assert number == 0 or "rank 0" in bad
        assert is_same == "True"
