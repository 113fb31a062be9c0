"""A full disk, a failed write or a flipped byte on one rank of three: named, or put right."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.limits import UNREACHED_AGREEMENT_S, UNREACHED_S
from tests.ranks_training.rank_server import Jobs
from tests.stores.files import flip_on_disk

Calls = list[list[Any]]
SEAL: Calls = [["step"], ["checkpoint"], ["result"]]
BEGIN: Calls = [["open"], *SEAL]
FULL = "No space left"


@pytest.mark.parametrize(
    ("victim", "number"),
    [(0, errno.ENOSPC), (2, errno.ENOSPC), (0, errno.EIO), (2, errno.EIO)],
    ids=["full-0", "full-2", "eio-0", "eio-2"],
)
def test_a_write_that_fails_in_a_seal_fails_it_on_all_and_training_goes_on(
    jobs: Jobs, tmp_path: Path, victim: int, number: int
) -> None:
    full: Calls = [["fail", "write_bytes", "model.safetensors", number]]
    seal, then = SEAL[1:], [["num_failed"], ["settle"], *SEAL, ["verify"]]
    own = [*BEGIN, ["step"], *full, *seal, *then]
    other = [*BEGIN, ["step"], *seal, *then]
    calls = [own if rank == victim else other for rank in range(3)]
    ranks = jobs.start(tmp_path, calls, kind="fsdp2", timeout_s=UNREACHED_AGREEMENT_S).wait(
        UNREACHED_S
    )
    assert [rank.status for rank in ranks] == [0, 0, 0], [rank.outcomes for rank in ranks]
    for own_number, rank in enumerate(ranks):
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert (failed["call"], failed["error"]) == ("result", "SealError")
        assert os.strerror(number) in failed["message"]
        if own_number != victim:
            assert f"rank {victim}" in failed["message"]
        assert rank.of("num_failed")["value"] == (own_number == victim)
        assert rank.of("result")["value"] == 3
        assert rank.of("verify")["value"] == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_parameter_is_trained_from_the_step_after_a_seal_that_failed(
    jobs: Jobs, tmp_path: Path, victim: int
) -> None:
    """Its state needs other files than those of the slot on which training would have gone on."""
    full: Calls = [["fail", "write_bytes", "model.safetensors", errno.ENOSPC]]
    thaw: Calls = [["do", "tests.ranks_training.test_one_bad_drive:step_thawed"]]
    then: Calls = [
        ["settle"],
        *thaw,
        *thaw,
        *SEAL,
        ["verify"],
        ["close"],
        ["open"],
        ["restore"],
        ["bits"],
    ]
    found = []
    for fails in (False, True):
        own: Calls = [*BEGIN, ["step"], *(full if fails else []), *SEAL[1:], *then]
        other: Calls = [*BEGIN, ["step"], *SEAL[1:], *then]
        calls = [own if rank == victim else other for rank in range(2)]
        folder = tmp_path / f"fails-{fails}"
        folder.mkdir()
        ranks = jobs.start(folder, calls, timeout_s=UNREACHED_AGREEMENT_S).wait(UNREACHED_S)
        assert [rank.status for rank in ranks] == [0, 0], [rank.outcomes for rank in ranks]
        for rank in ranks:
            failed = [one["call"] for one in rank.outcomes if one["error"]]
            assert failed == (["result"] if fails else [])
            assert rank.of("verify")["value"] == []
            assert rank.of("restore")["value"][0] == 5
        found.append([rank.of("bits")["value"] for rank in ranks])
    assert found[0] == found[1]


def step_thawed(calls: Any) -> None:
    """Take a step in which the parameter that was frozen has a gradient."""
    calls.backward()
    model = calls.model.module
    model.frozen.requires_grad_(True)
    model.frozen.grad = torch.full_like(model.frozen, 0.5)
    calls.update()


def test_a_full_disk_in_the_grant_is_named_on_all_and_the_step_can_be_taken_again(
    jobs: Jobs, tmp_path: Path
) -> None:
    full: Calls = [["fail", "create", "owner-2", errno.ENOSPC]]
    then: Calls = [["backward"], ["attempt"], ["num_failed"], ["zero"], *SEAL, ["verify"]]
    calls = [[*BEGIN, *(full if rank == 2 else []), *then] for rank in range(3)]
    ranks = jobs.start(tmp_path, calls, kind="fsdp2", timeout_s=UNREACHED_AGREEMENT_S).wait(
        UNREACHED_S
    )
    assert [rank.status for rank in ranks] == [0, 0, 0], [rank.outcomes for rank in ranks]
    for number, rank in enumerate(ranks):
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert (failed["call"], failed["error"]) == ("attempt", "RanksError")
        assert "step(): rank 2" in failed["message"]
        assert FULL in failed["message"]
        assert rank.of("num_failed")["value"] == (number == 2)
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []


@pytest.mark.parametrize("what", ["owner-2", "model"])
def test_a_flipped_byte_takes_all_ranks_to_the_checkpoint_before(
    jobs: Jobs, tmp_path: Path, what: str
) -> None:
    made = jobs.run(tmp_path, [[*BEGIN, *SEAL]] * 3, kind="fsdp2")
    assert [rank.of("result")["value"] for rank in made] == [2, 2, 2]
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        (path,) = [
            Path(one.path_in(str(tmp_path / "run")))
            for one in checkpoint.manifest.owners
            if one.owner == 2
        ]
        file = path / "master.safetensors"
        if what == "model":
            file = Path(checkpoint.path) / "model.safetensors"
    flip_on_disk(file, file.stat().st_size - 8 if what == "model" else 4100)
    calls: Calls = [["open"], ["restore", {"verify": True}], *SEAL, ["verify"]]
    ranks = jobs.start(tmp_path, [calls] * 3, kind="fsdp2", timeout_s=UNREACHED_AGREEMENT_S).wait(
        UNREACHED_S
    )
    assert [rank.status for rank in ranks] == [0, 0, 0], [rank.outcomes for rank in ranks]
    for number, rank in enumerate(ranks):
        assert rank.of("restore")["value"] == [1, {"step": 1, "rank": number}]
        assert any("is quarantined" in said for said in rank.of("restore")["warnings"])
        assert rank.of("step")["value"] == made[number].of("step")["value"]
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []
