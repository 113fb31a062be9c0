"""Several ranks restore from a tier into empty directories: each downloads what it serves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.tiers import list_tier, push
from tests.campaigns import FULL
from tests.limits import SHORT_AGREEMENT_S
from tests.ranks_training.rank_server import Jobs
from tests.stores.small import train
from tests.tiers import rank_jobs
from tests.tiers.copies import optimizer_in, steps_in, whole
from tests.tiers.proxy import Proxy, Request
from tests.tiers.rank_jobs import asked_for, case, is_content, is_tensors, outcome

KINDS = ["replicas", "shards on hosts", *(["shards", "replicas on hosts"] * FULL)]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_the_tier_as_from_their_own_directories(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 1, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=4))
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=4))
    assert outcome(found) == outcome(expected)
    assert [rank["resumed"] for rank in found] == [2, 2]
    assert [rank["state"] for rank in found] == [{"step": 2, "rank": rank} for rank in range(2)]
    assert proxy.puts() == []  # the tier has it
    newest = list_tier(s3)[-1].marker
    assert newest is not None
    fetched = sum(one.bytes_down for one in proxy.requests if is_content(one))
    sizes = newest.sizes.items()
    assert fetched == sum(n for name, n in sizes if is_tensors(name)) - headers_in(tmp_path / "new")
    first, *others = [tmp_path / "new" / host for host in ("ab" if "hosts" in kind else ".")]
    with offload.open_checkpoint(first, parts=others) as checkpoint:
        assert checkpoint.verify().ok
        assert checkpoint.verify().not_seen == ()
    # It goes on as any other store does.
    again = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, 3))
    assert [rank["resumed"] for rank in again] == [2, 2]
    assert steps_in(s3)[-1] == 3
    assert all(whole(s3))


def headers_in(folder: Path) -> int:
    """Return the size in bytes of the headers of a copy's model files, which are not fetched."""
    found = [
        *folder.rglob("step-*/model.safetensors"),
        *folder.rglob("step-*/model/*"),
        *folder.rglob("owner-*/part-*/model/*"),  # a part for the next step has the same header
    ]
    sizes = {path.name: int.from_bytes(path.read_bytes()[:8], "little") for path in found}
    return sum(8 + nbytes for nbytes in sizes.values())


KILLS = [("shards on hosts", 1, 4), ("replicas", 0, 5)]
if FULL:
    every = ("replicas", "shards", "replicas on hosts", "shards on hosts")
    KILLS += [(kind, victim, at) for kind in every for victim in (0, 1) for at in (1, 3, 6, 8)]


@pytest.mark.parametrize(("kind", "victim", "at"), [*dict.fromkeys(KILLS)], ids=str)
def test_a_rank_is_killed_while_it_downloads(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str, victim: int, at: int
) -> None:
    """There is no checkpoint then; the next job asks only for what is not there."""
    rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 2, case(kind, "", last=3))
    proxy.requests.clear()
    job = rank_jobs.start(jobs, tmp_path, "new", 2, case(kind, s3, last=3))
    rank_jobs.kill_at(job, proxy, victim, at, is_content)
    assert not [*(tmp_path / "new").rglob("step-*")]
    before = {*asked_for(proxy, answered=True)}
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=3))
    assert outcome(found) == outcome(expected)
    after = {*asked_for(proxy)}
    # What was under way at the kill is asked for again: at most as many as there are transfers.
    assert len(before & after) <= 8
    assert len(before | after) > 8


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
    (first,), (second,) = (rank["errors"] for rank in found)
    assert first[0] == second[0] == "DamagedError"
    assert "owner-1/model/shard-00002" in second[1]
    assert "rank 1 on b" in first[1]
    assert [rank["bits"] for rank in found] == [rank["bits"] for rank in expected]


def refused(
    jobs: Jobs, folder: Path, into: str, num_ranks: int, setting: dict[str, Any]
) -> list[list[str]]:
    """Let ranks restore, which must fail on all of them; return kinds and messages."""
    found = rank_jobs.run(jobs, folder, into, num_ranks, setting)
    assert [len(rank["errors"]) for rank in found] == [1] * num_ranks
    assert not [rank for rank in found if "bits" in rank], "it has trained"
    return [rank["errors"][0] for rank in found]


def test_a_run_begins_anew_only_without_a_complete_copy(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """Also an unfinished copy is none; and a tier that cannot be reached is no empty one."""
    first = case("replicas", s3, last=1)
    found = rank_jobs.run(jobs, tmp_path, "new", 2, first)
    assert [(r["errors"], r["resumed"], r["warned"]) for r in found] == [([], 0, [])] * 2
    proxy.rule = lambda r: "503" if r.path.endswith("COMPLETE.json") and r.method == "PUT" else ""
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1, finish_s=2.0))
    proxy.rule = lambda _: ""
    assert steps_in(s3) == [None]
    found = rank_jobs.run(jobs, tmp_path, "other", 2, first)
    assert [(rank["errors"], rank["resumed"]) for rank in found] == [([], 0), ([], 0)]
    (warning,) = found[0]["warned"]
    assert "no complete copy of a checkpoint, so training starts from the beginning" in warning
    assert found[1]["warned"] == []
    one, other = refused(jobs, tmp_path, "strict", 2, {**first, "strict": True})
    assert (one[0], other[0]) == ("RuntimeWarning", "RanksError")  # warnings are errors there
    assert "no complete copy of a checkpoint" in one[1]
    assert "no complete copy of a checkpoint" in other[1]
    proxy.rule = lambda _: "403:AccessDenied"
    one, other = refused(jobs, tmp_path, "away", 2, first)
    assert (one[0], other[0]) == ("TierAccessError", "RanksError")
    assert "rank 0" in other[1]
    assert "AccessDenied" in other[1]


def test_what_does_not_fit_is_refused_before_anything_is_fetched(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", s3, 2))
    single, hosts = f"{s3}-of-one", "replicas on hosts"
    with optimizer_in(tmp_path / "one") as optimizer:
        train(optimizer, 1)
    push(tmp_path / "one", single)
    proxy.requests.clear()
    for _, message in refused(jobs, tmp_path, "two", 2, case(hosts, s3, last=3)):
        assert "3 ranks made this checkpoint" in message
        assert "offload pull" in message
    for _, message in refused(jobs, tmp_path, "two", 2, case(hosts, single, last=3)):
        assert "one process made this checkpoint" in message
    for now, kind in ((1, "one"), (2, "replicas")):
        other = case(kind, s3, last=3, width=80)
        for _, message in refused(jobs, tmp_path, f"other-{now}", now, other):
            assert "has the shape [96, 64], and the model has [80, 64]" in message
    for _, message in refused(jobs, tmp_path, "new", 2, case("replicas", s3, last=1, without=[1])):
        assert "give the same Options(tier=...) to all ranks" in message
    assert not asked_for(proxy)
    fresh = rank_jobs.run(jobs, tmp_path, "two", 2, case(hosts, single, last=1, fresh=True))
    assert [(rank["errors"], rank["resumed"]) for rank in fresh] == [([], 0), ([], 0)]


def test_a_part_that_cannot_be_sealed_makes_only_its_own_rank_fetch_again(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """The others have sealed theirs by then, and find them in the next call of the same job."""
    rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", s3, 2))
    expected = rank_jobs.run(jobs, tmp_path, "run", 3, case("replicas", "", last=3))
    proxy.requests.clear()
    setting = case("replicas", s3, last=3, retries=1, unsealed=1, nth_table=2)
    found = rank_jobs.run(jobs, tmp_path, "new", 3, setting)
    for number, rank in enumerate(found):
        ((_, message),) = rank["errors"]
        assert "injected failure of write_bytes" in message, message
        assert ("rank 1" in message) == (number != 1)
    assert [rank["bits"] for rank in found] == [rank["bits"] for rank in expected]
    asked = Counter(asked_for(proxy))
    assert all("/owner-1/" in path for (path, _), number in asked.items() if number > 1)
    assert {number for (path, _), number in asked.items() if "/owner-2/" in path} == {1}


STALLED = ["COMPLETE.json", *(["train_state.safetensors", "manifest.json"] * FULL)]


@pytest.mark.parametrize("stalled", STALLED)
def test_a_server_that_accepts_and_stalls_is_named_by_all_ranks(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, stalled: str
) -> None:
    """The limit of the tier is longer than that after which a silent rank counts as lost.

    Both pass while nothing happens but that the server stalls; from then on the latter is short.
    """
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1))

    def rule(one: Request) -> str:
        if one.method == "GET" and one.path.endswith(stalled):
            (tmp_path / "hurry").touch()
            return "hang"
        return ""

    proxy.rule = rule
    setting = case("replicas", s3, last=2, tier_timeout_s=2 * SHORT_AGREEMENT_S)
    first, second = refused(jobs, tmp_path, "new", 2, setting)
    for _, message in (first, second):
        assert "does not answer" in message, message
        assert "lost" not in message
    assert first[0] == "TierUnavailableError"
