"""Ranks restore from a tier what another number of ranks, or one process, has uploaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.tiers import list_tier, verify_tier
from offload.tiers.ranks.arriving_share import deal_owners
from tests.campaigns import FULL
from tests.ranks_training.rank_server import Jobs
from tests.tiers import rank_jobs
from tests.tiers.proxy import Proxy, Request
from tests.tiers.test_ranks_restore import is_content

CUTS = [("ddp", 2, 3), ("fsdp2", 3, 2)]
if FULL:
    CUTS += [
        (kind, made, now)
        for kind in ("ddp", "fsdp2")
        for made, now in ((2, 3), (3, 2), (4, 2), (1, 2), (2, 1), (3, 1))
    ]


def case(
    kind: str, tier: str, *seals: int, last: int | None = None, **more: object
) -> dict[str, Any]:
    """Return a case of a kind that seals after some steps."""
    steps = max(seals, default=0) if last is None else last
    return {"kind": kind, "tier": tier, "seals": [*seals], "last": steps, **more}


def outcome(said: list[dict[str, Any]]) -> list[Any]:
    """Return what ranks say of their restore and their parameters."""
    return [[rank[key] for key in ("errors", "resumed", "bits")] for rank in said]


@pytest.mark.parametrize(("kind", "made", "now"), [*dict.fromkeys(CUTS)])
def test_they_go_on_as_from_their_own_directory(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str, made: int, now: int
) -> None:
    """A local run that goes on with another number of ranks has the same bits."""
    kind, own = "one" if now == 1 else kind, "one" if made == 1 else kind
    rank_jobs.run(jobs, tmp_path, "run", made, case(own, s3, 1, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", now, case(kind, "", last=4))
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, last=4))
    assert outcome(found) == outcome(expected)
    assert [rank["resumed"] for rank in found] == [2] * now
    asked = [(one.path, one.range) for one in proxy.requests if is_content(one)]
    assert len(asked) == len({*asked})  # each range by one rank
    with offload.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.verify().ok
    # The new ranks upload what they seal, and go on from it.
    again = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, 3))
    assert [rank["resumed"] for rank in again] == [2] * now
    assert all(report.ok for report in verify_tier(s3))
    assert [copy.marker.step for copy in list_tier(s3) if copy.marker][-1] == 3
