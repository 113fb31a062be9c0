"""An error of one rank alone is named on all ranks at once, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.limits import UNREACHED_AGREEMENT_S, UNREACHED_S
from tests.ranks_training.rank_server import Jobs, Rank

KINDS = ("ddp", "fsdp2")
Calls = list[list[Any]]
SEAL: Calls = [["step"], ["checkpoint"], ["result"]]
BEGIN: Calls = [["open"], *SEAL]
GO_ON: Calls = [["settle"], *SEAL, ["verify"]]


def run(jobs: Jobs, folder: Path, kind: str, *calls: Calls) -> list[Rank]:
    """Run ranks, none of which may wait for the limit."""
    job = jobs.start(folder, [*calls], kind=kind, timeout_s=UNREACHED_AGREEMENT_S)
    ranks = job.wait(UNREACHED_S)
    assert [rank.status for rank in ranks] == [0] * len(calls), [rank.outcomes for rank in ranks]
    return ranks


def require_gone_on(jobs: Jobs, folder: Path, kind: str, ranks: list[Rank], step: int) -> None:
    """Check that all ranks have sealed a step after the error, with the bits of plain training."""
    (folder / "plain").mkdir()
    calls: Calls = [["open"], ["step", step]]
    plain = jobs.run(folder / "plain", [calls] * len(ranks), kind=kind, is_plain=True)
    for rank, expected in zip(ranks, plain, strict=True):
        assert rank.of("result")["value"] == step
        assert rank.of("verify")["value"] == []
        assert rank.of("step")["value"] == expected.of("step")["value"]


def errors(rank: Rank) -> list[dict[str, Any]]:
    """Return the calls of a rank that failed."""
    return [one for one in rank.outcomes if one["error"]]


@pytest.mark.parametrize(
    ("kind", "victim", "bad"),
    [
        ("ddp", 0, [["bad_checkpoint", "object"]]),
        ("ddp", 1, [["bad_checkpoint", "path"]]),
        ("fsdp2", 0, [["bad_checkpoint", "metric"]]),
        ("fsdp2", 2, [["bad_checkpoint", "object"]]),
        ("ddp", 2, [["bad_checkpoint", "warning"]]),
        ("fsdp2", 1, [["fail", "open", "model.safetensors"], ["checkpoint"]]),
    ],
)
def test_a_checkpoint_that_one_rank_cannot_capture_fails_on_all(
    jobs: Jobs, tmp_path: Path, kind: str, victim: int, bad: Calls
) -> None:
    """``warning`` stands for Python's ``-W error``, which makes an error of each warning."""
    own = [*BEGIN, ["step"], *bad, *GO_ON]
    others = [*BEGIN, *SEAL, *GO_ON]
    ranks = run(jobs, tmp_path, kind, *[own if rank == victim else others for rank in range(3)])
    causes = set()
    for number, rank in enumerate(ranks):
        (failed,) = errors(rank)
        assert failed["call"] == (bad[-1][0] if number == victim else "result")
        assert failed["error"] == "SealError"
        assert "sealing step 2 failed" in failed["message"]
        assert f"rank {victim}" in failed["message"]
        causes.add(failed["message"].partition(f"rank {victim}")[2].partition(": ")[2])
    assert len(causes) == 1, "all ranks name the same cause"
    require_gone_on(jobs, tmp_path, kind, ranks, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_warnings_as_errors_refuse_one_step_after_a_failed_seal(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    strict = ["strict", "update"]
    on: Calls = [["backward"], strict, strict, ["settle"], ["checkpoint"], ["result"], ["verify"]]
    own = [*BEGIN, ["step"], ["bad_checkpoint"], *on]
    others = [*BEGIN, *SEAL, *on]
    ranks = run(jobs, tmp_path, kind, others, own)
    for number, rank in enumerate(ranks):
        seal, refused = errors(rank)
        assert seal["call"] == ("bad_checkpoint" if number else "result")
        assert refused["error"] == "RuntimeWarning"
        assert "sealing step 2 failed" in refused["message"]
        assert rank.of("result")["value"] == 3
        assert rank.of("verify")["value"] == []
    (tmp_path / "plain").mkdir()
    calls: Calls = [["open"], ["step", 3], ["bits"]]
    plain = jobs.run(tmp_path / "plain", [calls] * 2, kind=kind, is_plain=True)
    again = run(jobs, tmp_path, kind, *[[["open"], ["restore"], ["bits"]]] * 2)
    assert [r.of("bits")["value"] for r in again] == [r.of("bits")["value"] for r in plain]


def test_the_error_of_a_seal_is_raised_once(jobs: Jobs, tmp_path: Path) -> None:
    """A later checkpoint raises it if the user has not seen it on all ranks."""
    fails: tuple[Calls, Calls] = ([["checkpoint"]], [["bad_checkpoint"]])
    seen: Calls = [["result"]]
    seal: Calls = [["checkpoint"], ["result"]]
    calls: list[Calls] = []
    for rank, failing in enumerate(fails):
        own = [*failing, *(seen if rank == 0 else [])]  # seen on both, as the call itself raised it
        unseen = [["step"], *failing, ["step"], ["checkpoint"]]
        calls.append(
            [*BEGIN, ["step"], *own, *seal, ["step"], *own, *SEAL, *unseen, *seal, ["verify"]]
        )
    ranks = run(jobs, tmp_path, "ddp", *calls)
    own_call = ("result", "bad_checkpoint")
    for number, rank in enumerate(ranks):
        found = [one["call"] for one in errors(rank)]
        last = ["checkpoint"] if number == 0 else ["bad_checkpoint", "checkpoint"]
        assert found == [own_call[number]] * 2 + last
        assert rank.of("result")["value"] == 6
        assert rank.of("verify")["value"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_checkpoint_of_a_step_that_one_rank_cannot_capture_fails_on_all(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    own = [*BEGIN, ["bad_checkpoint"], *GO_ON]
    others = [*BEGIN, ["checkpoint"], *GO_ON]
    ranks = run(jobs, tmp_path, kind, others, own)
    for rank in ranks:
        (failed,) = errors(rank)
        assert "object" in failed["message"]
    assert "rank 1" in errors(ranks[0])[0]["message"]
    require_gone_on(jobs, tmp_path, kind, ranks, 2)


def test_pins_that_the_writer_cannot_read_are_an_error_of_the_constructor_on_all(
    jobs: Jobs, tmp_path: Path
) -> None:
    calls: Calls = [["open"], *SEAL, ["close"]]
    run(jobs, tmp_path, "ddp", calls, calls)
    again: Calls = [["open"], ["open"], ["restore"], *SEAL, ["verify"]]
    ranks = run(jobs, tmp_path, "ddp", [["fail", "stat", "/pins"], *again], again)
    for rank in ranks:
        (failed,) = errors(rank)
        assert failed["call"] == "open"
        assert "injected" in failed["message"]
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []
    assert "rank 0" in errors(ranks[1])[0]["message"]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_step_that_one_rank_cannot_take_is_taken_by_none(
    jobs: Jobs, tmp_path: Path, *, sealed: bool
) -> None:
    """The gradient is refused before the ranks are granted a slot, or before they begin to step."""
    before = [*BEGIN, *([] if sealed else [["step"]])]
    on: Calls = [["zero"], *SEAL, ["verify"]]
    own = [*before, ["backward"], ["sparse_gradient"], ["attempt"], *on]
    others = [*before, ["backward"], ["attempt"], *on]
    ranks = run(jobs, tmp_path, "ddp", others, own)
    assert "parse" in errors(ranks[1])[0]["message"]
    (failed,) = errors(ranks[0])
    assert failed["error"] == "RanksError"
    assert "rank 1" in failed["message"]
    assert "parse" in failed["message"]
    require_gone_on(jobs, tmp_path, "ddp", ranks, 2 if sealed else 3)


def test_calls_that_one_rank_makes_in_vain_fail_on_all(jobs: Jobs, tmp_path: Path) -> None:
    def differ(own: Calls, other: Calls) -> tuple[Calls, Calls]:
        return own, other

    pairs = [
        differ([["restore", 99]], [["restore"]]),
        differ([["pin", "best", 99]], [["pin", "best"]]),
        differ([["unpin", "worst"]], [["unpin", "best"]]),
        differ([["load", "torch"]], [["load", "reference"]]),
    ]
    pin: Calls = [["pin", "best"]]
    own = [*BEGIN, *pin, *[call for pair in pairs for call in pair[0]], ["restore"], *GO_ON]
    other = [*BEGIN, *pin, *[call for pair in pairs for call in pair[1]], ["restore"], *GO_ON]
    ranks = run(jobs, tmp_path, "fsdp2", other, own)
    for rank in ranks:
        assert [one["call"] for one in errors(rank)] == ["restore", "pin", "unpin", "load"]
    for failed in errors(ranks[0]):
        assert "rank 1" in failed["message"]
    require_gone_on(jobs, tmp_path, "fsdp2", ranks, 2)


def test_an_error_names_the_call_that_asked_for_a_slot(jobs: Jobs, tmp_path: Path) -> None:
    """A second checkpoint of a step, with other hyper-parameters, moves the state to a new slot."""
    again: Calls = [*BEGIN, ["set", {"lr": 0.5}]]
    checkpoint: Calls = [["checkpoint"], ["result"], ["verify"]]
    own = [*again, ["fail", "create", "owner-1"], ["checkpoint"], *checkpoint]
    ranks = run(jobs, tmp_path, "fsdp2", [*again, ["checkpoint"], *checkpoint], own)
    for rank in ranks:
        (failed,) = errors(rank)
        assert failed["error"] == "RanksError"
        assert failed["message"].startswith("checkpoint(): rank 1")
        assert rank.of("result")["value"] == 1
        assert rank.of("verify")["value"] == []


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("settles", [True, False])
def test_a_part_that_cannot_be_made_durable_costs_no_restart(
    jobs: Jobs, tmp_path: Path, victim: int, *, settles: bool
) -> None:
    """The state of that rank is lost; all ranks go on from the checkpoint before, elsewhere."""
    # With DistributedDataParallel, each rank needs the others in every step.
    lost: Calls = [*SEAL, *([["settle"]] if settles else []), ["backward"], ["attempt"], ["zero"]]
    on: Calls = [*lost, ["restore"], *SEAL, ["verify"]]
    fails = ["fail", "sync", "master.safetensors"]
    ranks = run(
        jobs,
        tmp_path,
        "ddp",
        *[[*BEGIN, *([fails] if rank == victim else []), *on] for rank in (0, 1)],
    )
    for number, rank in enumerate(ranks):
        seal, step = errors(rank)
        assert (seal["call"], seal["error"]) == ("result", "SealError")
        assert step["call"] == "attempt"
        if number != victim:
            assert f"rank {victim}" in seal["message"]
            assert step["error"] == "RanksError"
            assert f"rank {victim}" in step["message"]
        assert "restore()" in step["message"]
        assert rank.of("restore")["value"] == [1, {"step": 1, "rank": number}]
    require_gone_on(jobs, tmp_path, "ddp", ranks, 2)
