"""Several ranks restore from a tier into empty directories, and train on while state arrives."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.tiers import list_tier, push
from tests.campaigns import FULL
from tests.eventually import eventually
from tests.limits import HANG_S, SHORT_AGREEMENT_S
from tests.ranks_training.rank_server import Job, Jobs
from tests.stores.small import train
from tests.tiers import rank_jobs
from tests.tiers.copies import optimizer_in, steps_in, whole
from tests.tiers.proxy import Proxy, Request
from tests.tiers.rank_jobs import Sent, asked_for, case, is_content, is_state, is_tensors, outcome

CUTS = [("replicas", 2, 2), ("shards on hosts", 2, 2), ("replicas", 2, 3), ("shards", 3, 2)]
if FULL:
    CUTS += [("shards", 2, 2), ("replicas on hosts", 2, 2)]
    CUTS += [
        (kind, made, now)
        for kind in ("replicas", "shards")
        for made, now in ((2, 3), (3, 2), (4, 2), (1, 2), (2, 1), (3, 1))
    ]


def of(kind: str, num_ranks: int) -> str:
    """Return the kind that so many ranks are of."""
    return "one" if num_ranks == 1 else kind


def no_checkpoint_in(place: Path) -> bool:
    return not [*place.rglob("step-*")]


def wait_for_forward(folder: Path, num_ranks: int) -> None:
    """Wait until all ranks have computed a forward."""
    places = [folder / f"forward-{rank}" for rank in range(num_ranks)]
    assert eventually(lambda: all(place.exists() for place in places))


@pytest.mark.parametrize(("kind", "made", "now"), [*dict.fromkeys(CUTS)])
def test_ranks_go_on_from_the_tier_as_from_their_own_directories(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent, kind: str, made: int, now: int
) -> None:
    """If as many ranks have made it, no state passes before all have computed a forward."""
    origin.into(s3, of(kind, made), made)
    by = of(kind, made), made
    kind = of(kind, now)
    expected = origin.expected(kind, now, 4, "forward", made=by)
    proxy.requests.clear()
    may_pass = threading.Event()

    def rule(request: Request) -> str:
        if is_state(request):
            may_pass.wait(HANG_S)
        return ""

    new = tmp_path / "new"
    proxy.rule = rule if made == now else proxy.rule
    job = rank_jobs.start(jobs, tmp_path, "new", now, case(kind, s3, last=4, then=["forward"]))
    if made == now:
        wait_for_forward(tmp_path, now)
        assert [one.path for one in proxy.requests if is_state(one) and one.bytes_down] == []
        assert no_checkpoint_in(new), "offered before its state is there"
        may_pass.set()
    found = rank_jobs.results(job)
    assert outcome(found) == expected
    assert [rank["resumed"] for rank in found] == [2] * now
    assert proxy.puts() == []  # the tier has it
    asked = asked_for(proxy)
    assert len(asked) == len({*asked})  # each range by one rank
    if made == now > 1:
        assert [rank["state"] for rank in found] == [{"step": 2, "rank": r} for r in range(now)]
        marker = list_tier(s3)[-1].marker
        assert marker is not None
        nbytes = sum(n for name, n in marker.sizes.items() if is_tensors(name))
        fetched = sum(one.bytes_down for one in proxy.requests if is_content(one))
        assert fetched == nbytes - headers_in(new)
    first, *others = [new / host for host in ("ab" if "hosts" in kind else ".")]
    with offload.open_checkpoint(first, parts=others) as checkpoint:
        assert (checkpoint.step, checkpoint.verify().ok) == (2, True)
        assert checkpoint.verify().not_seen == ()
    # They upload what they seal, and go on from it.
    again = rank_jobs.run(jobs, tmp_path, "new", now, case(kind, s3, 3))
    assert [rank["resumed"] for rank in again] == [2] * now
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


ARRIVING = 0
"""In the place of the number of a request: behind the first forward, while state arrives."""

KILLS: list[tuple[str, int, int, int, int, tuple[int, ...]]] = [
    ("shards on hosts", 2, 2, 1, 4, (2,)),
    ("replicas", 2, 2, 0, ARRIVING, (2,)),
    ("replicas", 2, 1, 0, 27, (1,)),
    ("replicas", 3, 2, 0, 6, (1, 3)),
]
if FULL:
    every = ("replicas", "shards", "replicas on hosts", "shards on hosts")
    KILLS += [
        (k, 2, 2, victim, at, (2,)) for k in every for victim in (0, 1) for at in (1, 3, 6, 8)
    ]
    KILLS += [("shards", 3, 2, victim, at, (2,)) for victim in (0, 1) for at in (1, 4, 9)]
    KILLS += [("replicas", 1, 2, victim, at, (2,)) for victim in (0, 1) for at in (2, 6)]
    KILLS += [("replicas", 2, 2, 1, ARRIVING, (2,)), ("replicas", 3, 2, 1, 5, (2,))]


@pytest.mark.parametrize(("kind", "made", "now", "victim", "at", "then"), KILLS, ids=str)
def test_a_rank_is_killed_while_it_downloads(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent,
    kind: str, made: int, now: int, victim: int, at: int, then: tuple[int, ...],
) -> None:  # fmt: skip
    """There is no checkpoint then; the next job asks only for what is not there."""
    origin.into(s3, of(kind, made), made)
    proxy.requests.clear()
    more = {"then": ["forward"]} if at == ARRIVING else {}
    setting = case(of(kind, now), s3, last=3, **more)
    if at == ARRIVING:
        proxy.rule = after_three_of_the_state()
    job = rank_jobs.start(jobs, tmp_path, "new", now, setting)
    if at == ARRIVING:
        wait_for_forward(tmp_path, now)
        assert eventually(lambda: any(is_state(r) and r.bytes_down for r in proxy.requests))
        kill(job, proxy, victim)
    else:
        rank_jobs.kill_at(job, proxy, victim, at, is_content)
    assert no_checkpoint_in(tmp_path / "new")
    before = {*asked_for(proxy, answered=True)}
    for number, num_ranks in enumerate(then):
        proxy.requests.clear()
        kind_now, last = of(kind, num_ranks), 3 if len(then) == 1 else 2 + number
        setting = case(kind_now, s3, last=last)
        found = rank_jobs.run(jobs, tmp_path, "new", num_ranks, setting)
        by = of(kind, made), made
        assert outcome(found) == origin.expected(kind_now, num_ranks, last, made=by)
        if number == 0:
            after = {*asked_for(proxy)}
            # What was under way at the kill is asked for again: at most all transfers.
            assert len(before & after) <= 4 * now
            assert at == ARRIVING or len(before | after) > 4 * now


def after_three_of_the_state() -> Any:
    """Return a rule that lets three objects of state pass, and no other."""
    num_passing = threading.Semaphore(3)

    def rule(request: Request) -> str:
        return "hang" if is_state(request) and not num_passing.acquire(blocking=False) else ""

    return rule


def kill(job: Job, proxy: Proxy, victim: int) -> None:
    job.kill(victim)
    rank_jobs.kill_all(job)
    proxy.rule = lambda _: ""


def test_ranks_that_close_before_the_state_is_there_leave_what_has_arrived(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent
) -> None:
    origin.into(s3, "replicas", 2)
    proxy.requests.clear()
    proxy.rule = after_three_of_the_state()
    setting = case("replicas", s3, last=3, then=["forward", "close"])
    found = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    assert [(rank["errors"], rank["resumed"]) for rank in found] == [([], 2)] * 2
    assert no_checkpoint_in(tmp_path / "new")
    before = {*asked_for(proxy, answered=True)}
    proxy.rule = lambda _: ""
    proxy.requests.clear()
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case("replicas", s3, last=3))
    assert outcome(found) == origin.expected("replicas", 2, 3)
    assert len(before & {*asked_for(proxy)}) <= 3, "asked for again, though it was here"


CALLS = {
    "replicas": [
        ["state_dict", "load_state_dict"],
        ["synchronize", "full_state_dict"],
        ["checkpoint"],
        ["overlap", "lr"],
    ],
    "shards": [["restore", "forward"], ["lr", "edit", "freeze"], ["grow"]],
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_call_that_needs_the_state_waits_for_it(
    jobs: Jobs, tmp_path: Path, s3: str, origin: Sent, kind: str
) -> None:
    origin.into(s3, kind, 2)
    more = [
        {"then": calls, "overlap": "forward" if "overlap" in calls else None}
        for calls in CALLS[kind]
    ]
    names = ["here", *(f"here-{number}" for number in range(1, len(more)))]
    for name in names:
        shutil.copytree(origin.run(kind, 2), tmp_path / name)
    local = [case(kind, "", last=4, **one) for one in more]
    expected = rank_jobs.all_results(rank_jobs.start(jobs, tmp_path, "here", 2, *local))
    for number, one in enumerate(more):
        tier, name = f"{s3}-{number}", f"new-{number}"
        origin.into(tier, kind, 2)
        found = rank_jobs.run(jobs, tmp_path, name, 2, case(kind, tier, last=4, **one))
        assert outcome(found) == outcome(expected[number]), one["then"]
        with offload.open_checkpoint(tmp_path / name) as checkpoint:
            assert checkpoint.verify().ok


@pytest.mark.parametrize("what", ["model flipped", "state flipped", "state refused"])
def test_an_error_of_one_rank_is_raised_on_all_and_the_next_call_goes_on(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent, what: str
) -> None:
    """It is rank 1's. What comes with other bytes is asked for again, and then is an error."""
    kind = "shards on hosts" if what == "model flipped" else "shards"
    origin.into(s3, kind, 2, first=False)  # to which it would go back
    expected = origin.expected(kind, 2, 3)
    broken: list[tuple[str, str]] = []

    def rule(request: Request) -> str:
        one = request.path, request.range
        tensors, _, how = what.partition(" ")
        if not is_content(request) or f"/owner-1/{tensors}" not in request.path:
            return ""
        if not broken or (how == "flipped" and broken == [one]):
            broken.append(one)
            return "flip" if how == "flipped" else "403:AccessDenied"
        return ""

    proxy.rule = rule
    found = rank_jobs.run(jobs, tmp_path, "new", 2, case(kind, s3, last=3, retries=1))
    assert len(broken) == (1 if what == "state refused" else 2)
    (first,), (second,) = (rank["errors"] for rank in found)
    assert first[0] in ("DamagedError", "TierError", "RanksError", "TierAccessError")
    assert "rank 1" in first[1]
    if what == "model flipped":
        assert first[0] == second[0] == "DamagedError"
        assert "owner-1/model/shard-00002" in second[1]
    else:
        assert "rank 1" not in second[1]
    assert [[[], *one[1:]] for one in outcome(found)] == expected


def test_a_second_restore_goes_on_after_state_that_one_rank_could_not_write(
    jobs: Jobs, tmp_path: Path, s3: str, origin: Sent
) -> None:
    origin.into(s3, "shards", 2)
    setting = case("shards", s3, last=3, then=["restore"], unwritten="exp_avg")
    found = rank_jobs.run(jobs, tmp_path, "new", 2, setting)
    assert [rank["then"] for rank in found] == [[2], [2]]
    expected = origin.expected("shards", 2, 3)
    assert [one[3] for one in outcome(found)] == [one[3] for one in expected], "bits"


def test_a_part_that_cannot_be_sealed_makes_only_its_own_rank_fetch_again(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent
) -> None:
    """The others have sealed theirs by then, and find them in the next call of the same job."""
    origin.into(s3, "replicas", 3)
    expected = origin.expected("replicas", 3, 3)
    proxy.requests.clear()
    setting = case("replicas", s3, last=3, retries=1, unsealed=1, nth_table=2)
    found = rank_jobs.run(jobs, tmp_path, "new", 3, setting)
    for number, rank in enumerate(found):
        ((_, message),) = rank["errors"]
        assert "injected failure of write_bytes" in message, message
        assert ("rank 1" in message) == (number != 1)
    assert [one[3] for one in outcome(found)] == [one[3] for one in expected], "bits"
    asked = Counter(asked_for(proxy))
    assert all("/owner-1/" in path for (path, _), number in asked.items() if number > 1)
    assert {number for (path, _), number in asked.items() if "/owner-2/" in path} == {1}


def refused(found: list[dict[str, Any]]) -> list[list[str]]:
    """Require that a restore has failed on all ranks; return kinds and messages."""
    assert [len(rank["errors"]) for rank in found] == [1] * len(found)
    assert not [rank for rank in found if "bits" in rank], "it has trained"
    return [rank["errors"][0] for rank in found]


def test_a_run_begins_anew_only_without_a_complete_copy(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """Also an unfinished copy is none; and a tier that cannot be reached is no empty one."""
    proxy.rule = lambda r: "503" if r.path.endswith("COMPLETE.json") and r.method == "PUT" else ""
    first = case("replicas", s3, last=1)
    new = rank_jobs.run(jobs, tmp_path, "new", 2, first)
    assert [(r["errors"], r["resumed"], r["warned"]) for r in new] == [([], 0, [])] * 2
    rank_jobs.run(jobs, tmp_path, "run", 2, case("replicas", s3, 1, finish_s=2.0))
    assert steps_in(s3) == [None]
    other = rank_jobs.run(jobs, tmp_path, "other", 2, first)
    assert [(rank["errors"], rank["resumed"]) for rank in other] == [([], 0), ([], 0)]
    (warning,) = other[0]["warned"]
    assert "no complete copy of a checkpoint, so training starts from the beginning" in warning
    assert other[1]["warned"] == []
    proxy.rule = lambda _: "403:AccessDenied"
    one, two = refused(rank_jobs.run(jobs, tmp_path, "away", 2, first))
    assert (one[0], two[0]) == ("TierAccessError", "RanksError")
    assert "rank 0" in two[1]
    assert "AccessDenied" in two[1]


def test_what_does_not_fit_is_refused_before_anything_is_fetched(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent
) -> None:
    origin.into(s3, "replicas", 3)
    single, hosts = f"{s3}-of-one", "replicas on hosts"
    with optimizer_in(tmp_path / "one") as optimizer:
        train(optimizer, 1)
    push(tmp_path / "one", single)
    proxy.requests.clear()
    cases = {
        "3 ranks made this checkpoint": case(hosts, s3, last=3),
        "one process made this checkpoint": case(hosts, single, last=3),
        "has the shape [96, 64], and the model has [80, 64]": case(
            "replicas", s3, last=3, width=80
        ),
        "give the same Options(tier=...) to all ranks": case("replicas", s3, last=1, without=[1]),
        "": case(hosts, single, last=1, fresh=True),
    }
    job = rank_jobs.start(jobs, tmp_path, "new", 2, *cases.values())
    *found, fresh = rank_jobs.all_results(job)
    for said, ranks in zip(cases, found, strict=False):
        assert all(said in message for _, message in refused(ranks)), said
    assert [(rank["errors"], rank["resumed"]) for rank in fresh] == [([], 0), ([], 0)]
    assert not asked_for(proxy)


def test_a_server_that_accepts_and_stalls_is_named_by_all_ranks(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, origin: Sent
) -> None:
    """The limit of the tier is longer than that after which a silent rank counts as lost.

    Both pass while nothing happens but that the server stalls; from then on the latter is short.
    """
    origin.into(s3, "replicas", 2)

    def rule(one: Request) -> str:
        if one.method == "GET" and one.path.endswith("COMPLETE.json"):
            (tmp_path / "hurry").touch()
            return "hang"
        return ""

    proxy.rule = rule
    setting = case("replicas", s3, last=2, tier_timeout_s=2 * SHORT_AGREEMENT_S)
    first, second = refused(rank_jobs.run(jobs, tmp_path, "new", 2, setting))
    for _, message in (first, second):
        assert "does not answer" in message, message
        assert "lost" not in message
    assert first[0] == "TierUnavailableError"


def test_ranks_that_seal_nothing_close_at_once_and_begin_again(
    jobs: Jobs, tmp_path: Path, s3: str, origin: Sent
) -> None:
    """The writer has nothing to send, and tells the others: they would wait for `Tier.finish_s`."""
    origin.into(s3, "shards", 2)
    job = rank_jobs.start(jobs, tmp_path, "new", 2, *[case("shards", s3, last=3)] * 2)
    for found in rank_jobs.all_results(job):
        assert [rank["resumed"] for rank in found] == [2, 2]
