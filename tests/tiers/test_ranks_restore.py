"""Several ranks restore from a tier into empty directories: each downloads what it serves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.tiers import list_tier, push, verify_tier
from tests.campaigns import FULL
from tests.ranks_training.rank_server import Jobs
from tests.stores.small import train
from tests.tiers import rank_jobs
from tests.tiers.conftest import optimizer_in
from tests.tiers.proxy import Proxy, Request

KINDS = {
    "replicas": {"kind": "ddp"},
    "shards": {"kind": "fsdp2"},
    "replicas on hosts": {"kind": "ddp", "hosts": "ab"},
    "shards on hosts": {"kind": "fsdp2", "hosts": "ab"},
}


def case(
    kind: str, tier: str, *seals: int, last: int | None = None, **more: object
) -> dict[str, Any]:
    """Return a case of a kind that seals after some steps."""
    steps = max(seals, default=0) if last is None else last
    return {**KINDS[kind], "tier": tier, "seals": [*seals], "last": steps, **more}


def untouched(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ranks say without their uploads."""
    return [{key: rank[key] for key in ("errors", "state", "bits", "resumed")} for rank in said]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_the_tier_as_from_their_own_directories(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 1, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=4))
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=4))
    assert untouched(found) == untouched(expected)
    assert [rank["resumed"] for rank in found] == [2, 2]
    assert [rank["state"] for rank in found] == [{"step": 2, "rank": rank} for rank in range(2)]
    assert proxy.puts() == []  # the tier has it
    newest = [copy for copy in list_tier(s3) if copy.marker][-1].marker
    assert newest is not None
    fetched = sum(one.bytes_down for one in proxy.requests if is_content(one))
    assert fetched == sum(nbytes for name, nbytes in newest.sizes.items() if is_tensors(name)) - (
        headers_in(tmp_path / "new")
    )
    first, *others = [tmp_path / "new" / host for host in sorted({*hosts_of(kind)})]
    with offload.open_checkpoint(first, parts=others) as checkpoint:
        assert checkpoint.verify().ok
        assert checkpoint.verify().not_seen == ()
    # It goes on as any other store does.
    again = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, 3))
    assert [rank["resumed"] for rank in again] == [2, 2]
    assert all(report.ok for report in verify_tier(s3))
    assert [copy.marker.step for copy in list_tier(s3) if copy.marker][-1] == 3


def hosts_of(kind: str) -> str:
    """Return the hosts of a kind; one without a name if all ranks are on one."""
    return str(KINDS[kind].get("hosts", "")) or "."


def is_tensors(name: str) -> bool:
    """Whether an object has tensors."""
    return "state/" in name or "model" in name


def is_content(request: Request) -> bool:
    """Whether a request has brought tensors."""
    return request.method == "GET" and bool(request.range) and is_tensors(request.path)


def headers_in(folder: Path) -> int:
    """Return the size in bytes of the headers of a copy's model files, which are not fetched."""
    found = [
        *folder.rglob("step-*/model.safetensors"),
        *folder.rglob("step-*/model/*"),
        *folder.rglob("owner-*/part-*/model/*"),  # a part for the next step has the same header
    ]
    assert found
    sizes = {path.name: int.from_bytes(path.read_bytes()[:8], "little") for path in found}
    return sum(8 + nbytes for nbytes in sizes.values())


KILLS = [("shards on hosts", 1, 4), ("replicas", 0, 5)]
if FULL:
    KILLS += [(kind, victim, at) for kind in KINDS for victim in (0, 1) for at in (1, 3, 6, 8)]


@pytest.mark.parametrize(("kind", "victim", "at"), [*dict.fromkeys(KILLS)], ids=str)
def test_a_rank_is_killed_while_it_downloads(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str, victim: int, at: int
) -> None:
    """There is no checkpoint then; the next job asks only for what is not there."""
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=3))
    proxy.requests.clear()
    job = rank_jobs.start(jobs, tmp_path, "new", 2, case(kind, s3, last=3))
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
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=3))
    assert untouched(found) == untouched(expected)
    after = [(r.path, r.range) for r in proxy.requests if is_content(r)]
    # What was under way at the kill is asked for again: at most as many as there are transfers.
    assert len({*before} & {*after}) <= 8
    assert len({*before} | {*after}) > 8


def test_an_error_of_one_rank_is_raised_on_all_and_the_next_call_goes_on(
    jobs: Jobs, tmp_path: Path, proxy: Proxy, s3: str
) -> None:
    """One object of rank 1 comes with other bytes, as often as it is asked for."""
    kind = "shards on hosts"
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=3))
    num_flips = 0

    def rule(request: Request) -> str:
        nonlocal num_flips
        if is_content(request) and "owner-1/model" in request.path and num_flips < 2:
            num_flips += 1
            return "flip"
        return ""

    proxy.rule = rule
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=3, retries=1))
    assert num_flips == 2
    (first,), (second,) = (rank.pop("errors") for rank in found)
    assert first[0] == second[0] == "DamagedError"
    assert "owner-1/model/shard-00002" in second[1]
    assert "rank 1 on b" in first[1]
    assert [(rank["resumed"], rank["bits"]) for rank in found] == [
        (2, rank["bits"]) for rank in expected
    ]


def test_a_tier_that_cannot_be_reached_never_starts_a_run_anew(
    jobs: Jobs, tmp_path: Path, proxy: Proxy, s3: str
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 2))
    proxy.rule = lambda _: "403:AccessDenied"
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    assert [rank["errors"][0][0] for rank in found] == ["TierAccessError", "RanksError"]
    assert "rank 0" in found[1]["errors"][0][1]
    assert "AccessDenied" in found[1]["errors"][0][1]


def test_without_a_complete_copy_they_start_from_the_beginning(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=1))
    assert [(rank["errors"], rank["resumed"], rank["warned"]) for rank in found] == [
        ([], 0, []),
        ([], 0, []),
    ]
    proxy.rule = lambda one: (
        "503" if one.path.endswith("COMPLETE.json") and one.method == "PUT" else ""
    )
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1, finish_s=2.0))
    proxy.rule = lambda _: ""
    assert [copy.marker for copy in list_tier(s3)] == [None]
    found = rank_jobs.run(jobs, tmp_path, "other", 2, case("replicas", s3, last=1))
    assert [(rank["errors"], rank["resumed"]) for rank in found] == [([], 0), ([], 0)]
    (warning,) = found[0]["warned"]
    assert "no complete copy of a checkpoint, so training starts from the beginning" in warning
    assert found[1]["warned"] == []


def refused(
    jobs: Jobs, folder: Path, into: str, num_ranks: int, setting: dict[str, Any]
) -> list[str]:
    """Let ranks restore, which must fail on all of them; return the messages."""
    found = rank_jobs.run(jobs, folder, into, num_ranks, setting)
    assert [len(rank["errors"]) for rank in found] == [1] * num_ranks
    return [rank["errors"][0][1] for rank in found]


def test_other_ranks_on_several_hosts_are_told_what_to_do(
    jobs: Jobs, tmp_path: Path, s3: str
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", s3, 2))
    for message in refused(jobs, tmp_path, "two", 2, case("replicas on hosts", s3, last=3)):
        assert "3 ranks made this checkpoint" in message
        assert "offload pull" in message
    with optimizer_in(tmp_path / "one") as optimizer:
        train(optimizer, 1)
    single = f"{s3}-of-one"
    push(tmp_path / "one", single)
    for message in refused(jobs, tmp_path, "two", 2, case("replicas on hosts", single, last=3)):
        assert "one process made this checkpoint" in message
    assert not [*(tmp_path / "two").rglob("*.safetensors")]
    setting = case("replicas on hosts", single, last=1, fresh=True)
    fresh = rank_jobs.run(jobs, tmp_path, "two", 2, setting)
    assert [(rank["errors"], rank["resumed"]) for rank in fresh] == [([], 0), ([], 0)]


def test_another_model_is_refused_before_anything_is_fetched(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case("shards on hosts", s3, 2))
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("shards on hosts", s3, last=3, width=80))
    assert all(len(rank["errors"]) == 1 for rank in found), found
    assert not [one for one in proxy.requests if is_content(one)]


def test_ranks_with_different_tiers_are_refused(jobs: Jobs, tmp_path: Path, s3: str) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1))
    for message in refused(jobs, tmp_path, "new", 2, case("replicas", s3, last=1, without=[1])):
        assert "give the same Options(tier=...) to all ranks" in message
