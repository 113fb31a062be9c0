"""Processes that are killed at any request of an upload or a download, before or after it."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

import offload
from offload.errors import CheckpointError
from offload.format.digests import DigestContext
from offload.tiers import list_tier, pull, push, verify_tier
from tests.eventually import eventually
from tests.ranks_training.rank_server import Job, Jobs
from tests.stores.files import steps
from tests.stores.small import train
from tests.tiers import killed
from tests.tiers.copies import DOCUMENTS, SMALL, files, new_in, optimizer_in, sent_twice, whole
from tests.tiers.proxy import Proxy, Request


def run_and_kill(jobs: Jobs, folder: Path, proxy: Proxy, at: int, when: str, *what: str) -> bool:
    """Run a process, and kill it at its request of a number.

    Args:
        jobs: Server that forks it.
        folder: Folder of the test.
        proxy: Proxy that the process uses.
        at: Number of the request, from 0.
        when: "before" the server sees the request, or "after" the client has its answer.
        what: What `killed.start` is to start.

    Returns:
        Whether it was killed, and has not come to its end before.
    """
    first, started = len(proxy.requests), threading.Event()
    jobs_of_this: list[Job] = []

    def kill() -> None:
        assert started.wait(60)
        killed.kill(jobs_of_this[0])

    def rule(request: Request) -> str:
        if when == "before" and request.number - first == at:
            kill()
            return "cut"
        return ""

    def after(request: Request) -> None:
        if when == "after" and request.number - first == at:
            kill()

    proxy.rule, proxy.after = rule, after
    jobs_of_this.append(killed.start(jobs, folder, *what))
    started.set()
    (ended,) = jobs_of_this[0].wait()
    proxy.rule, proxy.after = (lambda _: ""), (lambda _: None)
    assert ended.status in (0, -signal.SIGKILL), ended.errors
    return ended.status != 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(40))
def test_a_killed_push_offers_nothing_and_goes_on(
    jobs: Jobs, store: Path, s3: str, proxy: Proxy, at: int, when: str,
    record_property: pytest.RecordProperty,
) -> None:  # fmt: skip
    was_killed = run_and_kill(jobs, store.parent, proxy, at, when, "push", str(store), s3)
    record_property("kills", int(was_killed))
    assert was_killed or len(proxy.requests) < at + 20, "more requests than are tried"
    for copy in list_tier(s3):  # whatever is offered is whole
        assert copy.marker is None or verify_tier(copy.url)[0].ok
    push(store, s3, object_bytes=SMALL)
    assert not sent_twice(proxy)
    assert whole(s3) == [True]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(24))
def test_a_killed_pull_offers_nothing_and_goes_on(
    jobs: Jobs, store: Path, s3: str, proxy: Proxy, tmp_path: Path, at: int, when: str,
    record_property: pytest.RecordProperty,
) -> None:  # fmt: skip
    push(store, s3, object_bytes=SMALL)
    back, before = tmp_path / "back", len(proxy.requests)
    was_killed = run_and_kill(jobs, tmp_path, proxy, at, when, "pull", s3, str(back))
    record_property("kills", int(was_killed))
    assert (steps(back) if back.exists() else []) in (([], [3]) if was_killed else ([3],))
    got = pull(s3, back)
    assert was_killed or got.already_there
    assert files(back / "step-00000003") == files(store / "step-00000003")
    asked = Counter(
        (r.path, r.range) for r in proxy.requests[before:]
        if r.method == "GET" and r.status == 206 and "/state/" in r.path
    )  # fmt: skip
    # At most those transfers are repeated that were in progress.
    assert asked.total() - len(asked) <= 2


@pytest.mark.parametrize("place", ["parameters", "a chunk of three", "all but one piece"])
def test_a_restore_that_is_killed_half_way_leaves_what_it_has(
    jobs: Jobs, store: Path, s3: str, proxy: Proxy, tmp_path: Path, place: str
) -> None:
    """The next process goes on, and asks for nothing twice that was written."""
    push(store, s3, object_bytes=1)
    with optimizer_in(store, keep=9) as optimizer:  # a training that was never interrupted
        optimizer.restore()
        train(optimizer, 3)
    hung, new = threading.Event(), tmp_path / "new"
    kept_back, wanted = {
        "parameters": ("/state/", 0),
        "a chunk of three": ("/state/[a-z_]*.00000[12]", 3),
        "all but one piece": ("/state/exp_avg_sq.000002", 8),
    }[place]

    def rule(request: Request) -> str:
        if request.method == "GET" and re.search(kept_back, request.path):
            hung.set()
            return "hang"
        return ""

    proxy.rule = rule
    job = killed.start(jobs, tmp_path, "restore", s3, str(new))
    job.until(0, 1)
    assert hung.wait(60)
    assert eventually(lambda: len(state_in(new, store)) == wanted)
    killed.kill(job)
    assert job.wait()[0].status == -signal.SIGKILL
    with pytest.raises(CheckpointError):
        offload.open_checkpoint(new)
    written = state_in(new, store)
    proxy.requests.clear()
    proxy.rule = lambda _: ""
    with new_in(new, s3) as optimizer:
        optimizer.restore()
        train(optimizer, 3)
    # Not what uploads of the next checkpoints read back.
    asked = [r.path for r in proxy.requests if r.method == "GET" and "/gen-00000003/" in r.path]
    assert not [path for path in asked if "model.safetensors" in path]
    assert not [name for name in written if any(name in path for path in asked)]
    expected = files(store / "step-00000006", *DOCUMENTS)
    assert files(new / "step-00000006", *DOCUMENTS) == expected


def state_in(directory: Path, store: Path) -> set[str]:
    """Names of the objects of state, one chunk each, whose bytes are in a slot of a directory."""
    with offload.open_checkpoint(store / "step-00000003") as sent:
        manifest = sent.manifest
    context = DigestContext(manifest.store_id, manifest.generation)
    found = set[str]()
    for slot in directory.glob(".slot-*"):
        for array, digests in manifest.digests.items():
            file = slot / f"{array}.safetensors"
            data = memoryview(file.read_bytes() if file.exists() else b"")
            for chunk, digest in enumerate(digests):
                start, nbytes = manifest.layout.byte_range(array, chunk)
                one = data[start : start + nbytes]
                if digest is not None and context.digest(array, chunk, one) == digest:
                    found.add(f"state/{array}.{chunk:06d}")
    return found
