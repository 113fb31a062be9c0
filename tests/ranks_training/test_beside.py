"""Ranks with steps beside the forward: the bits of training in memory, and the step is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.cases import (
    Case,
    compare,
    do,
    of_each,
    require_success,
    run_cases,
)
from tests.ranks_training.rank_server import Jobs

KINDS = ("ddp", "fsdp2")
Scene = tuple[str, str, dict[str, Any]]


def play(jobs: Jobs, folder: Path, scenes: dict[str, Scene]) -> dict[str, list[Any]]:
    """Play scenes of `beside`, all of which succeed; return what each rank says of each."""
    cases: dict[str, Case] = {
        name: ([[[*do("beside:play", scene, kind), how]]] * 2, {})
        for name, (scene, kind, how) in scenes.items()
    }
    played = run_cases(jobs, folder, cases, kind="")
    for ranks in played.values():
        require_success(ranks)
    return {name: of_each(ranks, "do") for name, ranks in played.items()}


TRAININGS = {
    "ddp": (2, ["ddp_trainings:Accumulated", "ddp_trainings:TorchScaler"]),
    "fsdp2": (2, ["Mixed", "Prefetched", "Accumulated"]),
    "4 ranks": (4, ["mesh_trainings:Hsdp", "fsdp2_trainings:Scaled"]),
}


@pytest.mark.parametrize(("size", "trainings"), TRAININGS.values(), ids=TRAININGS)
def test_the_bits_are_those_of_training_in_memory(
    jobs: Jobs, tmp_path: Path, size: int, trainings: list[str]
) -> None:
    """Each step is sealed at once, and the model is evaluated between steps."""
    named = [one if ":" in one else f"fsdp2_trainings:{one}" for one in trainings]
    compare(jobs, tmp_path, named, size, beside=True)


def test_the_forward_begins_while_the_step_goes_on_and_readers_wait(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The chunk that is needed last is held back until the first layer has run.

    With DistributedDataParallel the last rank holds back its own, which the others wait for.
    """
    scenes: dict[str, Scene] = {
        **{kind: ("hidden", kind, {}) for kind in KINDS},
        **{f"readers {kind}": ("readers", kind, {}) for kind in KINDS},
    }
    for name, found in play(jobs, tmp_path, scenes).items():
        said = {"wrong": []} if name.startswith("readers") else {"hidden": True}
        assert found == [{"different": [], **said}] * 2, name


def test_a_checkpoint_that_some_ranks_ask_for_after_the_step_and_some_amid_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Also after a seal that failed."""
    scenes: dict[str, Scene] = {
        "after": ("sealed_apart", "fsdp2", {"fails": False}),
        **{f"failed {kind}": ("sealed_apart", kind, {"fails": True}) for kind in KINDS},
    }
    played = play(jobs, tmp_path, scenes)
    assert [(rank["held"], rank["errors"]) for rank in played["after"]] == [(True, []), (False, [])]
    for name, found in played.items():
        for rank in found:
            assert (rank["sealed"], rank["different"]) == (4, []), name
            if name != "after":
                assert rank["held"] is False
                (said,) = rank["errors"]
                assert "sealing step 3 failed" in said


def test_a_step_that_fails_on_one_rank_and_the_call_after_it(jobs: Jobs, tmp_path: Path) -> None:
    """FSDP2 sends nothing in a step, so the other ranks learn of it in the next common call."""
    scenes: dict[str, Scene] = {
        "ddp": ("torn", "ddp", {"failing": 0}),
        "fsdp2": ("torn", "fsdp2", {"failing": 1}),
        "sealed": ("torn", "fsdp2", {"failing": 1, "then": "checkpoint"}),
    }
    for name, found in play(jobs, tmp_path, scenes).items():
        for rank in found:
            assert (rank["restored"], rank["sealed"], rank["different"]) == (2, 4, []), name
        errors = [rank["error"] for rank in found]
        if name == "ddp":
            for error in errors:
                assert error.startswith("RanksError: rank 0 of 2 failed in the middle of")
                assert "StorageError: state: injected" in error
        elif name == "fsdp2":
            assert [error.split(":")[0] for error in errors] == ["", "StorageError"]
        else:
            assert all("injected" in error for error in errors), (name, errors)


def test_a_seal_that_cannot_begin_on_one_rank_when_the_step_has_ended_fails_on_all(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The error that `result` has raised on all ranks is in the way of no later call."""
    scenes: dict[str, Scene] = {kind: ("refused_seal", kind, {"victim": 1}) for kind in KINDS}
    for name, found in play(jobs, tmp_path, scenes).items():
        for rank in found:
            assert (rank["sealed"], rank["different"]) == (4, []), name
            assert rank["error"].startswith("SealError: "), name
            assert "injected" in rank["error"]
            assert rank["then"] == ["", ""]
