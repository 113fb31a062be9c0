"""The seam in a seal: what is prepared is durable, and only what is published is a checkpoint."""

from __future__ import annotations

import random

import pytest

import offload
from offload.checkpoint.reading import read_manifest
from offload.errors import SealError
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Prepared, Sealing
from offload.store.slots.slot import Slot, SlotState
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.test_protocol_steps import STORE, Training

OTHER = "/second/run"


@pytest.mark.parametrize("others", [[], [OTHER]], ids=["one-drive", "two-drives"])
def test_what_is_prepared_is_whole_and_durable_and_no_checkpoint_until_it_is_published(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CrashBackend()
    training = Training(backend, keep=2, directory=[STORE, *others])
    training.steps_and_seal()
    training.step()
    prepared_slots: list[str] = []

    def unpublished(sealing: Sealing, prepared: Prepared) -> StoredCheckpoint:
        slot = prepared.slot
        manifest = read_manifest(backend, slot.path)
        assert manifest == prepared.manifest
        assert manifest.step == 2
        found = offload.checkpoint.Checkpoint(backend, slot.path, manifest)
        assert found.verify().ok
        disk = Disk(backend.log)
        assert not any(file.cache for file in disk._files.values())
        for seed in range(20):
            survivor = disk.power_cut(random.Random(seed)).backend()
            infos = offload.list_checkpoints(STORE, backend=survivor)
            assert [(info.step, info.valid) for info in infos] == [(1, True)]
        prepared_slots.append(slot.path)
        raise OSError("another rank has failed")

    with monkeypatch.context() as patch:
        patch.setattr(Sealing, "publish", unpublished)
        with pytest.raises(SealError, match="another rank has failed"):
            training.optimizer.checkpoint().result()
    assert len(prepared_slots) == 1
    assert [info.step for info in offload.list_checkpoints(STORE, backend=backend)] == [1]
    with pytest.raises(SealError, match="another rank has failed"):
        training.optimizer.checkpoint()
    training.optimizer.checkpoint().result()
    with offload.open_checkpoint(STORE, backend=backend) as published:
        assert published.step == 2
        assert published.verify().ok
    training.optimizer.close()


def test_a_slot_is_working_then_in_doubt_then_sealed_and_free_when_it_is_recycled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = CrashBackend()
    training = Training(backend, keep=1)
    slots: list[Slot] = []
    seen: list[SlotState] = []
    publish, rename, invalidate = Sealing.publish, backend.rename, Slot.invalidate

    def published(sealing: Sealing, prepared: Prepared) -> StoredCheckpoint:
        slots.append(prepared.slot)
        seen.append(prepared.slot.state)
        stored = publish(sealing, prepared)
        seen.append(prepared.slot.state)
        return stored

    def renamed(source: str, target: str) -> None:
        rename(source, target)
        seen.extend(slot.state for slot in slots[-1:] if slot.path == source)

    def invalidated(slot: Slot) -> None:
        if slot in slots:
            seen.append(slot.state)
        invalidate(slot)
        if slot in slots:
            seen.append(slot.state)

    monkeypatch.setattr(Sealing, "publish", published)
    monkeypatch.setattr(backend, "rename", renamed)
    monkeypatch.setattr(Slot, "invalidate", invalidated)
    training.steps_and_seal()
    assert seen == [SlotState.WORKING, SlotState.IN_DOUBT, SlotState.SEALED]
    seen.clear()
    training.steps_and_seal()
    recycled = [SlotState.SEALED, SlotState.FREE]  # of the first slot, before `publish` returns
    assert seen == [SlotState.WORKING, SlotState.IN_DOUBT, *recycled, SlotState.SEALED]
    training.optimizer.close()
