"""A disk that is full because of pins, or of checkpoints that have come to stay."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from gds import MemoryBackend, StorageError
from offload import BestBy, EverySteps, LastK, Retention
from offload.errors import StoreFullError
from offload.store.maintenance.pruning import prune
from tests.stores.files import everything
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, name_of, slot_bytes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestFullDisk:
    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    @pytest.mark.parametrize("remedy", ["unpin", "free space"])
    def test_during_an_extra_pin_training_can_go_on(self, remedy: str, overlap: Any) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=2 * size + 3000)
        run, reference = Run(backend, keep=1, overlap=overlap), Run(keep=1)
        for one in (run, reference):
            one.seal()
        run.optimizer.pin("best")
        run.seal()
        reference.seal()
        before, names = run.parameters(), everything(backend)

        def compute_gradients() -> None:
            run.optimizer.zero_grad()
            run.backward()

        def try_to_step() -> None:
            if overlap == "backward":
                compute_gradients()  # which is where the step begins
            run.optimizer.step()

        if overlap != "backward":
            compute_gradients()
        for _ in range(2):
            with pytest.raises(StoreFullError, match="the slot that the next step") as caught:
                try_to_step()
            assert isinstance(caught.value, StorageError)
            assert caught.value.errno == errno.ENOSPC
            said = str(caught.value)
            assert said.startswith(
                f"{STORE}: No space left on device: the slot that the next step writes to needs "
                f"{size / 1024:.1f} KiB ({backend.free_bytes(STORE) / 1024:.1f} KiB free)"
            )
            assert said.count("No space left") == 1
            assert len(said) < 420
            for part in (
                f"keeps 1 checkpoint and the pinned 'best' ({name_of(1)}). Unpin with",
                f"`offload unpin {STORE} NAME`",
                f"`offload prune {STORE} --keep 1 --verify`",
                "call again",
            ):
                assert part in said
            assert run.at == 2
            assert all(map(torch.equal, before, run.parameters()))
            assert everything(backend) == names, "nothing half-written"
        if remedy == "unpin":
            run.optimizer.unpin("best")
        else:
            backend._capacity_bytes = 3 * size + 3000
        try_to_step()
        reference.step()
        run.optimizer.synchronize()
        assert all(map(torch.equal, run.parameters(), reference.parameters()))
        for one in (run, reference):
            one.seal()
            one.optimizer.close()
        assert run.steps() == ([4] if remedy == "unpin" else [1, 4])
        ours, theirs = (
            {n: d for n, d in everything(b).items() if "exp_avg" in n and name_of(4) in n}
            for b in (backend, reference.backend)
        )
        assert ours == theirs

    def test_a_full_disk_is_found_at_construction_with_the_pins_counted(self) -> None:
        size = slot_bytes()
        run = Run(MemoryBackend(capacity_bytes=3 * size + 3000), keep=1)
        run.seal()
        run.optimizer.pin("best")
        run.seal()
        run.optimizer.close()
        backend = run.backend.reopened()
        Run(backend, keep=1).optimizer.close()
        backend = backend.reopened()
        backend.create("/other", size).close()
        with pytest.raises(StoreFullError, match=r"'best' \(step-00000001\) needs 1 more") as full:
            Run(backend, keep=1)
        assert f"offload unpin {STORE} NAME" in str(full.value)

    def test_a_pin_that_there_is_no_room_for_changes_nothing(self) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=2 * size + 600)
        run = Run(backend, keep=1)
        run.seal()
        run.seal()
        run.optimizer.pin("one")
        with pytest.raises(StorageError) as caught:
            run.optimizer.pin("two")
        assert caught.value.errno == errno.ENOSPC
        assert backend.list_dir(f"{STORE}/pins") == ["one"]
        run.optimizer.unpin("one")
        run.optimizer.pin("two")
        run.optimizer.unpin("two")
        run.seal()
        run.optimizer.close()

    @pytest.mark.parametrize(
        ("policy", "pruned"),
        [
            (LastK(1) | EverySteps(2), "--keep 1 --every 2"),
            (LastK(1) | BestBy("loss", 2, "max") | EverySteps(3), None),
            (EverySteps(2) | LastK(1) | EverySteps(3), ""),
        ],
    )
    def test_what_is_advised_removes_nothing_that_is_kept(
        self, policy: Retention, pruned: str | None
    ) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=5 * size + 100)
        run = Run(backend, keep=policy)
        with pytest.raises(StoreFullError) as caught:  # noqa: PT012
            for number in range(20):
                run.seal(loss=-float(number))
        run.optimizer.close()
        said = str(caught.value)
        pruned = "--keep 1 --best loss:max:2 --every 3" if pruned is None else pruned
        assert (f"`offload prune {STORE} {pruned} --verify`" in said) == bool(pruned)
        assert said.count("prune") == bool(pruned)
        assert "keeps more with time: move the store to a larger drive, or copy it" in said
        run.backend = backend.reopened()
        before = run.steps()
        if pruned:
            assert prune(STORE, policy, backend=run.backend).checkpoints == ()
        assert run.steps() == before

    def test_what_has_come_to_stay_fills_the_disk_by_name(self) -> None:
        size = slot_bytes()
        backend = MemoryBackend(capacity_bytes=4 * size + 100)
        policy: Retention = LastK(1) | EverySteps(2)
        run = Run(backend, keep=policy)
        with pytest.raises(StoreFullError, match=r"LastK\(k=1\) \| EverySteps\(steps=2\)"):  # noqa: PT012
            for _ in range(20):
                run.seal()
        assert run.steps() == [2, 4, 6, 7]
        at = run.at
        run.optimizer.close()
        backend = backend.reopened()
        prune(STORE, LastK(1), backend=backend)
        run = Run(backend, keep=policy)
        assert run.optimizer.restore().step == at
        run.seal()
        run.optimizer.close()
