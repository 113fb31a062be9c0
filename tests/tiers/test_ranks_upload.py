"""Several ranks with a tier: each sends its part, and any of them may be killed meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import offload
from gds import PosixBackend
from offload.errors import CheckpointError, DamagedError, RecycledError, TierNotFoundError
from offload.tiers import list_tier, prune_tier, pull, push, verify_tier
from offload.tiers.services.opening import open_objects
from tests.campaigns import FULL
from tests.command_line import Run
from tests.limits import HANG_S
from tests.ranks_store.job import Job
from tests.ranks_training.rank_server import Jobs
from tests.tiers import rank_jobs
from tests.tiers.copies import SMALL, files, sent_twice, steps_in, until_parameters, whole
from tests.tiers.proxy import Proxy, Request
from tests.tiers.rank_jobs import case, is_put

SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"

SENT = [("replicas", 2), ("shards on hosts", 2), *([("replicas", 4), ("shards", 4)] * FULL)]


@pytest.mark.parametrize(("kind", "num_ranks"), SENT)
def test_each_rank_sends_its_part_and_the_copy_is_complete(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, kind: str, num_ranks: int
) -> None:
    said = rank_jobs.run(jobs, tmp_path, "run", num_ranks, case(kind, s3, 2))
    assert [rank["warned"] for rank in said] == [[]] * num_ranks
    (copy,) = list_tier(s3)
    assert copy.marker is not None
    assert copy.marker.step == 2
    shares = [{n for n in copy.marker.sizes if n.startswith(f"owner-{r}/")} for r in range(4)]
    assert [bool(names) for names in shares] == [0 < rank < num_ranks for rank in range(4)]
    assert not sent_twice(proxy)
    # The writer sends the model and its own state; every other rank sends what it serves.
    assert [rank["tier"]["newest_step"] for rank in said] == [2] * num_ranks
    assert said[0]["tier"]["bytes_sent"] == copy.marker.nbytes
    for rank in range(1, num_ranks):
        nbytes = sum(copy.marker.sizes[name] for name in shares[rank])
        assert said[rank]["tier"]["bytes_sent"] == nbytes
        assert any("model" in name for name in shares[rank]) == (kind == "shards on hosts")
    (report,) = verify_tier(s3)
    assert (report.problems, report.foreign) == ((), ())
    assert report.bytes_checked == copy.marker.nbytes
    back = tmp_path / "back"
    pull(s3, back)
    assert pull(s3, back).already_there
    first, *others = [tmp_path / "run" / host for host in ("ab" if "hosts" in kind else ".")]
    with (
        offload.open_checkpoint(first, parts=others) as before,
        offload.open_checkpoint(back) as after,
    ):
        assert after.verify().ok
        assert before.train_states == after.train_states
        places = [(before.path, after.path)]
        places += [(a.path, b.path) for a, b in zip(before.owners, after.owners, strict=True)]
        for one, other in places:
            assert files(Path(one), "manifest.json") == files(Path(other), "manifest.json")
    # Where all of it is now, as many ranks go on, as if they had not been stopped.
    kept = rank_jobs.run(jobs, tmp_path, "run", num_ranks, case(kind, "", last=3))
    again = rank_jobs.run(
        jobs, tmp_path, "back", num_ranks, case(kind.removesuffix(" on hosts"), s3, 3)
    )
    assert rank_jobs.outcome(again) == rank_jobs.outcome(kept)
    assert (steps_in(s3), whole(s3)) == ([2, 3], [True, True])


KILLS = [("replicas", 2, 0, 6, "after"), ("shards on hosts", 2, 1, 3, "before")]
if FULL:
    KILLS += [
        (kind, num_ranks, victim, at, ("before", "after")[at % 2])
        for kind, num_ranks in (("replicas", 2), ("replicas", 4), ("shards on hosts", 2))
        for victim in range(num_ranks)
        for at in range(4, 14, 3)  # the first object is sent before there is a checkpoint
    ]


@pytest.mark.parametrize(("kind", "num_ranks", "victim", "at", "when"), [*dict.fromkeys(KILLS)])
def test_a_rank_is_killed_in_an_upload(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy,
    kind: str, num_ranks: int, victim: int, at: int, when: str,
) -> None:  # fmt: skip
    """The next job sends what is missing, and nothing again that the tier has."""
    setting = case(kind, s3, 2)
    job = rank_jobs.start(jobs, tmp_path, "run", num_ranks, setting)
    rank_jobs.kill_at(job, proxy, victim, at, is_put, when)
    if steps_in(s3) != [2]:  # killed after everything was there
        assert steps_in(s3) == [None]
        with pytest.raises(TierNotFoundError, match="no complete copy"):
            pull(s3, tmp_path / "back")
    if kind == "replicas":  # or one process goes on with what ranks have begun
        before = steps_in(s3)
        assert push(tmp_path / "run", s3).num_kept >= (before == [None])
    said = rank_jobs.run(jobs, tmp_path, "run", num_ranks, setting)
    assert {rank["resumed"] for rank in said} == {2}
    assert steps_in(s3) == [2]
    assert not sent_twice(proxy)
    (report,) = verify_tier(s3)
    assert (report.problems, report.foreign) == ((), ())


SLOW = [("shards", 2), *([("replicas", 2), ("replicas", 4)] * FULL)]


@pytest.mark.parametrize(("kind", "num_ranks"), SLOW)
def test_parameters_arrive_before_the_state_of_any_rank(
    tmp_path: Path, jobs: Jobs, s3: str, proxy: Proxy, kind: str, num_ranks: int
) -> None:
    """No object of state passes from the second checkpoint on, until step 4 has its parameters."""
    go_on, early = threading.Event(), list[list[str]]()

    def rule(request: Request) -> str:
        if request.method == "PUT" and "/gen-00000001/" not in request.path:
            copy, is_marker, _ = request.path.partition("PARAMETERS.json")
            if "/state/" in request.path:
                assert go_on.wait(HANG_S)
            elif is_marker:
                others = f"{copy}owner-"
                early.append([r.path for r in proxy.requests if r.path.startswith(others)])
        return ""

    proxy.rule = rule
    setting = case(kind, s3, 1, 2, 3, 4, max_age_s=20.0, slow_link_s=12.0)
    job = rank_jobs.start(jobs, tmp_path, "run", num_ranks, setting)
    until_parameters(s3, 4)
    copies = {c.parameters.step: c for c in list_tier(s3) if c.parameters is not None}
    assert copies.keys() == {2, 4}  # those of step 3 are of no use any more
    go_on.set()
    stats = rank_jobs.results(job)[0]["tier"]
    assert early[0] == []
    events = [(e["step"], e["choice"], e["outcome"]) for e in stats["events"]]
    assert events[0] == (1, "upload", "complete")
    assert (2, "parameters", "complete") in events
    assert {(3, "parameters", "parameters"), (4, "parameters", "parameters")} <= {*events}
    assert [c.marker.step for c in list_tier(s3) if c.marker is not None] == [1, 2]
    assert all(report.ok and not report.foreign for report in verify_tier(s3))


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """The directories of two hosts, whose owners have shards of the model, after step 2."""
    directories = [tmp_path / host for host in ("a", "b")]
    with Job(
        [PosixBackend(), PosixBackend()], keep=2, sharded=True, directories=[*map(str, directories)]
    ) as job:
        job.seal(1)
        job.seal(2)
    return directories


def test_push_needs_the_parts_of_all_hosts(hosts: list[Path], s3: str, run: Run) -> None:
    one, other = hosts
    with pytest.raises(CheckpointError, match=r"owner 1 is not seen on this host: .*--part"):
        push(one, s3, parts=[])
    assert list_tier(s3) == []
    status, out, errors = run("push", str(one), s3, "--part", str(other))
    assert (status, errors) == (0, ""), out
    assert push(one, s3, parts=[other]).already_complete
    assert "step 2" in run("ls", s3)[1]
    assert run("verify", s3)[0] == 0
    with pytest.raises(CheckpointError, match="into one directory"):
        pull(s3, one.parent / "back", parts=[one.parent / "more"])
    push(one / "step-00000001", s3, parts=[other])
    removed, _ = list_tier(s3)
    prune_tier(s3, offload.LastK(1))
    with open_objects(s3) as objects:
        assert not objects.sizes_below(removed.folder)
    assert (steps_in(s3), whole(s3)) == ([2], [True])


@pytest.mark.parametrize(
    "name", [SHARD.format(1), f"owner-1/{SHARD.format(2)}", "owner-1/state/exp_avg.000000",
             "owner-1/table.json"],
)  # fmt: skip
def test_a_damaged_object_of_an_owner_is_found(hosts: list[Path], folder: str, name: str) -> None:
    url = push(hosts[0], folder, parts=hosts[1:], object_bytes=SMALL).url
    back, victim = hosts[0].parent / "back", Path(url.removeprefix("file://")) / name
    good = victim.read_bytes()
    victim.write_bytes(good[:-1])
    assert all(name in problem for problem in verify_tier(folder)[0].problems)
    assert whole(folder) == [False]
    victim.write_bytes(good[:-4] + bytes([good[-4] ^ 1]) + good[-3:])
    (report,) = verify_tier(folder)
    assert [name in problem for problem in report.problems] == [True]
    with pytest.raises(DamagedError, match=name.removeprefix("owner-1/")):
        pull(folder, back, num_transfers=1)
    assert not [*back.glob("step-*")]
    victim.write_bytes(good)
    report = pull(folder, back)
    if name != "owner-1/table.json":  # else nothing says what of a part is there
        assert (report.bytes_kept > 0) == (name != SHARD.format(1))  # which comes first
    with offload.open_checkpoint(back) as checkpoint:
        assert checkpoint.verify().ok


def test_a_part_that_is_damaged_or_recycled_ends_the_upload(hosts: list[Path], s3: str) -> None:
    with offload.open_checkpoint(hosts[0], parts=hosts[1:]) as checkpoint:
        shard = Path(checkpoint.owners[0].path) / SHARD.format(2)
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedError, match=str(shard)):
        push(hosts[0], s3, parts=hosts[1:])
    assert steps_in(s3) == [None]
    shard.write_bytes(data)
    with Job(
        [PosixBackend(), PosixBackend()], keep=1, sharded=True, directories=[*map(str, hosts)]
    ) as job:

        def progress(done: int, total: int) -> None:
            if job.newest == 2:
                job.seal(3)
                job.seal(4)

        with pytest.raises((RecycledError, CheckpointError)):
            push(hosts[0], s3, parts=hosts[1:], object_bytes=1, num_transfers=1, progress=progress)
        assert job.newest == 4
    assert list_tier(s3) == []
