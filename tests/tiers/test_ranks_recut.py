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


KILLS = [("ddp", 3, 2, 1, 5), ("one", 2, 1, 0, 27)]
if FULL:
    KILLS += [("fsdp2", 3, 2, victim, at) for victim in (0, 1) for at in (1, 4, 9)]
    KILLS += [("ddp", 1, 2, victim, at) for victim in (0, 1) for at in (2, 6)]


@pytest.mark.parametrize(("kind", "made", "now", "victim", "at"), [*dict.fromkeys(KILLS)])
def test_a_rank_is_killed_while_it_downloads(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy,
    kind: str, made: int, now: int, victim: int, at: int,
) -> None:  # fmt: skip
    """There is no checkpoint then; the next job asks only for what is not there."""
    own = "one" if made == 1 else "ddp" if now == 1 else kind
    rank_jobs.run(jobs, tmp_path, "run", made, case(own, s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", now, case(kind, "", last=3))
    proxy.requests.clear()
    job = rank_jobs.start(jobs, tmp_path, "new", now, case(kind, s3, last=3))
    lock, killed, num_answers = threading.Lock(), threading.Event(), 0

    def look(request: Request) -> None:
        nonlocal num_answers
        with lock:
            num_answers += is_content(request)
            if num_answers == at and not killed.is_set():
                job.kill(victim)
                killed.set()

    proxy.after = look
    assert killed.wait(60)
    rank_jobs.kill_all(job)
    proxy.after = lambda _: None
    assert not [*(tmp_path / "new").rglob("step-*")]
    before = [(r.path, r.range) for r in proxy.requests if is_content(r) and r.bytes_down]
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, last=3))
    assert outcome(found) == outcome(expected)
    after = [(r.path, r.range) for r in proxy.requests if is_content(r)]
    # What was under way at the kill is asked for again: at most as many as there are transfers.
    assert len({*before} & {*after}) <= 4 * now
    assert len({*before} | {*after}) > 4 * now


def test_after_a_kill_any_number_of_ranks_goes_on(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """Two ranks download from three, and are killed; one process does it; three ranks go on."""
    rank_jobs.run(jobs, tmp_path, "run", 3, case("ddp", s3, 2))
    job = rank_jobs.start(jobs, tmp_path, "new", 2, case("ddp", s3, last=3))
    several = threading.Event()

    def look(request: Request) -> None:
        if sum(is_content(one) for one in proxy.requests) > 5:
            several.set()

    proxy.after = look
    assert several.wait(60)
    rank_jobs.kill_all(job)
    proxy.after = lambda _: None
    assert not [*(tmp_path / "new").rglob("step-*")]
    (alone,) = rank_jobs.run(jobs, tmp_path, "new", 1, case("one", s3, last=2))
    assert (alone["errors"], alone["resumed"]) == ([], 2)
    expected = rank_jobs.run(jobs, tmp_path, "run", 3, case("ddp", "", last=4))
    found = rank_jobs.run(jobs, tmp_path, "new", 3, case("ddp", s3, last=4))
    assert outcome(found) == outcome(expected)


@pytest.mark.parametrize("now", [1, 2])
def test_another_model_is_refused_before_anything_is_fetched(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, now: int
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 3, case("ddp", s3, 2))
    proxy.requests.clear()
    kind = "one" if now == 1 else "ddp"
    found = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, last=3, width=80))
    for rank in found:
        (error,) = rank["errors"]
        assert "has the shape [96, 64], and the model has [80, 64]" in error[1]
    assert not [one for one in proxy.requests if is_content(one)]


def test_shares_are_dealt_over_the_ranks() -> None:
    assert deal_owners([0, 1, 2], [0, 1, 2]) == [[0], [1], [2]]
    assert deal_owners([0, 1, 2, 3, 4], [1, 0]) == [[1, 2, 4], [0, 3]]
    assert deal_owners([0], [0, 1, 2]) == [[0], [], []]
    assert deal_owners([0, 5], [0, 1]) == [[0], [5]]
