"""Ranks restore from a tier what another number of ranks, or one process, has uploaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import offload
from tests.campaigns import FULL
from tests.ranks_training.rank_server import Jobs
from tests.tiers import rank_jobs
from tests.tiers.copies import steps_in, whole
from tests.tiers.proxy import Proxy
from tests.tiers.rank_jobs import asked_for, case, is_content, outcome

CUTS = [("replicas", 2, 3), ("shards", 3, 2)]
if FULL:
    CUTS += [
        (kind, made, now)
        for kind in ("replicas", "shards")
        for made, now in ((2, 3), (3, 2), (4, 2), (1, 2), (2, 1), (3, 1))
    ]


def of(kind: str, num_ranks: int) -> str:
    """Return the kind that so many ranks are of."""
    return "one" if num_ranks == 1 else kind


@pytest.mark.parametrize(("kind", "made", "now"), [*dict.fromkeys(CUTS)])
def test_they_go_on_as_from_their_own_directory(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str, made: int, now: int
) -> None:
    """A local run that goes on with another number of ranks has the same bits."""
    rank_jobs.run(jobs, tmp_path, "run", made, case(of(kind, made), s3, 1, 2))
    kind = of(kind, now)
    expected = rank_jobs.run(jobs, tmp_path, "run", now, case(kind, "", last=4))
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, last=4))
    assert outcome(found) == outcome(expected)
    assert [rank["resumed"] for rank in found] == [2] * now
    asked = asked_for(proxy)
    assert len(asked) == len({*asked})  # each range by one rank
    with offload.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.verify().ok
    # The new ranks upload what they seal, and go on from it.
    again = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, 3))
    assert [rank["resumed"] for rank in again] == [2] * now
    assert steps_in(s3)[-1] == 3
    assert all(whole(s3))


KILLS = [("replicas", 3, 2, 1, 5), ("replicas", 2, 1, 0, 27)]
if FULL:
    KILLS += [("shards", 3, 2, victim, at) for victim in (0, 1) for at in (1, 4, 9)]
    KILLS += [("replicas", 1, 2, victim, at) for victim in (0, 1) for at in (2, 6)]


@pytest.mark.parametrize(("kind", "made", "now", "victim", "at"), [*dict.fromkeys(KILLS)])
def test_a_rank_is_killed_while_it_downloads(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy,
    kind: str, made: int, now: int, victim: int, at: int,
) -> None:  # fmt: skip
    """There is no checkpoint then; the next job asks only for what is not there."""
    rank_jobs.run(jobs, tmp_path, "run", made, case(of(kind, made), s3, 2))
    kind = of(kind, now)
    expected = rank_jobs.run(jobs, tmp_path, "run", now, case(kind, "", last=3))
    proxy.requests.clear()
    job = rank_jobs.start(jobs, tmp_path, "new", now, case(kind, s3, last=3))
    rank_jobs.kill_at(job, proxy, victim, at, is_content)
    assert not [*(tmp_path / "new").rglob("step-*")]
    before = {*asked_for(proxy, answered=True)}
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, last=3))
    assert outcome(found) == outcome(expected)
    after = {*asked_for(proxy)}
    # What was under way at the kill is asked for again: at most as many as there are transfers.
    assert len(before & after) <= 4 * now
    assert len(before | after) > 4 * now


def test_after_a_kill_any_number_of_ranks_goes_on(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """Two ranks download from three, and are killed; one process does it; three ranks go on."""
    rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", s3, 2))
    job = rank_jobs.start(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    rank_jobs.kill_at(job, proxy, 0, 6, is_content)
    assert not [*(tmp_path / "new").rglob("step-*")]
    (alone,) = rank_jobs.run(jobs, tmp_path, "new", 1, case("one", s3, last=2))
    assert (alone["errors"], alone["resumed"]) == ([], 2)
    expected = rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", "", last=4))
    found = rank_jobs.run(jobs, tmp_path, "new", 3, case("replicas", s3, last=4))
    assert outcome(found) == outcome(expected)
