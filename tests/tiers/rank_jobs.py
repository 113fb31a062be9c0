"""Ranks with a tier, which a server forks, so that each of them is there within a moment."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.tiers.services.opening import open_objects
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


def start(jobs: Jobs, folder: Path, into: str, num_ranks: int, *cases: dict[str, Any]) -> Job:
    """Start ranks of `tests.tiers.rank_program`.

    Args:
        jobs: Server of ranks.
        folder: Folder of the test.
        into: Name of the store's directory in it, or of the folder of all hosts. If there are
            several cases each has one of its own, whose name ends with its number.
        num_ranks: Number of ranks.
        cases: What the ranks do, one after another.
    """
    names = [into, *(f"{into}-{number}" for number in range(1, len(cases)))]
    calls = [{**case, "into": name} for case, name in zip(cases, names, strict=True)]
    program = "tests.tiers.rank_program"
    return jobs.start(folder, [calls] * num_ranks, program=program, environment=environment())


def all_results(job: Job) -> list[list[dict[str, Any]]]:
    """Wait for ranks, all of which must succeed; return what each one said of each case."""
    ranks = job.wait()
    for rank in ranks:
        assert rank.has_come_to_its_end, rank.errors
        assert rank.outcomes, rank.errors
    said = [[one["value"] for one in rank.outcomes] for rank in ranks]
    return [list(case) for case in zip(*said, strict=True)]


def results(job: Job) -> list[dict[str, Any]]:
    """Do the same for ranks with one case."""
    (said,) = all_results(job)
    return said


def run(
    jobs: Jobs, folder: Path, into: str, num_ranks: int, case: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run ranks, all of which must succeed; return what each one said."""
    return results(start(jobs, folder, into, num_ranks, case))


class Sent:
    """What ranks have sent to tiers after steps 1 and 2, and how they go on where they were.

    Each number of ranks of a kind does so once, however many tests ask.
    """

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self._tiers: dict[str, str] = {}
        self._expected: dict[str, list[Any]] = {}

    def run(self, kind: str, num_ranks: int) -> Path:
        """Return the directory of the ranks' store, or the folder of all hosts."""
        name = f"{kind}-{num_ranks}".replace(" ", "-")
        if name not in self._tiers:
            self._tiers[name] = f"s3://bucket/{uuid.uuid4().hex}/run"
            run(self._jobs, self._folder, name, num_ranks, case(kind, self._tiers[name], 1, 2))
        return self._folder / name

    def into(self, tier: str, kind: str, num_ranks: int, *, first: bool = True) -> None:
        """Copy what they have sent into a tier; perhaps without the checkpoint of step 1."""
        source = self._tiers[self.run(kind, num_ranks).name]
        with open_objects(source) as sent, open_objects(tier) as objects:
            for name, nbytes in sent.sizes_below("").items():
                if first or "/gen-00000001/" not in name:
                    objects.put(name, sent.get(name, nbytes))

    def expected(
        self, kind: str, num_ranks: int, last: int, *then: str, made: tuple[str, int] | None = None
    ) -> list[Any]:
        """Return the outcome of ranks of a kind that go on from that directory.

        Args:
            kind: Of those ranks.
            num_ranks: How many.
            last: Their last step.
            then: What they do first, which must not change a checkpoint.
            made: Kind and number of the ranks that have made it, if those were others.
        """
        place = self.run(*(made or (kind, num_ranks)))
        key = f"{place.name} {kind} {num_ranks} {last} {then}"
        if key not in self._expected:
            name = place.name
            if "hosts" not in kind:  # another number of ranks may change what it does not need
                name = f"{place.name}-{len(self._expected)}"
                shutil.copytree(place, self._folder / name)
            setting = case(kind, "", last=last, then=[*then])
            said = run(self._jobs, self._folder, name, num_ranks, setting)
            self._expected[key] = outcome(said)
        return self._expected[key]


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
