"""A step that is sealed anew: the new checkpoint takes the place of the one that its step had."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import pytest

import offload
from gds import Backend, MemoryBackend, StorageError
from gds.waiting import Monitor
from offload.checkpoint.reading import read_manifest
from offload.errors import SealError
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Prepared, Sealing
from offload.store.slots.slot import Slot, SlotState
from offload.store.withdrawal import Withdrawal
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_protocol_steps import STORE, Training
from tests.stores.files import overwrite

OTHER = "/second/run"


def change(training: Training, rate: float = 1e-3) -> None:
    """Make the next checkpoint of the same step another one."""
    training.optimizer.param_groups[0]["lr"] = rate


def rate_of(backend: Backend, step: int) -> float:
    """Return the learning rate of a step's checkpoint, as the next process finds it."""
    with offload.open_checkpoint(f"{STORE}/step-{step:08d}", backend=backend) as found:
        rate: float = found.hyperparameters[0]["lr"]
        return rate


def names_in(backend: Backend, path: str, prefix: str) -> list[str]:
    return [name for name in backend.list_dir(path) if name.startswith(prefix)]


def test_the_new_one_is_found_after_a_loss_of_power() -> None:
    backend = CrashBackend()
    training = Training(backend, keep=2)
    training.steps_and_seal()
    change(training)
    training.optimizer.checkpoint().result()
    disk = Disk(backend.log)
    for seed in range(20):
        assert rate_of(disk.power_cut(random.Random(seed)).backend(), 1) == 1e-3
    training.optimizer.close()


def test_the_place_of_the_old_one_is_used_again_on_all_drives() -> None:
    backend = MemoryBackend()
    training = Training(backend, keep=2, directory=[STORE, OTHER])
    training.steps_and_seal()
    for number in range(1, 6):
        change(training, 1e-3 * number)
        training.optimizer.checkpoint().result()
    assert len(names_in(backend, STORE, ".slot-")) <= 2
    assert len(names_in(backend, OTHER, "part-")) <= 3
    (stored,) = training.optimizer._engine.store.checkpoints
    assert stored.slot is not None
    assert stored.slot.state is SlotState.SEALED
    training.optimizer.close()


def test_a_train_state_that_comes_later_is_that_of_the_new_one() -> None:
    training = Training(MemoryBackend(), keep=2)
    training.steps_and_seal()
    change(training)
    training.optimizer.checkpoint({"number": 2}).result()
    training.optimizer.checkpoint({"number": 3}).result()
    with offload.open_checkpoint(STORE, backend=training.backend) as found:
        assert found.train_state == {"number": 3}
        assert found.verify().ok
    training.optimizer.close()


def test_one_that_could_not_be_used_is_refused_no_longer() -> None:
    backend = MemoryBackend()
    training = Training(backend, keep=3)
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.close()
    overwrite(backend, f"{STORE}/step-00000002/manifest.json", bytes(64))
    training = Training(backend, keep=3)
    with pytest.warns(RuntimeWarning, match="not using /run/step-00000002"):
        assert training.optimizer.restore().step == 1
    store = training.optimizer._engine.store
    assert [path for path, _ in store.refused] == [f"{STORE}/step-00000002"]
    training.steps_and_seal()
    assert store.refused == []
    training.optimizer.close()


def test_a_history_that_starts_over_leaves_no_slot_more_than_it_needs() -> None:
    """What the checkpoint of its first step has replaced goes with all that was given up."""
    backend = MemoryBackend()
    training = Training(backend, keep=4)
    for _ in range(4):
        training.steps_and_seal()
    training.optimizer.close()
    training = Training(backend, keep=1, fresh=True)
    training.steps_and_seal()
    assert names_in(backend, STORE, "step-") == ["step-00000001"]
    assert len(names_in(backend, STORE, ".slot-")) == 1
    training.optimizer.close()


def test_one_that_was_prepared_and_given_up_lets_go_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = MemoryBackend()
    training = Training(backend, keep=2)
    training.steps_and_seal()
    change(training)

    def unpublished(sealing: Sealing, prepared: Prepared) -> StoredCheckpoint:
        raise OSError("another rank has failed")

    with monkeypatch.context() as patch:
        patch.setattr(Sealing, "publish", unpublished)
        with pytest.raises(SealError, match="another rank has failed"):
            training.optimizer.checkpoint().result()
    backend.lock(f"{STORE}/step-00000001").release()  # nobody holds it
    with pytest.raises(SealError):
        training.optimizer.synchronize()
    training.optimizer.checkpoint().result()
    assert rate_of(backend, 1) == 1e-3
    training.optimizer.close()


@pytest.mark.parametrize("kind", ["rename", "sync_dir"])
@pytest.mark.parametrize("anew", [False, True], ids=["first", "anew"])
def test_a_slot_whose_name_failed_stays_in_doubt_where_it_is(
    kind: str, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is neither written to nor removed: a later process finds out what it is."""
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    if anew:
        training.steps_and_seal()
        change(training)
    else:
        training.step()
    store = training.optimizer._engine.store
    before = list(store.checkpoints)
    slots: list[tuple[Slot, str]] = []
    publish = Sealing.publish

    def published(sealing: Sealing, prepared: Prepared) -> StoredCheckpoint:
        slots.append((prepared.slot, prepared.slot.path))
        backend.fail_if(lambda what, path: what == kind and (what == "rename" or path == STORE))
        return publish(sealing, prepared)

    monkeypatch.setattr(Sealing, "publish", published)
    with pytest.raises(SealError, match=f"injected failure of {kind}"):
        training.optimizer.checkpoint().result()
    ((slot, working),) = slots
    sealed = f"{STORE}/step-00000001"
    assert slot.state is SlotState.IN_DOUBT
    assert slot.path == (working if kind == "rename" else sealed)
    assert slot.is_in_place()
    assert store.checkpoints == before
    for old in before:
        assert old.path == (sealed if kind == "rename" else working)
    with pytest.raises(SealError):
        training.optimizer.close()


def test_a_slot_has_a_manifest_only_when_all_else_is_durable() -> None:
    """Whoever finds it after a loss of power, under whatever name, finds it whole."""
    backend = CrashBackend()
    training = Training(backend, keep=2)
    training.steps_and_seal()
    training.step()
    before = len(backend.log)
    training.optimizer.checkpoint().result()
    training.optimizer.close()
    disk, rng, found = Disk(backend.log[:before]), random.Random(20261128), 0
    for operation in backend.log[before:]:
        disk.apply(operation)
        for _ in range(2):
            survivor = disk.power_cut(rng).backend()
            for name in survivor.list_dir(STORE):
                if not name.startswith((".slot-", "step-")):
                    continue
                try:
                    manifest = read_manifest(survivor, f"{STORE}/{name}")
                except offload.OffloadError:
                    continue
                found += manifest.step == 2
                checkpoint = offload.checkpoint.Checkpoint(survivor, f"{STORE}/{name}", manifest)
                assert checkpoint.verify().ok, (operation, name)
    assert found


def test_the_lists_of_a_store_change_only_under_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step looks at them on another thread meanwhile; and threads are told under a lock alone."""
    training = Training(MemoryBackend(), keep=1)
    changed = training.optimizer._engine.store._changed
    seen: list[str] = []
    without_lock: list[str] = []  # an error here would end the thread, and who waits would hang

    def looked_at(owner: type, name: str, lock_of: Callable[[object], Monitor]) -> None:
        original: Callable[..., object] = getattr(owner, name)

        def looked(self: object, *given: object, **named: object) -> object:
            owned: bool = lock_of(self)._is_owned()  # type: ignore[attr-defined]
            (seen if owned else without_lock).append(name)
            with nullcontext() if owned else lock_of(self):
                return original(self, *given, **named)

        monkeypatch.setattr(owner, name, looked)

    looked_at(Sealing, "_rename_into_place", lambda _: changed)
    looked_at(Withdrawal, "trim", lambda _: changed)
    looked_at(Monitor, "notify_all", lambda monitor: cast("Monitor", monitor))
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.close()
    assert without_lock == []
    assert {*seen} == {"_rename_into_place", "trim", "notify_all"}


def test_a_process_that_has_lost_the_store_touches_nothing_of_the_next_one() -> None:
    """It does not wait for the readers of another process's checkpoint, in order to replace it."""
    backend = MemoryBackend()
    training = Training(backend, keep=2)
    training.step()
    backend.remove(f"{STORE}/LOCK")
    backend.lock(f"{STORE}/LOCK", create=True)
    backend.make_dir(f"{STORE}/step-00000001")
    reader = backend.lock(f"{STORE}/step-00000001", shared=True)
    with pytest.raises(SealError, match="another process may have created and locked"):
        training.optimizer.checkpoint().result()
    reader.release()
    training.optimizer.close()


def test_what_is_synced_before_it_is_prepared_is_durable() -> None:
    backend = CrashBackend()
    training = Training(backend, keep=1)
    for _ in range(2):
        training.steps_and_seal()
    training.step()  # to a slot that was a checkpoint, so that its names are durable
    engine = training.optimizer._engine
    slot = engine.state.slots.present
    assert isinstance(slot, Slot)
    slot.train_state.write_bytes(b"of the user", 0)
    engine.store.sealing.sync(slot)
    disk = Disk(backend.log)
    for seed in range(10):
        survivor = disk.power_cut(random.Random(seed)).backend()
        file = survivor.open(slot.train_state.path)
        assert file.read_bytes(0, 11) == b"of the user"
    training.optimizer.close()


def test_what_cannot_be_synced_before_it_is_prepared_ends_all_reuse() -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend)
    training.step()
    engine = training.optimizer._engine
    slot = engine.state.slots.present
    assert isinstance(slot, Slot)
    backend.fail("sync", 1, forever=False)
    with pytest.raises(StorageError, match="injected failure of sync"):
        engine.store.sealing.sync(slot)
    assert engine.store.poisoned
    training.optimizer.close()


@pytest.mark.parametrize("others", [[], [OTHER]], ids=["one-drive", "two-drives"])
def test_hyper_parameters_that_do_not_fit_are_refused_at_once(others: list[str]) -> None:
    """Whatever `checkpoint` accepts can be sealed, to the last byte of the manifest."""
    training = Training(MemoryBackend(), keep=2, directory=[STORE, *others])
    training.step()
    group = training.optimizer.param_groups[0]

    def is_accepted(num_bytes: int) -> bool:
        group["note"] = "x" * num_bytes
        try:
            handle = training.optimizer.checkpoint()
        except offload.OffloadError:
            return False
        handle.result(60)  # and does not fail
        return True

    fits, too_many = 0, 1 << 20
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if is_accepted(middle):
            fits = middle
        else:
            too_many = middle
    assert fits > 1000
    assert is_accepted(fits)
    group["note"] = "x" * too_many
    with pytest.raises(offload.OffloadError, match="the manifest needs"):
        training.optimizer.checkpoint()
    training.optimizer.close()
