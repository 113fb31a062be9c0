"""Ranks whose model is mostly frozen write little at each seal: what the slot's file lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks_training.rank_server import Jobs, Rank

Calls = list[list[Any]]
WIDTHS = (1024, 2048, 4)
NUM_RANKS = 2
NUM_SLOTS = 3
"""Two checkpoints, and one that is written."""

FROZEN = 2 * 1024 * 2048
"""Bytes of the frozen matrix."""

MOST = 2 * 2048 * 4 + 64 * 1024
"""Bytes that are trained, and a constant for the blocks that they end in and the header."""

MOVED = ["do", "tests.ranks_training.frozen:moved"]
BEGIN: Calls = [["do", "tests.ranks_training.frozen:begin"], ["open"]]
SEAL: Calls = [["step"], MOVED, ["checkpoint"], ["result"], MOVED]


def of(name: str, *arguments: Any) -> list[Any]:
    """Return a call of one of the functions for ranks with frozen tensors."""
    return ["do", f"tests.ranks_training.frozen:{name}", *arguments]


def calls_of(calls: Calls, rank: int) -> Calls:
    """Return the calls of one rank: those of all, and its ``only`` ones."""
    return [
        one[2] if one[0] == "only" else one for one in calls if one[0] != "only" or one[1] == rank
    ]


def run(jobs: Jobs, folder: Path, kind: str, *calls: Calls) -> list[Rank]:
    ranks = jobs.run(folder, calls, kind=kind, widths=WIDTHS, given=True)
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.errors for rank in ranks]
    return ranks


def moves(rank: Rank) -> list[list[int]]:
    """Return the bytes written and read back in each seal."""
    found = [one["value"] for one in rank.outcomes if one["call"] == "do"]
    return found[2::2]


def require_whole(rank: Rank, folder: Path, step: int) -> None:
    """Check the newest checkpoint with its digests, and its model with safetensors' own file."""
    assert rank.of("verify")["value"] == []
    found = load_file(folder / f"run/step-{step:08}/model.safetensors")
    expected = load_file(folder / "values")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_what_is_frozen_is_written_once_for_each_slot(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    end: Calls = [["write_values", "values"], ["verify"]]
    first = [*BEGIN, *SEAL * (NUM_SLOTS + 3), *end]
    ranks = run(jobs, tmp_path, kind, *[first] * NUM_RANKS)
    for rank in ranks:
        found = moves(rank)
        assert all(written >= FROZEN // NUM_RANKS for written, _ in found[:NUM_SLOTS])
        assert all(written <= MOST for written, _ in found[NUM_SLOTS:])
        assert not any(read for _, read in found)
        require_whole(rank, tmp_path, NUM_SLOTS + 3)
    later = [*BEGIN, ["restore"], *SEAL * (NUM_SLOTS + 2), *end]
    for rank in run(jobs, tmp_path, kind, *[later] * NUM_RANKS):
        found = moves(rank)
        assert all(written <= MOST for written, _ in found)
        assert all(read >= FROZEN // NUM_RANKS for _, read in found[: NUM_SLOTS - 1])
        assert not any(read for _, read in found[NUM_SLOTS:])
        require_whole(rank, tmp_path, 2 * NUM_SLOTS + 5)


@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_seal_that_failed_on_one_rank_all_write_everything(
    jobs: Jobs, tmp_path: Path, victim: int
) -> None:
    fails: Calls = [["fail", "write", "model.safetensors"]]
    failed: Calls = [["step"], MOVED, ["checkpoint"], ["settle"], MOVED]
    calls = [
        [
            *BEGIN,
            *SEAL * (NUM_SLOTS + 1),
            *(fails if rank == victim else []),
            *failed,
            *SEAL * (2 * NUM_SLOTS + 1),
            ["write_values", "values"],
            ["verify"],
        ]
        for rank in range(NUM_RANKS)
    ]
    for rank in run(jobs, tmp_path, "fsdp2", *calls):
        found = [written for written, _ in moves(rank)][NUM_SLOTS + 2 :]
        assert found[0] >= FROZEN // NUM_RANKS
        # Only the ranks' next agreement on the slot gives its content a name again.
        assert found[NUM_SLOTS] >= FROZEN // NUM_RANKS
        others = [*found[1:NUM_SLOTS], *found[NUM_SLOTS + 1 :]]
        assert all(written <= MOST for written in others), found
        require_whole(rank, tmp_path, 3 * NUM_SLOTS + 3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_seal_that_fails_when_the_state_has_moved_on_spoils_nothing_known_of_the_next_slot(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    calls: Calls = [
        *BEGIN,
        of("fill", 1.0),
        *SEAL * (NUM_SLOTS + 1),
        ["step"],
        ["only", 1, of("hold_sync")],
        ["checkpoint"],
        ["step"],  # to the next slot, while the seal has not failed yet
        ["only", 1, of("fail_sync")],
        ["settle"],
        of("fill", 2.0),
        ["checkpoint"],
        ["result"],
        of("fill", 1.0),
        *SEAL * NUM_SLOTS,
        ["write_values", "values"],
        ["verify"],
    ]
    each = [calls_of(calls, rank) for rank in range(NUM_RANKS)]
    for rank in run(jobs, tmp_path, kind, *each):
        assert "injected failure of sync" in rank.of("settle")["value"]
        require_whole(rank, tmp_path, NUM_SLOTS + 3 + NUM_SLOTS)


def test_ranks_write_the_file_of_their_slot_if_the_next_one_was_refused_before_the_seal_failed(
    jobs: Jobs, tmp_path: Path
) -> None:
    calls: Calls = [
        *BEGIN,
        ["step"],
        ["only", 1, of("hold_sync")],
        ["checkpoint"],
        ["only", 2, ["fail", "make_dir", "owner-2/part-"]],
        ["keep_error", "step"],  # the other ranks have got a slot ready
        ["only", 1, of("fail_sync")],
        ["settle"],
        ["step"],  # in the first slot
        ["checkpoint"],
        ["result"],
        ["write_values", "values"],
        ["verify"],
    ]
    for rank in run(jobs, tmp_path, "fsdp2", *(calls_of(calls, rank) for rank in range(3))):
        assert rank.of("keep_error")["value"]
        assert "injected failure of sync" in rank.of("settle")["value"]
        require_whole(rank, tmp_path, 2)


def test_a_rank_goes_on_in_place_although_its_drive_is_slow_to_take_its_part_back(
    jobs: Jobs, tmp_path: Path
) -> None:
    calls: Calls = [
        *BEGIN[:1],
        ["only", 1, of("slow_tables", 0.3)],
        *BEGIN[1:],
        ["step"],
        ["only", 0, ["fail", "sync", "model.safetensors"]],
        ["checkpoint"],
        ["only", 0, ["keep_error", "result"]],
        ["step"],  # rank 1 asks for a slot before it has taken back the one that was sealed
        ["settle"],
        ["checkpoint"],
        ["result"],
        ["write_values", "values"],
        ["verify"],
    ]
    for rank in run(jobs, tmp_path, "fsdp2", *(calls_of(calls, r) for r in range(NUM_RANKS))):
        require_whole(rank, tmp_path, 2)


def test_what_another_rank_could_not_sync_is_written_anew_after_a_torn_step_of_the_writer(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Two faults at once: the writer has no slot of its own in the seal whose sync fails."""
    first: Calls = [*BEGIN, *SEAL * (NUM_SLOTS + 1), ["close"]]
    run(jobs, tmp_path, "fsdp2", *[first] * NUM_RANKS)
    calls: Calls = [
        *BEGIN,
        ["restore"],
        of("fill", 2.0),
        ["only", 0, ["fail", "read", "exp_avg"]],
        ["only", 0, ["keep_error", "step"]],
        ["only", 1, ["step"]],
        ["only", 1, ["fail", "sync", "model.safetensors"]],
        ["keep_error", "checkpoint"],
        ["settle"],
        ["restore"],
        of("fill", 2.0),
        *SEAL,
        ["write_values", "values"],
        ["verify"],
    ]
    each = [calls_of(calls, rank) for rank in range(NUM_RANKS)]
    torn, other = run(jobs, tmp_path, "fsdp2", *each)
    tries = [
        [one["value"] for one in rank.outcomes if one["call"] == "keep_error"]
        for rank in (torn, other)
    ]
    assert tries == [["StorageError", "BrokenOptimizerError"], [""]]
    assert "injected failure of sync" in other.of("settle")["value"]
    written, _ = [one["value"] for one in other.outcomes if one["call"] == "do"][-1]
    assert written >= FROZEN // NUM_RANKS
    for rank in (torn, other):
        require_whole(rank, tmp_path, NUM_SLOTS + 2)
