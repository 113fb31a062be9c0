"""The seam in a seal: what is prepared is durable, and only what is published is a checkpoint."""

from __future__ import annotations

import random

import pytest

import offload
from offload.checkpoint.reading import read_manifest
from offload.errors import SealError
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Prepared, Sealing
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
