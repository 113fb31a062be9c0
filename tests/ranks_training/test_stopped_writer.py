"""The deciding rank is stopped before its rename for longer than the limit, and then goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.ranks_training.rank_server import Jobs

Calls = list[list[Any]]
SEAL: Calls = [["step"], ["checkpoint"], ["result"]]
BEGIN: Calls = [["open"], *SEAL, ["step"]]


@pytest.mark.parametrize(
    ("kind", "is_stopped_as_well"), [("ddp", True), ("fsdp2", False)], ids=["ddp", "fsdp2"]
)
def test_no_part_is_written_again_while_the_rename_may_still_come(
    jobs: Jobs, tmp_path: Path, kind: str, *, is_stopped_as_well: bool
) -> None:
    """The others are in doubt, and write nothing; all ranks resume one step, with its bits.

    The key-value store is in the process that is stopped, or elsewhere, as with torchrun.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = 0 if is_stopped_as_well else store.port
    stop = ["at_step", "seal: rename run/.slot-N", "stop"]
    first = [*BEGIN, stop, ["checkpoint"], ["result"]]
    other = [*BEGIN, ["checkpoint"], ["result"], ["checkpoint"]]
    job = jobs.start(tmp_path, [first, other], kind=kind, store_port=port)
    job.until(1, len(other))
    assert len(job.outcomes(0)) < len(first), "rank 0 was not stopped"
    os.kill(job.pids[0], signal.SIGCONT)
    ranks = job.wait()
    assert [rank.status for rank in ranks] == [0, 0], [rank.outcomes for rank in ranks]
    failed = [one for one in ranks[1].outcomes if one["error"]]
    assert [one["call"] for one in failed] == ["result", "checkpoint"]
    assert {one["error"] for one in failed} == {"InDoubtError"}
    again: Calls = [
        ["open"],
        ["restore", {"verify": True}],
        ["bits"],
        ["verify"],
        *SEAL,
        ["verify"],
    ]
    found = jobs.run(tmp_path, [again] * 2, kind=kind)
    steps = {rank.of("restore")["value"][0] for rank in found}
    assert steps == {2}, "the rename came, as rank 0 could not know that rank 1 had given up"
    for before, rank in zip(ranks, found, strict=True):
        assert rank.failed() == []
        assert rank.of("bits")["value"] == before.of("step")["value"]
        assert [one["value"] for one in rank.outcomes if one["call"] == "verify"] == [[], []]
        assert rank.of("result")["value"] == 3
