"""Ranks on several hosts with a tier: each sends its shard of the model and of the state."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.errors import CheckpointError, DamagedError, TierNotFoundError
from offload.retention.policy import LastK
from offload.tiers import list_tier, prune_tier, pull, push, verify_tier
from tests.campaigns import FULL
from tests.command_line import Run
from tests.ranks_training.rank_server import Jobs
from tests.stores.files import tree
from tests.tiers import rank_jobs
from tests.tiers.proxy import Proxy, Request
from tests.tiers.test_ranks_upload import is_part

SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"


def case(hosts: str, tier: str, last: int = 2, **more: object) -> dict[str, Any]:
    """Return a case in which the last step is sealed."""
    setting = {"kind": "fsdp2", "hosts": hosts, "tier": tier, "last": last, "seals": [last]}
    return {**setting, **more}


def shard_name(owner: int) -> str:
    """Return the name that the object of an owner's shard file has in a copy."""
    return f"owner-{owner}/{SHARD.format(owner + 1)}" if owner else SHARD.format(1)


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a part or checkpoint that do not say where they lie."""
    found = tree(folder)
    return {
        str(path.relative_to(folder)): data
        for path, data in found.items()
        if data is not None and path.name != "manifest.json"
    }


@pytest.fixture
def made(jobs: Jobs, tmp_path: Path) -> Path:
    """Return the folder of two hosts with a checkpoint of step 2."""
    rank_jobs.run(jobs, tmp_path, "hosts", 2, case("ab", ""))
    return tmp_path / "hosts"


@pytest.mark.parametrize("hosts", ["ab", *(["aabb"] if FULL else [])])
def test_each_rank_sends_its_shards_and_all_come_back(
    jobs: Jobs, tmp_path: Path, s3: str, proxy: Proxy, hosts: str
) -> None:
    size, folder = len(hosts), tmp_path / "hosts"
    said = rank_jobs.run(jobs, tmp_path, "hosts", size, case(hosts, s3))
    assert [rank["tier"]["newest_step"] for rank in said] == [2] * size
    (copy,) = list_tier(s3)
    assert copy.marker is not None
    assert {name for name in copy.marker.sizes if "model" in name} == {
        shard_name(owner) for owner in range(size)
    }
    for owner, host in enumerate(hosts):
        parts = [folder / host / "step-00000002"]
        parts = [*(folder / host / f"owner-{owner}").glob("part-*")] if owner else parts
        sizes = {(part / SHARD.format(owner + 1)).stat().st_size for part in parts}
        assert copy.marker.sizes[shard_name(owner)] in sizes
    assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1
    # The writer sends its own objects; every other rank those of its owner, and nothing else.
    assert said[0]["tier"]["bytes_sent"] == copy.marker.nbytes
    for owner in range(1, size):
        names = [name for name in copy.marker.sizes if name.startswith(f"owner-{owner}/")]
        sent = said[owner]["tier"]["bytes_sent"]
        assert sent == sum(copy.marker.sizes[name] for name in names)
    (report,) = verify_tier(s3)
    assert (report.problems, report.foreign) == ((), ())
    assert report.bytes_checked == copy.marker.nbytes
    back = tmp_path / "back"
    pull(s3, back)
    assert pull(s3, back).already_there
    parts = [folder / host for host in sorted({*hosts})[1:]]
    with (
        offload.open_checkpoint(folder / "a", parts=parts) as before,
        offload.open_checkpoint(back) as after,
    ):
        assert after.verify().ok
        assert before.train_states == after.train_states
        assert content(Path(before.path)) == content(Path(after.path))
        for mine, theirs in zip(before.owners, after.owners, strict=True):
            assert content(Path(mine.path)) == content(Path(theirs.path))
    # On the host that has all of it now, as many ranks go on, as if they had not been stopped.
    further = case(hosts, s3, last=3, seals=[])
    kept = rank_jobs.run(jobs, tmp_path, "hosts", size, further)
    del further["hosts"]
    again = rank_jobs.run(jobs, tmp_path, "back", size, further)
    assert [rank["resumed"] for rank in again] == [2] * size
    assert [rank["bits"] for rank in again] == [rank["bits"] for rank in kept]


KILLS = [(2, 1, 3, "before"), (2, 0, 4, "after")]
if FULL:
    KILLS += [(2, v, at, ("before", "after")[at % 2]) for v in (0, 1) for at in range(1, 14, 3)]


@pytest.mark.parametrize(("num_ranks", "victim", "at", "when"), [*dict.fromkeys(KILLS)], ids=str)
def test_a_rank_is_killed_in_an_upload_of_shards(
    jobs: Jobs,
    tmp_path: Path,
    s3: str,
    proxy: Proxy,
    num_ranks: int,
    victim: int,
    at: int,
    when: str,
) -> None:
    """The next job sends what is missing, and nothing again that the tier has."""
    setting = case("ab", s3)
    job = rank_jobs.start(jobs, tmp_path, "hosts", num_ranks, setting)
    lock, killed, num_puts = threading.Lock(), threading.Event(), 0

    def look(request: Request) -> str:
        nonlocal num_puts
        with lock:
            num_puts += request.method == "PUT"
            if num_puts == at and not killed.is_set():
                job.kill(victim)
                killed.set()
        return ""

    if when == "before":
        proxy.rule = look
    else:
        proxy.after = look
    assert killed.wait(60)
    rank_jobs.kill_all(job)
    proxy.rule, proxy.after = (lambda _: ""), (lambda _: None)
    assert [copy.marker for copy in list_tier(s3)] == [None]
    with pytest.raises(TierNotFoundError, match="no complete copy"):
        pull(s3, tmp_path / "back")
    said = rank_jobs.run(jobs, tmp_path, "hosts", num_ranks, setting)
    assert [rank["resumed"] for rank in said] == [2] * num_ranks
    (copy,) = list_tier(s3)
    assert copy.marker is not None
    assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1
    (report,) = verify_tier(s3)
    assert (report.problems, report.foreign) == ((), ())


def test_push_needs_the_parts_of_all_hosts(made: Path, s3: str, run: Run) -> None:
    with pytest.raises(CheckpointError, match=r"owner 1 is not seen on this host: .*--part"):
        push(made / "a", s3, parts=[])
    assert list_tier(s3) == []
    status, out, errors = run("push", str(made / "a"), s3, "--part", str(made / "b"))
    assert (status, errors) == (0, ""), out
    assert push(made / "a", s3, parts=[made / "b"]).already_complete
    status, out, _ = run("ls", s3)
    assert status == 0
    assert "step 2" in out or "00000002" in out
    status, out, _ = run("verify", s3)
    assert status == 0


@pytest.mark.parametrize("owner", [0, 1])
def test_a_damaged_shard_in_a_tier_is_found(made: Path, tmp_path: Path, owner: int) -> None:
    tier = tmp_path / "tier"
    push(made / "a", f"file://{tier}", parts=[made / "b"])
    (victim,) = tier.rglob(SHARD.format(owner + 1))
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (report,) = verify_tier(f"file://{tier}")
    assert [shard_name(owner) in problem for problem in report.problems] == [True]
    with pytest.raises(DamagedError, match=SHARD.format(owner + 1)):
        pull(f"file://{tier}", tmp_path / "back", num_transfers=1)
    assert not [*(tmp_path / "back").glob("step-*")]
    victim.write_bytes(good[:-1])
    (report,) = verify_tier(f"file://{tier}")
    assert any(f"{len(good) - 1} bytes, expected {len(good)}" in one for one in report.problems)
    victim.write_bytes(good)
    report = pull(f"file://{tier}", tmp_path / "back")
    assert (report.bytes_kept > 0) == (owner == 1)  # the shard of owner 0 comes first
    with offload.open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.verify().ok


def test_a_damaged_shard_on_a_host_is_not_sent(made: Path, s3: str) -> None:
    (part,) = (made / "b/owner-1").glob("part-*")
    shard = part / SHARD.format(2)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError, match=str(shard)):
        push(made / "a", s3, parts=[made / "b"])
    assert [copy.marker for copy in list_tier(s3)] == [None]


def test_pruning_removes_every_object(jobs: Jobs, made: Path, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    push(made / "a", f"file://{tier}", parts=[made / "b"])
    rank_jobs.run(jobs, tmp_path, "hosts", 2, case("ab", f"file://{tier}", last=3))
    old, new = list_tier(f"file://{tier}")
    done = prune_tier(f"file://{tier}", LastK(1))
    assert [copy.url for copy in done.removed] == [old.url]
    assert not [path for path in (tier / old.folder).rglob("*") if path.is_file()]
    assert [copy.url for copy in list_tier(f"file://{tier}")] == [new.url]
    assert all(report.ok for report in verify_tier(f"file://{tier}"))
