"""Several ranks restore from a tier: the first forward runs before any state has arrived."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import offload
from tests.campaigns import FULL
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.ranks_training.rank_server import Jobs
from tests.tiers import rank_jobs
from tests.tiers.proxy import Proxy, Request
from tests.tiers.rank_jobs import asked_for, case, is_state, outcome

KINDS = ["replicas", "shards on hosts", *(["shards", "replicas on hosts"] * FULL)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_forward_needs_the_parameters_only(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str
) -> None:
    """The proxy lets state pass when all ranks have computed a forward."""
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 1, 2))
    local = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=4, then=["forward"]))
    for rank in range(2):
        (tmp_path / f"forward-{rank}").unlink()
    proxy.requests.clear()
    may_pass = threading.Event()
    too_early: list[str] = []

    def rule(request: Request) -> str:
        if is_state(request):
            may_pass.wait(HANG_S)
        return ""

    proxy.rule = rule
    job = rank_jobs.start(jobs, tmp_path, "new", 2, case(kind, s3, last=4, then=["forward"]))
    assert eventually(lambda: all((tmp_path / f"forward-{rank}").exists() for rank in (0, 1)))
    too_early += [one.path for one in proxy.requests if is_state(one) and one.bytes_down]
    assert not [*(tmp_path / "new").rglob("step-*")], "offered before its state is there"
    may_pass.set()
    found = rank_jobs.results(job)
    assert too_early == []
    assert outcome(found) == outcome(local)


CALLS = [
    ["state_dict", "load_state_dict"],
    ["synchronize", "full_state_dict"],
    ["checkpoint"],
    ["restore", "forward"],
    ["lr", "edit", "freeze"],
    ["overlap", "lr"],
    ["grow"],
]


@pytest.mark.parametrize("calls", CALLS, ids=" ".join)
def test_every_call_that_needs_the_state_waits_for_it(
    jobs: Jobs, tmp_path: Path, s3: str, calls: list[str]
) -> None:
    kind = "shards" if {"restore", "freeze", "grow"} & {*calls} else "replicas"
    more = {"then": calls, "overlap": "forward" if "overlap" in calls else None}
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=4, **more))
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=4, **more))
    assert outcome(found) == outcome(expected)
    with offload.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.verify().ok


def test_ranks_that_close_before_the_state_is_there_leave_what_has_arrived(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", "", last=3))
    proxy.requests.clear()
    num_passing = threading.Semaphore(3)

    def rule(request: Request) -> str:
        return "hang" if is_state(request) and not num_passing.acquire(blocking=False) else ""

    proxy.rule = rule
    setting = case("replicas", s3, last=3, then=["forward", "close"])
    found = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    assert [(rank["errors"], rank["resumed"]) for rank in found] == [([], 2)] * 2
    assert not [*(tmp_path / "new").rglob("step-*")]
    before = {*asked_for(proxy, answered=True)}
    proxy.rule = lambda _: ""
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    assert outcome(found) == outcome(expected)
    after = {*asked_for(proxy)}
    assert len(before & after) <= 3, "asked for again, though it was here"


@pytest.mark.parametrize("fault", [{"unwritten": "exp_avg"}, {"no_thread": True}], ids=str)
def test_a_second_restore_goes_on_after_state_that_one_rank_could_not_take(
    jobs: Jobs, tmp_path: Path, s3: str, fault: dict[str, object]
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case("shards", s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case("shards", "", last=3))
    setting = case("shards", s3, last=3, then=["restore"], **fault)
    found = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    assert [rank["then"] for rank in found] == [[2], [2]]
    assert [rank["bits"] for rank in found] == [rank["bits"] for rank in expected]
    if "no_thread" in fault:  # and they can be closed without it
        found = rank_jobs.run(jobs, tmp_path, "newer", 2, {**setting, "then": ["close"]})
        assert [(rank["errors"], rank["resumed"]) for rank in found] == [([], 2)] * 2


@pytest.mark.parametrize("fault", ["403:AccessDenied", "flip", *(["cut"] * FULL)])
def test_an_error_while_the_state_arrives_is_raised_on_all_ranks(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, fault: str
) -> None:
    """It is rank 1's; the next restore of the same job goes on, and has the same bits."""
    rank_jobs.run(jobs, tmp_path, "run", 2, case("shards", s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case("shards", "", last=3))
    proxy.requests.clear()
    broken: list[tuple[str, str]] = []

    def rule(request: Request) -> str:
        """Break one range, or all; one with wrong bytes is asked for again at once."""
        one = request.path, request.range
        if not is_state(request) or "/owner-1/" not in request.path:
            return ""
        again = fault == "flip" and len(broken) == 1 and one == broken[0]
        if fault == "cut" or not broken or again:
            broken.append(one)
            return fault
        return ""

    proxy.rule = rule
    more = {"tier_timeout_s": HANG_S} if fault == "cut" else {}
    setting = case("shards", s3, last=3, retries=0 if fault == "cut" else 1, **more)
    found = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    (first,), (second,) = (rank["errors"] for rank in found)
    assert first[0] in ("DamagedError", "TierError", "RanksError", "TierUnavailableError")
    assert "rank 1" in first[1]
    assert "rank 1" not in second[1]
    if fault == "cut":
        assert not [*(tmp_path / "new").rglob("step-*")]
        return
    for rank in found:
        rank["errors"] = []
    assert outcome(found) == outcome(expected)


@pytest.mark.parametrize("victim", [0, *([1] * FULL)])
def test_a_rank_that_is_killed_while_the_state_arrives(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, victim: int
) -> None:
    """Ranks that compute lose the other one; the next job goes on from what has arrived."""
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", "", last=3))
    proxy.requests.clear()
    num_passing = threading.Semaphore(3)

    def rule(request: Request) -> str:
        return "hang" if is_state(request) and not num_passing.acquire(blocking=False) else ""

    proxy.rule = rule
    job = rank_jobs.start(jobs, tmp_path, "new", 2, case("replicas", s3, last=3, then=["forward"]))
    assert eventually(lambda: all((tmp_path / f"forward-{rank}").exists() for rank in (0, 1)))
    assert eventually(lambda: any(is_state(r) and r.bytes_down for r in proxy.requests))
    job.kill(victim)
    rank_jobs.kill_all(job)
    proxy.rule = lambda _: ""
    assert not [*(tmp_path / "new").rglob("step-*")]
    before = {*asked_for(proxy, answered=True)}
    assert any("state/" in path for path, _ in before)
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    assert outcome(found) == outcome(expected)
    after = {*asked_for(proxy)}
    assert len(before & after) <= 8
