"""Power is lost on one of two nodes, or on both, after any single effect of the protocol.

A run of two ranks is recorded once, with the effects of both nodes in the order in which they came.
For every prefix, a new job is started on what each node has kept: the node that lost its power has
one of the states that its disk may be in, the other node everything. The job must find the last
acknowledged checkpoint or a later one that was begun, whole on both nodes to the last byte. It must
still do so after it has been killed in the middle of its own first step: no part that a checkpoint
names may be rewritten.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.crash.crash_backend import CrashBackend, Disk, Image, Operation
from tests.ranks_store.job import Job

SEED = int(os.environ.get("CRASH_SEED", "20260711"))
CUTS_PER_OPERATION = int(os.environ.get("CRASH_CUTS", "1"))
NODES = (0, 1)


@dataclass(frozen=True)
class Promise:
    """What a later job may find from some moment on."""

    newest: frozenset[int] = frozenset({0})
    """Step of the newest checkpoint; 0 stands for none."""


class Nodes:
    """The backends of two nodes, and one log of the effects of both."""

    def __init__(self, *, sharded: bool) -> None:
        self.sharded = sharded
        self.log: list[tuple[int, Operation]] = []
        self.backends = tuple(CrashBackend() for _ in NODES)
        for node, backend in enumerate(self.backends):
            backend.log = _Log(self.log, node)

    def job(self, *, keep: int) -> Job:
        """Start a job on the nodes."""
        return Job(self.backends, keep=keep, sharded=self.sharded)

    def promise(self, *newest: int) -> None:
        """Note which checkpoints a later job may find from now on."""
        self.backends[0].note(Promise(frozenset(newest)))


class _Log(list[Operation]):
    """The log of one node, which also adds to the log of all."""

    def __init__(self, every: list[tuple[int, Operation]], node: int) -> None:
        super().__init__()
        self._every = every
        self._node = node

    def append(self, operation: Operation) -> None:
        super().append(operation)
        self._every.append((self._node, operation))


class _AllSurvives(random.Random):
    """Chooses the state of a disk that has lost nothing."""

    def choice(self, seq: Sequence[float]) -> float:  # type: ignore[override]
        return max(seq)

    def random(self) -> float:
        return 0.5


def seals(nodes: Nodes, job: Job, *steps: int, first: int = 0) -> int:
    """Seal steps one after the other, with the promise that each of them changes."""
    for step in steps:
        slots = job.grant()
        job.write(slots, step)
        seal = job.prepare(slots, step)
        nodes.promise(first, step)
        job.publish(seal)
        nodes.promise(step)
        first = step
    return first


def checkpoints_in_turn(nodes: Nodes, keep: int) -> None:
    with nodes.job(keep=keep) as job:
        seals(nodes, job, 1, 2, 3, 4)


def restarted(nodes: Nodes, keep: int) -> None:
    with nodes.job(keep=keep) as job:
        seals(nodes, job, 1, 2)
        job.write(job.grant(), 3)  # and then the job is killed
    with nodes.job(keep=keep) as job:
        assert job.newest == 2
        seals(nodes, job, 3, first=2)


def aborted(nodes: Nodes, keep: int) -> None:
    """A seal that is aborted after every rank has reported, then steps in place, then a seal."""
    with nodes.job(keep=keep) as job:
        seals(nodes, job, 1)
        slots = job.grant()
        job.write(slots, 2)
        job.abort(job.prepare(slots, 2))
        job.write(slots, 3)
        seal = job.prepare(slots, 3)
        nodes.promise(1, 3)
        job.publish(seal)
        nodes.promise(3)
        seals(nodes, job, 4, first=3)


def undecided(nodes: Nodes, keep: int) -> None:
    """Rank 1 never hears the decision; rank 0 had published. A new job goes on from there."""
    with nodes.job(keep=keep) as job:
        seals(nodes, job, 1)
        slots = job.grant()
        job.write(slots, 2)
        seal = job.prepare(slots, 2)
        nodes.promise(1, 2)
        job.store.sealing.publish(seal.prepared)
        nodes.promise(2)
        job.owner.abandon(slots[1])
    with nodes.job(keep=keep) as job:
        assert job.newest == 2
        seals(nodes, job, 3, first=2)


def went_back(nodes: Nodes, keep: int) -> None:
    """The newest checkpoint is withdrawn, and its step sealed anew."""
    with nodes.job(keep=keep + 1) as job:
        seals(nodes, job, 1, 2)
        nodes.promise(1, 2)
        job.store.withdraw_newer(job.store.find(1))
        nodes.promise(1)
        job.owner.release(job.source)  # type: ignore[arg-type]
        job.source = None
        seals(nodes, job, 2, 3, first=1)


SCENARIOS: dict[str, Callable[[Nodes, int], None]] = {
    function.__name__: function
    for function in (checkpoints_in_turn, restarted, aborted, undecided, went_back)
}
CASES = [
    ("checkpoints_in_turn", 2, False),
    *((name, 1, sharded) for sharded in (False, True) for name in SCENARIOS),
]


def next_job_finds(images: Sequence[Image], promise: Promise, *, sharded: bool) -> str:
    """Return what a new job finds that it must not; empty if it finds what was promised."""
    backends = [image.backend() for image in images]
    for begun in (False, True):
        with Job(backends, keep=1, sharded=sharded) as job:
            if job.newest not in promise.newest:
                return f"found step {job.newest}, promised {sorted(promise.newest)}"
            if wrong := job.wrong():
                return f"step {job.newest} is not whole: {wrong}"
            if not begun:
                slots = job.grant()
                job.write(slots, 999)
                job.write_models(slots, 999)  # and then the job is killed
        backends = [backend.reopened() for backend in backends]
    return ""


@pytest.mark.parametrize(
    ("name", "keep", "sharded"),
    CASES,
    ids=[f"{n}-keep={k}{'-sharded' * s}" for n, k, s in CASES],
)
def test_power_lost_on_any_node_after_any_effect(name: str, keep: int, sharded: bool) -> None:
    nodes = Nodes(sharded=sharded)
    SCENARIOS[name](nodes, keep)
    disks = [Disk(), Disk()]
    promise = Promise()
    rng = random.Random(f"{SEED}/{name}/{keep}")
    everything = _AllSurvives()
    num_tried = 0
    for number, (node, operation) in enumerate(nodes.log):
        if operation.kind == "note":
            assert isinstance(operation.label, Promise)
            promise = operation.label
            if number + 1 < len(nodes.log):
                continue  # nothing has changed but the promise, which the next effect is held to
        else:
            disks[node].apply(operation)
        kept = [disk.power_cut(everything) for disk in disks]
        for lost in ((0,), (1,), (0, 1)):
            for _ in range(CUTS_PER_OPERATION):
                images = [
                    disk.power_cut(rng) if node in lost else kept[node]
                    for node, disk in enumerate(disks)
                ]
                found = next_job_finds(images, promise, sharded=sharded)
                assert not found, f"after {number} {operation} on node {node}, lost {lost}: {found}"
                num_tried += 1
    assert num_tried > 200
