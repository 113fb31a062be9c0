"""An error of one rank alone is named on all ranks at once, and training goes on.

What it cannot capture, write or take, a full disk, and bytes that are flipped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.cases import (
    BEGIN,
    ROUND,
    Calls,
    Case,
    do,
    errors,
    in_memory,
    of_each,
    require_success,
    run_all,
    run_cases,
    values,
)
from tests.ranks_training.rank_server import Jobs, Rank
from tests.stores.files import flip_on_disk

SEAL = ROUND[1:]
GO_ON: Calls = [["settle"], *ROUND, ["verify"]]
MEMORY: dict[str, Case] = {f"memory-{kind}": in_memory(3, kind=kind) for kind in ("ddp", "fsdp2")}


def for_victim(victim: int, own: Calls, other: Calls, size: int = 2) -> list[Calls]:
    """Return the calls of all ranks, of which one has its own."""
    return [own if rank == victim else other for rank in range(size)]


def require_gone_on(
    played: Mapping[str, list[Rank]], name: str, kind: str, step: int
) -> list[Rank]:
    """Check that all ranks have sealed a step after the error, with the bits of plain training."""
    ranks = played[name]
    assert of_each(ranks, "result") == [step] * len(ranks), name
    assert of_each(ranks, "verify") == [[]] * len(ranks), name
    plain = [values(rank, "step")[step - 1] for rank in played[f"memory-{kind}"]]
    assert of_each(ranks, "step") == plain, name
    return ranks


CAPTURES: dict[str, tuple[str, int, Calls]] = {
    "object": ("ddp", 0, [["bad_checkpoint", "object"]]),
    "path": ("fsdp2", 1, [["bad_checkpoint", "path"]]),
    "metric": ("fsdp2", 0, [["bad_checkpoint", "metric"]]),
    "warning as error": ("ddp", 1, [["bad_checkpoint", "warning"]]),
    "model file": ("fsdp2", 1, [["fail", "open", "model.safetensors"], ["checkpoint"]]),
}
"""Kind, rank, and what that rank cannot store."""


def test_a_checkpoint_that_one_rank_cannot_capture_fails_on_all(jobs: Jobs, tmp_path: Path) -> None:
    cases = dict(MEMORY)
    for name, (kind, victim, bad) in CAPTURES.items():
        own, other = [*BEGIN, ["step"], *bad, *GO_ON], [*BEGIN, *ROUND, *GO_ON]
        cases[name] = (for_victim(victim, own, other), {"kind": kind})
    played = run_cases(jobs, tmp_path, cases)
    for name, (kind, victim, bad) in CAPTURES.items():
        causes = set()
        for number, rank in enumerate(require_gone_on(played, name, kind, 3)):
            (failed,) = errors(rank)
            assert failed["call"] == (bad[-1][0] if number == victim else "result"), name
            assert failed["error"] == "SealError"
            assert "sealing step 2 failed" in failed["message"]
            assert f"rank {victim}" in failed["message"]
            causes.add(failed["message"].partition(f"rank {victim}")[2].partition(": ")[2])
        assert len(causes) == 1, "all ranks name the same cause"


WRITES: dict[str, tuple[int, Calls, int]] = {
    "full-0": (0, [["fail", "write_bytes", "model.safetensors", errno.ENOSPC]], errno.ENOSPC),
    "full-1": (1, [["fail", "write_bytes", "model.safetensors", errno.ENOSPC]], errno.ENOSPC),
    "eio-1": (1, [["fail", "sync", "model.safetensors", errno.EIO]], errno.EIO),
}


def test_a_write_that_fails_in_a_seal_fails_it_on_all(jobs: Jobs, tmp_path: Path) -> None:
    cases = dict(MEMORY)
    for name, (victim, fails, _) in WRITES.items():
        then: Calls = [*SEAL, ["num_failed"], *GO_ON]
        own, other = [*BEGIN, ["step"], *fails, *then], [*BEGIN, ["step"], *then]
        cases[name] = (for_victim(victim, own, other), {"kind": "fsdp2"})
    played = run_cases(jobs, tmp_path, cases)
    for name, (victim, _, number) in WRITES.items():
        ranks = require_gone_on(played, name, "fsdp2", 3)
        assert of_each(ranks, "num_failed") == [victim == 0, victim == 1]
        for rank in ranks:
            (failed,) = errors(rank)
            assert (failed["call"], failed["error"]) == ("result", "SealError")
            assert os.strerror(number) in failed["message"]
        assert f"rank {victim}" in errors(ranks[1 - victim])[0]["message"]


def test_the_step_after_a_failed_seal(jobs: Jobs, tmp_path: Path) -> None:
    """It warns, and can be refused by warnings as errors; a parameter may be thawed in it.

    The state of that parameter needs other files than those of the slot on which training would
    have gone on.
    """
    strict = ["strict", "update"]
    on: Calls = [["backward"], strict, strict, ["settle"], *SEAL, ["verify"], ["bits"]]
    cases: dict[str, Case] = {**MEMORY}
    for kind in ("ddp", "fsdp2"):
        own, other = [*BEGIN, ["step"], ["bad_checkpoint"], *on], [*BEGIN, *ROUND, *on]
        cases[f"strict-{kind}"] = ([other, own], {"kind": kind})
    thaw = do("odd_calls:step_thawed")
    full: Calls = [["fail", "write_bytes", "model.safetensors", errno.ENOSPC]]
    thawed: Calls = [["settle"], thaw, thaw, *ROUND, ["verify"], ["close"], ["open"], ["restore"]]
    for name, fails in (("whole", []), ("failed", full)):
        begun: Calls = [*BEGIN, ["step"]]
        calls = [[*begun, *own, *SEAL, *thawed, ["bits"]] for own in ([], fails)]
        cases[name] = (calls, {"kind": "ddp"})
    played = run_cases(jobs, tmp_path, cases)
    for kind in ("ddp", "fsdp2"):
        for number, rank in enumerate(played[f"strict-{kind}"]):
            seal, step = errors(rank)
            assert seal["call"] == ("bad_checkpoint" if number else "result")
            assert step["error"] == "RuntimeWarning"
            assert "sealing step 2 failed" in step["message"]
            assert rank.of("result")["value"] == 3
            assert rank.of("verify")["value"] == []
            plain = played[f"memory-{kind}"][number]
            assert rank.of("bits")["value"] == plain.of("step")["value"]
    require_success(played["whole"])
    assert [rank.failed() for rank in played["failed"]] == [["SealError"]] * 2
    for ranks in (played["whole"], played["failed"]):
        assert [step for step, _ in of_each(ranks, "restore")] == [5, 5]
        assert of_each(ranks, "bits") == of_each(played["whole"], "bits")
        assert of_each(ranks, "verify") == [[], []]


def test_the_error_of_a_seal_is_raised_once(jobs: Jobs, tmp_path: Path) -> None:
    """A later checkpoint raises it if the user has not seen it on all ranks."""
    fails: tuple[Calls, Calls] = ([["checkpoint"]], [["bad_checkpoint"]])
    calls: list[Calls] = []
    for rank, failing in enumerate(fails):
        own = [*failing, *([["result"]] if rank == 0 else [])]  # seen on both: the call raised it
        unseen = [["step"], *failing, ["step"], ["checkpoint"]]
        calls.append(
            [*BEGIN, ["step"], *own, *SEAL, ["step"], *own, *ROUND, *unseen, *SEAL, ["verify"]]
        )
    ranks = jobs.run(tmp_path, calls)
    for number, rank in enumerate(ranks):
        found = [one["call"] for one in errors(rank)]
        last = ["checkpoint"] if number == 0 else ["bad_checkpoint", "checkpoint"]
        assert found == [("result", "bad_checkpoint")[number]] * 2 + last
        assert rank.of("result")["value"] == 6
        assert rank.of("verify")["value"] == []


def test_other_calls_that_fail_on_one_rank_fail_on_all(jobs: Jobs, tmp_path: Path) -> None:
    cases = dict(MEMORY)
    # A second checkpoint of a step.
    second = [[*BEGIN, [name], *GO_ON] for name in ("checkpoint", "bad_checkpoint")]
    cases["second"] = (second, {"kind": "fsdp2"})
    # Pins that the writer cannot read.
    again: Calls = [["open"], ["open"], ["restore"], *GO_ON]
    pins: Calls = [*BEGIN, ["close"]]
    unreadable: Calls = [["fail", "stat", "/pins"]]
    cases["pins"] = ([[*pins, *unreadable, *again], [*pins, *again]], {"kind": "ddp"})
    # A gradient that is refused before the ranks are granted a slot, or before they step in one.
    for name, begun in (("granted", BEGIN), ("in a slot", [*BEGIN, ["step"]])):
        on: Calls = [["attempt"], ["zero"], *GO_ON]
        sparse: Calls = [*begun, ["backward"], ["sparse_gradient"], *on]
        cases[name] = ([[*begun, ["backward"], *on], sparse], {"kind": "ddp"})
    # A second checkpoint of a step, with other hyper-parameters, moves the state to a new slot.
    moved: Calls = [*BEGIN, ["set", {"lr": 0.5}]]
    end: Calls = [["checkpoint"], *SEAL, ["verify"]]
    cases["slot"] = ([[*moved, *end], [*moved, ["fail", "create", "owner-1"], *end]], {})
    # A full disk when a slot is granted to the step.
    full: Calls = [["backward"], ["attempt"], ["zero"], *GO_ON]
    fails: Calls = [["fail", "create", "owner-1", errno.ENOSPC]]
    cases["full"] = ([[*BEGIN, *full], [*BEGIN, *fails, *full]], {"kind": "fsdp2"})
    played = run_cases(jobs, tmp_path, cases)

    first, other = (errors(rank) for rank in require_gone_on(played, "second", "fsdp2", 2))
    assert len(first) == len(other) == 1
    assert "rank 1" in first[0]["message"]
    assert "object" in other[0]["message"]
    for rank in require_gone_on(played, "pins", "ddp", 2):
        (failed,) = errors(rank)
        assert failed["call"] == "open"
        assert "injected" in failed["message"]
    assert "rank 0" in errors(played["pins"][1])[0]["message"]
    for name, step in (("granted", 2), ("in a slot", 3)):
        ((own,), (other,)) = (errors(r) for r in require_gone_on(played, name, "ddp", step)[::-1])
        assert "parse" in own["message"]
        assert other["error"] == "RanksError"
        assert "rank 1" in other["message"]
        assert "parse" in other["message"]
    for rank in played["slot"]:
        (failed,) = errors(rank)
        assert failed["error"] == "RanksError"
        assert failed["message"].startswith("checkpoint(): rank 1")
        assert rank.of("result")["value"] == 1
        assert rank.of("verify")["value"] == []
    for rank in require_gone_on(played, "full", "fsdp2", 2):
        (failed,) = errors(rank)
        assert (failed["call"], failed["error"]) == ("attempt", "RanksError")
        assert "step(): rank 1" in failed["message"]
        assert os.strerror(errno.ENOSPC) in failed["message"]


def test_a_part_that_cannot_be_made_durable_costs_no_restart(jobs: Jobs, tmp_path: Path) -> None:
    """The state of that rank is lost; all ranks go on from the checkpoint before, elsewhere."""
    # With DistributedDataParallel, each rank needs the others in every step.
    cases = dict(MEMORY)
    for victim, settles in ((0, True), (1, False)):
        waits: Calls = [["settle"]] if settles else []
        lost: Calls = [*ROUND, *waits, ["backward"], ["attempt"], ["zero"], ["restore"]]
        on: Calls = [*lost, *ROUND, ["verify"]]
        fails: Calls = [*BEGIN, ["fail", "sync", "master.safetensors"], *on]
        cases[str(victim)] = (for_victim(victim, fails, [*BEGIN, *on]), {})
    played = run_cases(jobs, tmp_path, cases, kind="ddp")
    for victim in (0, 1):
        for number, rank in enumerate(require_gone_on(played, str(victim), "ddp", 2)):
            seal, step = errors(rank)
            assert (seal["call"], seal["error"]) == ("result", "SealError")
            assert step["call"] == "attempt"
            if number != victim:
                assert f"rank {victim}" in seal["message"]
                assert step["error"] == "RanksError"
                assert f"rank {victim}" in step["message"]
            assert "restore()" in step["message"]
            assert rank.of("restore")["value"] == [1, {"step": 1, "rank": number}]


@pytest.mark.parametrize("what", ["owner-1", "model"])
def test_a_flipped_byte_takes_all_ranks_to_the_checkpoint_before(
    jobs: Jobs, tmp_path: Path, what: str
) -> None:
    made = run_all(jobs, tmp_path, [[*BEGIN, *ROUND]] * 2, kind="fsdp2")
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        file = Path(checkpoint.path) / "model.safetensors"
        if what != "model":
            file = Path(checkpoint.owners[0].path) / "master.safetensors"
    flip_on_disk(file, file.stat().st_size - 8 if what == "model" else 4100)
    calls: list[Any] = [["open"], ["restore", {"verify": True}], *ROUND, ["verify"]]
    ranks = run_all(jobs, tmp_path, [calls] * 2, kind="fsdp2")
    for number, rank in enumerate(ranks):
        assert rank.of("restore")["value"] == [1, {"step": 1, "rank": number}]
        assert any("is quarantined" in said for said in rank.of("restore")["warnings"])
        assert rank.of("step")["value"] == made[number].of("step")["value"]
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []
