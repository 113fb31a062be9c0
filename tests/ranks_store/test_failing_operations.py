"""Any operation of either node fails, once or from then on: nothing acknowledged is lost."""

from __future__ import annotations

import warnings
from contextlib import suppress

import pytest

from gds import MemoryBackend, StorageError
from offload.errors import OffloadError
from tests.crash.fault_backend import FaultBackend, Kind
from tests.ranks_store.job import Job

KINDS: tuple[Kind, ...] = (
    "create", "write_bytes", "sync", "sync_dir", "rename", "make_dir", "remove", "open",
)  # fmt: skip
STEPS = 4


def run(backends: tuple[FaultBackend, FaultBackend], *, sharded: bool) -> tuple[int, int]:
    """Seal steps until something fails; return the last acknowledged and the last begun step.

    A rank that gets an error goes on: it abandons what was not decided, and tries the next step.
    """
    acknowledged = begun = 0
    job = None
    with suppress(StorageError, OffloadError):
        job = Job(backends, keep=1, sharded=sharded)
        for step in range(1, STEPS + 1):
            if step == 3:  # the job ends, and another one goes on
                job.close()
                job = Job(backends, keep=1, sharded=sharded)
            slots = None
            try:
                slots = job.grant()
                job.write(slots, step)
                seal = job.prepare(slots, step)
                begun = step
                job.publish(seal)
                acknowledged = step
            except (StorageError, OffloadError):
                job.store.sealing.end()
                if slots is not None:
                    job.owner.abandon(slots[1])
                    job.store.release(slots[0])
    if job is not None:
        job.close()
    return acknowledged, begun


@pytest.mark.parametrize(
    ("sharded", "forever"), [(False, True), (True, False)], ids=["one-file-forever", "shards-once"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node", [0, 1])
def test_what_was_acknowledged_is_found_whole(
    node: int, kind: Kind, *, sharded: bool, forever: bool
) -> None:
    num_fired = 0
    for nth in range(1, 200, 2 if forever else 1):
        backends = FaultBackend(MemoryBackend()), FaultBackend(MemoryBackend())
        backends[node].fail(kind, nth, forever=forever)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the poison
            acknowledged, begun = run(backends, sharded=sharded)
        if not backends[node].num_failed:
            break
        num_fired += 1
        kept = []
        for backend in backends:
            assert isinstance(backend.inner, MemoryBackend)
            kept.append(backend.inner.reopened())
        with Job(kept, keep=1, sharded=sharded) as job:
            assert acknowledged <= job.newest <= begun, f"{kind} {nth}"
            assert job.wrong() == [], f"{kind} {nth}"
            job.seal(9)
            assert job.wrong() == []
    else:
        raise AssertionError("it never ended")
    assert num_fired or (kind, node) in {("rename", 1), ("remove", 0), ("remove", 1)}
