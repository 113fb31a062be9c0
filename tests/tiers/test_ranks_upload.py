"""Several ranks with a tier: each sends its part, and any of them may be killed meanwhile."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from subprocess import Popen

import pytest

from offload.checkpoint.opening import open_checkpoint
from offload.tiers import list_tier, pull, push, verify_tier
from tests.campaigns import FULL
from tests.ranks_training.launch import run, start, wait
from tests.stores.files import tree
from tests.tiers.proxy import Proxy, Request

PROGRAM = "tests.tiers.rank_program"


def is_part(name: str) -> bool:
    """Whether an object is one of those that are not to be sent twice."""
    return "state/" in name or name.endswith(("safetensors", "table.json", "manifest.json"))


def one_seal(tier: str) -> str:
    return json.dumps({"tier": tier, "last": 2, "seals": [2]})


@pytest.mark.parametrize(("num_ranks", "num_later"), [(2, 2), (4, 2)])
def test_each_rank_sends_its_part_and_the_copy_is_complete(
    tmp_path: Path, s3: str, proxy: Proxy, num_ranks: int, num_later: int
) -> None:
    said = run(num_ranks, PROGRAM, str(tmp_path / "run"), one_seal(s3))
    assert [rank["warned"] for rank in said] == [[]] * num_ranks
    (copy,) = list_tier(s3)
    assert copy.marker is not None
    assert copy.marker.step == 2
    owners = {name.split("/")[0] for name in copy.marker.sizes if name.startswith("owner-")}
    assert owners == {f"owner-{number}" for number in range(1, num_ranks)}
    assert all(report.ok and not report.foreign for report in verify_tier(s3))
    assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1
    assert said[0]["tier"]["num_complete"] == 1
    # The writer sends the model and its own state; every other rank sends what it serves.
    assert [rank["tier"]["newest_step"] for rank in said] == [2] * num_ranks
    shares = [rank["tier"]["bytes_sent"] for rank in said]
    assert shares[0] == copy.marker.nbytes
    for rank in range(1, num_ranks):
        names = [name for name in copy.marker.sizes if name.startswith(f"owner-{rank}/")]
        assert shares[rank] == sum(copy.marker.sizes[name] for name in names)
    pull(s3, tmp_path / "back")
    with open_checkpoint(tmp_path / "run") as before, open_checkpoint(tmp_path / "back") as after:
        for mine, theirs in zip(before.owners, after.owners, strict=True):
            assert [*tree(Path(mine.path)).values()] == [*tree(Path(theirs.path)).values()]
    further = json.dumps({"tier": s3, "last": 3, "seals": [3]})
    again = run(num_later, PROGRAM, str(tmp_path / "back"), further)
    assert [rank["resumed"] for rank in again] == [2] * num_later
    assert [c.marker and c.marker.step for c in list_tier(s3)] == [2, 3]
    assert all(report.ok for report in verify_tier(s3))


def kill_at(ranks: list[Popen[str]], victim: int, proxy: Proxy, at: int, when: str) -> None:
    """Kill a rank when the server is about to be asked for an object, or has just taken it."""
    lock, num_puts = threading.Lock(), 0

    def look(request: Request) -> None:
        nonlocal num_puts
        if request.method != "PUT":
            return
        with lock:
            num_puts += 1
            if num_puts == at:
                ranks[victim].kill()

    if when == "before":

        def rule(request: Request) -> str:
            look(request)
            return ""

        proxy.rule = rule
    else:
        proxy.after = look


KILLS = [(2, 0, 4, "after"), (2, 1, 7, "before"), (4, 2, 9, "after")]
if FULL:
    every = [
        (num_ranks, victim, at, ("before", "after")[at % 2])
        for num_ranks in (2, 4)
        for victim in range(num_ranks)
        for at in range(1, 9 + 4 * num_ranks, 7)
    ]
    KILLS = [*dict.fromkeys([*KILLS, *every])]


@pytest.mark.parametrize(("num_ranks", "victim", "at", "when"), KILLS, ids=str)
def test_a_rank_is_killed_in_an_upload(
    tmp_path: Path, s3: str, proxy: Proxy, num_ranks: int, victim: int, at: int, when: str
) -> None:
    ranks = start(num_ranks, PROGRAM, [str(tmp_path / "run"), one_seal(s3)])
    kill_at(ranks, victim, proxy, at, when)
    while ranks[victim].poll() is None:
        if all(rank.poll() is not None for rank in ranks):
            break
        threading.Event().wait(0.02)
    for rank in ranks:
        rank.kill()  # as torchrun does
    wait(ranks)
    proxy.rule, proxy.after = (lambda _: ""), (lambda _: None)
    for copy in list_tier(s3):
        if copy.marker is not None:  # killed after everything was there
            assert all(report.ok for report in verify_tier(s3))
    said = run(num_ranks, PROGRAM, str(tmp_path / "run"), one_seal(s3))
    assert {rank["resumed"] for rank in said} <= {0, 2}
    (copy,) = [copy for copy in list_tier(s3) if copy.marker is not None]
    assert copy.marker is not None
    assert copy.marker.step == 2
    assert all(report.ok and not report.foreign for report in verify_tier(s3))
    if said[0]["resumed"] == 2:
        assert len(list_tier(s3)) == 1
        assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1


def test_push_goes_on_with_what_ranks_have_begun(tmp_path: Path, s3: str, proxy: Proxy) -> None:
    ranks = start(2, PROGRAM, [str(tmp_path / "run"), one_seal(s3)])
    kill_at(ranks, 0, proxy, 6, "after")
    while ranks[0].poll() is None:
        threading.Event().wait(0.02)
    for rank in ranks:
        rank.kill()
    wait(ranks)
    proxy.after = lambda _: None
    report = push(tmp_path / "run", s3)
    assert report.num_kept >= 1
    assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1
    assert [one.ok for one in verify_tier(s3)] == [True]
