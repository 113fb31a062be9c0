"""An error of one rank alone is named on all ranks at once, and training goes on.

What it cannot capture, write or take, a full disk, and bytes that are flipped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import offload
from tests.ranks_training.cases import (
    BEGIN,
    ROUND,
    Calls,
    Case,
    errors,
    in_memory,
    of_each,
    require_success,
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
    "object": ("fsdp2", 0, [["bad_checkpoint", "object"]]),
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


WRITES: dict[str, tuple[int, str, Calls, int]] = {
    "full": (
        0,
        "fsdp2",
        [["fail", "write_bytes", "model.safetensors", errno.ENOSPC]],
        errno.ENOSPC,
    ),
    "columns": (1, "tp", [["fail", "write_bytes", "shard-00002", errno.EIO]], errno.EIO),
    "sync": (1, "fsdp2", [["fail", "sync", "model.safetensors", errno.EIO]], errno.EIO),
}


def test_a_write_that_fails_in_a_seal_fails_it_on_all(jobs: Jobs, tmp_path: Path) -> None:
    widths = {"fsdp2": (5, 7, 3), "tp": (6, 8, 4)}
    cases: dict[str, Case] = {
        f"memory-{kind}": in_memory(3, kind=kind, widths=widths[kind], given=True)
        for kind in widths
    }
    for name, (victim, kind, fails, _) in WRITES.items():
        then: Calls = [*SEAL, ["num_failed"], *GO_ON]
        own, other = [*BEGIN, ["step"], *fails, *then], [*BEGIN, ["step"], *then]
        setting = {"kind": kind, "widths": widths[kind], "given": True}
        cases[name] = (for_victim(victim, own, other), setting)
    played = run_cases(jobs, tmp_path, cases)
    for name, (victim, kind, _, number) in WRITES.items():
        ranks = require_gone_on(played, name, kind, 3)
        assert of_each(ranks, "num_failed") == [victim == 0, victim == 1]
        for rank in ranks:
            (failed,) = errors(rank)
            assert (failed["call"], failed["error"]) == ("result", "SealError")
            assert os.strerror(number) in failed["message"]
        assert f"rank {victim}" in errors(ranks[1 - victim])[0]["message"]


def test_the_step_after_a_failed_seal_warns_and_may_be_refused(jobs: Jobs, tmp_path: Path) -> None:
    """It is refused on all ranks where warnings are errors, and can be taken then."""
    strict = ["strict", "update"]
    on: Calls = [["backward"], strict, strict, ["settle"], *SEAL, ["verify"], ["bits"]]
    cases: dict[str, Case] = {**MEMORY}
    for kind in ("ddp", "fsdp2"):
        own, other = [*BEGIN, ["step"], ["bad_checkpoint"], *on], [*BEGIN, *ROUND, *on]
        cases[f"strict-{kind}"] = ([other, own], {"kind": kind})
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
    # A gradient that is refused before the ranks step.
    begun, on = [*BEGIN, ["step"], ["backward"]], [["attempt"], ["zero"], *GO_ON]
    cases["gradient"] = ([[*begun, *on], [*begun, ["sparse_gradient"], *on]], {"kind": "ddp"})
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
    ((own,), (other,)) = (errors(r) for r in require_gone_on(played, "gradient", "ddp", 3)[::-1])
    assert "parse" in own["message"]
    assert other["error"] == "RanksError"
    assert "rank 1" in other["message"]
    assert "parse" in other["message"]
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


def test_a_flipped_byte_takes_all_ranks_to_the_checkpoint_before(
    jobs: Jobs, tmp_path: Path
) -> None:
    begun = {name: ([[*BEGIN, *ROUND]] * 2, {}) for name in ("state", "model")}
    made = run_cases(jobs, tmp_path, begun, kind="fsdp2")
    for name in begun:
        with offload.open_checkpoint(tmp_path / name / "run") as checkpoint:
            state = Path(checkpoint.owners[0].path) / "master.safetensors"
            model = Path(checkpoint.path) / "model.safetensors"
        file, offset = (state, 4100) if name == "state" else (model, model.stat().st_size - 8)
        flip_on_disk(file, offset)
    calls: list[Any] = [["open"], ["restore", {"verify": True}], *ROUND, ["verify"]]
    again = {name: ([calls] * 2, {}) for name in begun}
    for name, ranks in run_cases(jobs, tmp_path, again, kind="fsdp2").items():
        require_success(ranks)
        for number, rank in enumerate(ranks):
            assert rank.of("restore")["value"] == [1, {"step": 1, "rank": number}], name
            assert any("is quarantined" in said for said in rank.of("restore")["warnings"])
            assert rank.of("step")["value"] == made[name][number].of("step")["value"]
            assert rank.of("result")["value"] == 2
            assert rank.of("verify")["value"] == []
