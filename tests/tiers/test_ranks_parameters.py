"""Several ranks over a link that is too slow for checkpoints: parameters arrive before state."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from offload.tiers import list_tier, verify_tier
from tests.ranks_training.rank_server import Jobs
from tests.tiers import rank_jobs
from tests.tiers.proxy import Proxy, Request
from tests.tiers.test_parameters_first import until_parameters


@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 2), ("fsdp", 2), ("ddp", 4)])
def test_parameters_arrive_before_the_state_of_any_rank(
    tmp_path: Path, jobs: Jobs, s3: str, proxy: Proxy, kind: str, num_ranks: int
) -> None:
    """No object of state passes from the second checkpoint on, until step 4 has its parameters."""
    go_on = threading.Event()

    def rule(request: Request) -> str:
        if request.method == "PUT" and "/gen-00000001/" not in request.path:
            if "/state/" in request.path:
                assert go_on.wait(120)
            elif request.path.endswith("PARAMETERS.json"):
                early.append([r.path for r in proxy.requests if is_of_the_ranks(r, request)])
        return ""

    early: list[list[str]] = []
    proxy.rule = rule
    case = {
        "kind": kind, "tier": s3, "last": 4, "seals": [1, 2, 3, 4], "max_age_s": 20.0,
        "slow_link_s": 12.0,
    }  # fmt: skip
    job = rank_jobs.start(jobs, tmp_path, "run", num_ranks, case)
    until_parameters(s3, 4)
    copies = {c.parameters.step: c for c in list_tier(s3) if c.parameters is not None}
    assert copies.keys() == {2, 4}  # those of step 3 are of no use any more
    go_on.set()
    ranks = job.wait()
    assert all(rank.outcomes for rank in ranks), [rank.errors for rank in ranks]
    assert early[0] == []
    stats = ranks[0].of("main")["value"]["tier"]
    events = [(e["step"], e["choice"], e["outcome"]) for e in stats["events"]]
    assert events[0] == (1, "upload", "complete")
    assert (2, "parameters", "complete") in events
    assert (3, "parameters", "parameters") in events
    assert (4, "parameters", "parameters") in events
    assert [c.marker.step for c in list_tier(s3) if c.marker is not None] == [1, 2]
    assert all(report.ok and not report.foreign for report in verify_tier(s3))


def is_of_the_ranks(request: Request, marker: Request) -> bool:
    """Whether a rank besides the writer has sent an object to the copy that a marker is of."""
    copy = marker.path.removesuffix("PARAMETERS.json")
    return request.method == "PUT" and request.path.startswith(f"{copy}owner-")
