"""What a seal of several ranks writes, in which order, and what is true after it has failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from gds import MemoryBackend, StorageError
from offload.checkpoint.reading import read_manifest
from offload.errors import OffloadError
from offload.format.shares.owners import parameter_boxes
from offload.format.train_state import encode
from offload.store.owners.slot import OwnerSlot
from offload.store.sealing import Composition, compose
from offload.store.slots.slot import Slot
from tests.crash.crash_backend import CrashBackend, Operation
from tests.crash.fault_backend import FaultBackend
from tests.ranks_store.job import ONE, SCALARS, WHOLE, InFlight, Job


def composed(
    job: Job, slot: Slot, *, note: str = "", order: Sequence[Sequence[int]] | None = None
) -> Composition:
    """Describe the checkpoint of step 1, with a hyper-parameter of any length."""
    return compose(
        slot,
        encode({"step": 1}),
        step=1,
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=[{"lr": 0.1, "note": note}],
        scalars=SCALARS[0],
        order=order,
        owners={1: job.directories[1]},
        model_boxes=parameter_boxes(job.layouts[0]) if job.sharded else WHOLE,
    )


class InParts(Job):
    """A job whose seals are made of a given composition."""

    def seal_as(self, composition: Composition, slots: tuple[Slot, OwnerSlot]) -> InFlight:
        self.composition = composition
        return self.prepare(slots, 1)

    def compose(self, slot: Slot, step: int) -> Composition:
        """Return what the test has composed."""
        return self.composition


@pytest.mark.parametrize("sharded", [False, True], ids=["common file", "shard files"])
def test_whatever_can_be_composed_has_room_in_the_manifest(sharded: bool) -> None:
    """The boxes of the model are counted before their digests are known."""
    with InParts([MemoryBackend(), MemoryBackend()], sharded=sharded) as job:
        slots = job.grant()
        job.write(slots, 1)

        def fits(length: int) -> bool:
            try:
                composed(job, slots[0], note="x" * length)
            except OffloadError:
                return False
            return True

        most, too_many = 0, 1 << 20
        while too_many - most > 1:
            middle = (most + too_many) // 2
            if fits(middle):
                most = middle
            else:
                too_many = middle
        assert most > 1000
        job.publish(job.seal_as(composed(job, slots[0], note="x" * most), slots))
        assert job.newest == 1
        assert job.wrong() == []


@pytest.mark.parametrize("order", [None, [[2, 0, 1]]], ids=["unknown", "known"])
def test_what_this_process_knows_of_a_checkpoint_is_what_others_read(
    order: list[list[int]] | None,
) -> None:
    """The order of the parameters and the metrics included, if there are any."""
    one = MemoryBackend()
    with InParts([one, MemoryBackend()]) as job:
        slots = job.grant()
        job.write(slots, 1)
        stored = job.publish(job.seal_as(composed(job, slots[0], order=order), slots))
        assert stored.manifest == read_manifest(one, stored.path)
        assert stored.manifest.order == (None if order is None else ((2, 0, 1),))
        assert stored.manifest.metrics == {}


def unsynced(log: Sequence[Operation]) -> Iterator[tuple[Operation, set[str]]]:
    """Yield each operation, with the files that have been written and not synced before it."""
    dirty: set[str] = set()
    for operation in log:
        yield operation, set(dirty)
        if operation.kind in ("create", "write"):
            dirty.add(operation.path)
        elif operation.kind == "sync":
            dirty.discard(operation.path)


@pytest.mark.parametrize("sharded", [False, True], ids=["common file", "shard files"])
def test_the_manifest_is_written_when_all_other_files_are_durable(sharded: bool) -> None:
    one = CrashBackend()
    with Job([one, MemoryBackend()], sharded=sharded) as job:
        for step in (1, 2):
            slots = job.grant()
            manifest, begun = slots[0].manifest.path, len(one.log)
            job.write(slots, step)
            seal = job.prepare(slots, step)
            (dirty,) = (
                files
                for operation, files in unsynced(one.log[begun:])
                if (operation.kind, operation.path) == ("write", manifest)
            )
            assert dirty == set()
            job.publish(seal)


@pytest.mark.parametrize("during", ["prepare", "publish"])
def test_a_seal_that_could_not_be_made_durable_ends_all_reuse(during: str) -> None:
    one = FaultBackend(MemoryBackend())
    with Job([one, MemoryBackend()], keep=2) as job:
        job.seal(1)
        slots = job.grant()
        job.write(slots, 2)
        if during == "prepare":
            one.fail_if(lambda what, path: what == "sync" and path == slots[0].train_state.path)
            with pytest.raises(StorageError, match="injected failure of sync"):
                job.prepare(slots, 2)
        else:
            seal = job.prepare(slots, 2)
            one.fail_if(lambda what, path: what == "sync_dir" and path == ONE)
            with pytest.raises(StorageError, match="injected failure of sync_dir"):
                job.publish(seal)
        assert one.num_failed == 1
        assert job.store.poisoned
    one.close()
