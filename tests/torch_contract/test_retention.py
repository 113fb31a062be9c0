"""Policies: which checkpoints a store keeps, how many slots it has, and a disk that is full."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from offload import BestBy, EverySteps, LastK, Retention, open_checkpoint
from offload.errors import StoreFullError
from offload.store import prune
from tests.stores.files import everything
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, closed_runs, name_of, slot_bytes

__all__ = ["closed_runs", "one_thread"]  # fixtures: small tensors on many threads are slow


class Looking(WrapperBackend):
    """Sees which checkpoints and how many slots there are."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.before: dict[str, list[str]] = {}
        """Checkpoints just before another one gets its name."""
        self.least, self.most = 9, 0

    def make_dir(self, path: str) -> None:
        super().make_dir(path)
        if path.startswith(f"{STORE}/.slot-"):
            names = [n for n in self.list_dir(STORE) if n.startswith((".slot-", "step-"))]
            self.most = max(self.most, len(names))

    def checkpoints(self) -> list[str]:
        return [n for n in self.list_dir(STORE) if n.startswith("step-")]

    def rename(self, source: str, target: str) -> None:
        self.before[target] = self.checkpoints()
        super().rename(source, target)
        self.least = min(self.least, len(self.checkpoints()))


def test_every_third_step_stays_beside_the_newest() -> None:
    policy = LastK(2) | EverySteps(3)
    run = Run(keep=policy)
    for step in range(1, 11):
        run.seal()
        kept = {s for s in range(1, step + 1) if s % 3 == 0 or s > step - 2}
        assert run.steps() == sorted(kept)
        assert len(run.slots()) <= len(kept) + 1
    for step in run.steps():
        with open_checkpoint(f"{STORE}/{name_of(step)}", backend=run.backend) as found:
            assert found.verify().ok
    run = run.next_process(keep=policy)
    run.seal()
    assert run.steps() == [3, 6, 9, 10, 11]
    run = run.next_process(keep=2)  # a narrower policy gives slots back
    run.seal()
    assert run.steps() == [11, 12]
    assert len(run.slots()) == 3


def test_as_many_slots_as_are_kept_and_one() -> None:
    """Also while seals are in flight, and however many have come to stay."""
    backend = Looking(MemoryBackend())
    run = Run(backend, keep=LastK(1) | EverySteps(2))
    for _ in range(7):
        run.step()
        run.optimizer.checkpoint()
    run.optimizer.close()
    assert run.steps() == [2, 4, 6, 7]
    assert backend.most == 4  # before step 7 is sealed: 2, 4, 6 and the slot it is written to


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_by_a_metric(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    losses = [3.0, 1.0, 2.0, 0.5, 4.0, 4.0]
    sign = 1 if mode == "min" else -1
    run = Run(keep=BestBy("loss", mode=mode))
    for step, loss in enumerate(losses, 1):
        run.seal(loss=sign * loss)
        best = min(range(step), key=lambda n: losses[n]) + 1
        assert run.steps() == sorted({best, step})
        assert len(run.slots()) <= 3
    # No step has waited for a slot, and taken one more than retention has room for.
    assert [record.getMessage() for record in caplog.records] == []


def test_the_best_stays_until_a_better_one_is_durable() -> None:
    """The one that is being sealed is the best so far; until it is a checkpoint it is not."""
    backend = Looking(MemoryBackend())
    run = Run(backend, keep=LastK(2) | BestBy("loss"))
    for loss in (1.0, 2.0, 3.0, 0.5):
        run.seal(loss=loss)
    assert backend.before[f"{STORE}/{name_of(4)}"] == [name_of(1), name_of(3)]
    assert run.steps() == [3, 4]


@pytest.mark.filterwarnings("ignore:.* no checkpoint has the metric 'none'")
@pytest.mark.parametrize(
    "keep", [1, EverySteps(4), BestBy("loss"), LastK(1) | BestBy("none")], ids=str
)
def test_one_is_durable_at_every_instant(keep: int | Retention) -> None:
    backend = Looking(MemoryBackend())
    run = Run(backend, keep=keep)
    for loss in (3.0, 2.0, 1.0, 4.0, 0.5, 6.0):
        run.step()
        run.optimizer.checkpoint(metrics={"loss": loss})
    run.optimizer.close()
    assert backend.least == 1


def test_directories_that_are_not_usable_do_not_count() -> None:
    run = Run(keep=3)
    for _ in range(3):
        run.seal()
    run.optimizer.close()
    backend = run.backend.reopened()
    for step in (2, 3):
        backend.remove(f"{STORE}/{name_of(step)}/exp_avg.safetensors")
    run = Run(backend, keep=LastK(1) | EverySteps(2))
    with pytest.warns(RuntimeWarning, match=r"not using .*exp_avg.safetensors: missing"):
        assert run.optimizer.restore().step == 1
    run.step()
    with open_checkpoint(f"{STORE}/{name_of(1)}", backend=backend) as only:
        assert only.verify().ok  # the one durable checkpoint, two broken ones notwithstanding


def test_room_is_asked_for_at_construction_with_the_pins_counted() -> None:
    size = slot_bytes()
    policy = LastK(2) | BestBy("loss", 2) | EverySteps(1000)
    with pytest.raises(StoreFullError, match="needs 5 more slots") as caught:
        Run(MemoryBackend(capacity_bytes=5 * size - 1), keep=policy)
    assert "LastK(k=2) | BestBy(metric='loss'" in str(caught.value)
    Run(MemoryBackend(capacity_bytes=5 * size), keep=policy)
    run = Run(MemoryBackend(capacity_bytes=3 * size + 3000), keep=1)
    run.seal()
    run.optimizer.pin("best")
    run.seal()
    run.optimizer.close()
    backend = run.backend.reopened()
    Run(backend, keep=1).optimizer.close()
    backend = backend.reopened()
    backend.create("/other", size).close()
    with pytest.raises(StoreFullError, match=r"'best' \(step-00000001\) needs 1 more") as caught:
        Run(backend, keep=1)
    assert f"offload unpin {STORE} NAME" in str(caught.value)


@pytest.mark.parametrize(
    ("remedy", "overlap"),
    [("unpin", "backward"), ("free space", None)],
)
def test_during_an_extra_pin_training_can_go_on(remedy: str, overlap: Any) -> None:
    size = slot_bytes()
    backend = MemoryBackend(capacity_bytes=3 * size + 3000)
    backend.create("/other", size).close()
    run, reference = Run(backend, keep=1, overlap=overlap), Run(keep=1)
    for one in (run, reference):
        one.seal()
    run.optimizer.pin("best")
    for one in (run, reference):
        one.seal()
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
        free = backend.free_bytes(STORE)
        for part in (
            f"writes to needs {size / 1024:.1f} KiB ({free / 1024:.1f} KiB free)",
            f"keeps 1 checkpoint and the pinned 'best' ({name_of(1)}). Unpin with",
            f"`offload unpin {STORE} NAME`",
            f"`offload prune {STORE} --keep 1 --verify`",
        ):
            assert part in said
        assert run.at == 2
        assert all(map(torch.equal, before, run.parameters()))
        assert everything(backend) == names, "nothing half-written"
    if remedy == "unpin":
        run.optimizer.unpin("best")
    else:
        backend.remove("/other")
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


def test_a_pin_that_there_is_no_room_for_changes_nothing() -> None:
    backend = MemoryBackend(capacity_bytes=2 * slot_bytes() + 600)
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


def test_what_has_come_to_stay_fills_the_disk_by_name() -> None:
    """What is advised removes nothing that is kept; a narrower policy makes room."""
    policy = LastK(1) | BestBy("loss", 2, "max") | EverySteps(3)
    advice = "--keep 1 --best loss:max:2 --every 3"
    backend = MemoryBackend(capacity_bytes=5 * slot_bytes() + 100)
    run = Run(backend, keep=policy)
    with pytest.raises(StoreFullError, match=r"LastK\(k=1\)") as caught:  # noqa: PT012
        for number in range(20):
            run.seal(loss=-float(number))
    at = run.at
    run.optimizer.close()
    said = str(caught.value)
    assert f"`offload prune {STORE} {advice} --verify`" in said
    assert "keeps more with time: move the store to a larger drive, or copy it" in said
    run.backend = backend.reopened()
    before = run.steps()
    assert prune(STORE, policy, backend=run.backend).checkpoints == ()
    assert run.steps() == before
    prune(STORE, LastK(1), backend=run.backend)
    run = Run(run.backend, keep=policy)
    assert run.optimizer.restore().step == at
    run.seal(loss=0.0)
