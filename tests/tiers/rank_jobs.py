"""Ranks with a tier, which a server forks, so that each of them is there within a moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.limits import HANG_S
from tests.ranks_training.rank_server import Job, Jobs
from tests.tiers.proxy import Proxy, Request

KINDS = {
    "one": {"kind": "one"},
    "replicas": {"kind": "ddp"},
    "shards": {"kind": "fsdp2"},
    "replicas on hosts": {"kind": "ddp", "hosts": "ab"},
    "shards on hosts": {"kind": "fsdp2", "hosts": "ab"},
}


def case(
    kind: str, tier: str, *seals: int, last: int | None = None, **more: object
) -> dict[str, Any]:
    """Return what ranks of a kind do that seal after some steps: see `rank_program.main`."""
    steps = max(seals, default=0) if last is None else last
    return {**KINDS[kind], "tier": tier, "seals": [*seals], "last": steps, **more}


def environment() -> dict[str, str]:
    """Return what says where tiers are, for processes that a server forks."""
    names = ("AWS_", "NO_PROXY")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def start(jobs: Jobs, folder: Path, into: str, num_ranks: int, case: dict[str, Any]) -> Job:
    """Start ranks of `tests.tiers.rank_program`.

    Args:
        jobs: Server of ranks.
        folder: Folder of the test.
        into: Name of the store's directory in it, or of the folder of all hosts.
        num_ranks: Number of ranks.
        case: What the ranks do.
    """
    calls = [[{**case, "into": into}]] * num_ranks
    program = "tests.tiers.rank_program"
    return jobs.start(folder, calls, program=program, environment=environment())


def results(job: Job) -> list[dict[str, Any]]:
    """Wait for ranks, all of which must succeed; return what each one said."""
    ranks = job.wait()
    failed = [(number, rank.errors) for number, rank in enumerate(ranks) if not rank.outcomes]
    assert not failed, failed
    return [rank.of("main")["value"] for rank in ranks]


def run(
    jobs: Jobs, folder: Path, into: str, num_ranks: int, case: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run ranks, all of which must succeed; return what each one said."""
    return results(start(jobs, folder, into, num_ranks, case))


def outcome(said: list[dict[str, Any]]) -> list[Any]:
    """Return what ranks say of their restore, and their parameters."""
    return [[rank[key] for key in ("errors", "state", "resumed", "bits", "then")] for rank in said]


def kill_all(job: Job) -> None:
    """Kill all ranks, as torchrun does when one has failed, and wait for their end."""
    for rank in range(len(job.pids)):
        job.kill(rank)
    job.wait()


def kill_at(
    job: Job, proxy: Proxy, victim: int, at: int, counts: Callable[[Request], bool],
    when: str = "after",
) -> None:  # fmt: skip
    """Kill a rank at a request, and then the others.

    Args:
        job: Ranks that have just been started.
        proxy: Proxy that they use.
        victim: Number of the rank.
        at: Number of the request, from 1.
        counts: Chooses the requests that count.
        when: "before" the server sees the request, or "after" the rank has its answer.
    """
    lock, killed, number = threading.Lock(), threading.Event(), 0

    def look(request: Request) -> str:
        nonlocal number
        with lock:
            number += counts(request)
            if number >= at and not killed.is_set():
                job.kill(victim)
                killed.set()
        return ""

    if when == "before":
        proxy.rule = look
    else:
        proxy.after = look
    assert killed.wait(HANG_S)
    kill_all(job)
    proxy.rule, proxy.after = (lambda _: ""), (lambda _: None)


def is_put(request: Request) -> bool:
    """Whether a request writes an object."""
    return request.method == "PUT"


def is_state(request: Request) -> bool:
    """Whether a request asks for state of the optimizer."""
    return request.method == "GET" and "state/" in request.path


def is_tensors(name: str) -> bool:
    """Whether an object has tensors."""
    return "state/" in name or "model" in name


def is_content(request: Request) -> bool:
    """Whether a request has brought tensors."""
    return request.method == "GET" and bool(request.range) and is_tensors(request.path)


def asked_for(proxy: Proxy, *, answered: bool = False) -> list[tuple[str, str]]:
    """Return the ranges of tensors that ranks have asked for, or been given."""
    return [
        (r.path, r.range) for r in [*proxy.requests]
        if is_content(r) and (r.bytes_down or not answered)
    ]  # fmt: skip
