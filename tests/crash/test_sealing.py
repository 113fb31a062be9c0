"""A seal: only what has its name is a checkpoint, and what fails behind that fails no seal."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

import offload
from gds import Backend, MemoryBackend
from offload import AdamW, open_checkpoint
from offload.errors import SealError, StoreError
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.runs import (
    OTHER,
    STORE,
    assert_at_step,
    copy_tree,
    slots_in,
    start,
    step_path,
)
from tests.crash.trained import Training
from tests.stores.files import contents, everything, overwrite, read, remove_tree, write
from tests.stores.training import Model, Reference, same_bits, take_step, train

NEWEST = step_path(2)


def change(training: Training, rate: float = 1e-3) -> None:
    """Make the next checkpoint of the same step another one."""
    training.optimizer.param_groups[0]["lr"] = rate


def names_in(backend: Backend, path: str, prefix: str) -> list[str]:
    return [name for name in backend.list_dir(path) if name.startswith(prefix)]


@pytest.mark.parametrize("others", [[], [OTHER]], ids=["one drive", "two drives"])
def test_a_slot_has_a_manifest_only_when_all_else_is_durable(others: list[str]) -> None:
    """Whoever finds it after a loss of power, under whatever name, finds it whole.

    As long as it has not its name, the checkpoint before it is the newest.
    """
    backend = CrashBackend()
    training = Training(backend, keep=2, directories=[STORE, *others])
    training.steps_and_seal()
    training.step()
    before = len(backend.log)
    training.optimizer.checkpoint().result()
    training.optimizer.close()
    disk, rng, found, newest = Disk(backend.log[:before]), random.Random(20261128), 0, []
    for operation in backend.log[before:]:
        disk.apply(operation)
        for _ in range(2):
            survivor = disk.power_cut(rng).backend()
            infos = offload.list_checkpoints(STORE, backend=survivor)
            assert all(info.valid for info in infos)
            newest.append(infos[-1].step)
            for name in names_in(survivor, STORE, ".slot-"):
                with (
                    suppress(offload.CheckpointError),
                    offload.open_checkpoint(f"{STORE}/{name}", backend=survivor) as checkpoint,
                ):
                    found += checkpoint.step == 2
                    assert checkpoint.verify().ok, (operation, name)
    assert found
    assert {*newest} == {1, 2}
    assert newest[-1] == 2


@pytest.mark.parametrize("kind", ["rename", "sync_dir"])
def test_a_slot_whose_name_failed_stays_as_it_is(kind: str) -> None:
    """It is neither written to nor removed: a later process finds out what it is."""
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    training.steps_and_seal()
    change(training)
    backend.fail_if(
        lambda what, path: (
            (what == kind == "rename" and "/.slot-" in path)
            or (what == kind == "sync_dir" and path == STORE)
        )
    )
    with pytest.raises(SealError, match=f"injected failure of {kind}"):
        training.optimizer.checkpoint().result()
    before = {path: data for path, data in everything(backend).items() if "/LOCK" not in path}
    with pytest.warns(RuntimeWarning, match="sealing step 1 failed"):
        training.optimizer.restore()
    with pytest.warns(RuntimeWarning, match="reuses no slot any more"):
        training.step()
    assert before.items() <= everything(backend).items()
    training.optimizer.close()
    backend.close()


def test_a_checkpoint_that_failed_and_was_given_up_is_not_newer_than_a_later_one() -> None:
    """Its name is there, and only not durable; and then a checkpoint before it is sealed anew."""
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    training.steps_and_seal()
    training.step()
    backend.fail_if(lambda kind, path: kind == "sync_dir" and path == STORE)
    with pytest.raises(SealError, match="injected failure of sync_dir"):
        training.optimizer.checkpoint({"given": "up"}).result()
    with pytest.warns(RuntimeWarning, match="sealing step 2 failed"):
        assert training.optimizer.restore().step == 1
    with pytest.warns(RuntimeWarning, match="reuses no slot any more"):
        training.optimizer.checkpoint({"acknowledged": "later"}).result()
    training.optimizer.close()
    with open_checkpoint(STORE, backend=backend) as found:
        assert (found.step, found.train_state) == (1, {"acknowledged": "later"})
    assert training.differences(1) == []
    backend.close()


def test_the_place_of_a_checkpoint_that_is_sealed_anew_is_used_again_on_all_drives() -> None:
    backend = MemoryBackend()
    training = Training(backend, keep=2, directories=[STORE, OTHER])
    training.steps_and_seal()
    for number in range(1, 6):
        change(training, 1e-3 * number)
        training.optimizer.checkpoint().result()
    assert len(names_in(backend, STORE, ".slot-")) <= 2
    assert len(names_in(backend, OTHER, "part-")) <= 3
    with open_checkpoint(STORE, backend=backend) as found:
        assert found.hyperparameters[0]["lr"] == 5e-3
    training.optimizer.close()


def test_hyper_parameters_that_do_not_fit_are_refused_at_once() -> None:
    """Whatever `checkpoint` accepts can be sealed, to the last byte of the manifest."""
    training = Training(MemoryBackend(), keep=2, directories=[STORE, OTHER])
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

    fits, too_many = 0, 1 << 16
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if is_accepted(middle) else (fits, middle)
    assert fits > 1000
    group["note"] = "x" * too_many
    with pytest.raises(offload.OffloadError, match="the manifest needs"):
        training.optimizer.checkpoint()
    training.optimizer.close()


def start_anew(backend: Backend, num_drives: int = 1, **changes: Any) -> tuple[Model, AdamW]:
    return start(backend, num_drives, **{"history": 5, **changes})


def trained(backend: Backend, last: int, num_drives: int = 1) -> Backend:
    """Leave checkpoints of steps 1, 2, ... behind."""
    model, optimizer = start(backend, num_drives, keep=last)
    with optimizer:
        train(model, optimizer, *range(1, last + 1))
    return backend


@pytest.mark.parametrize("kind", ["remove", "list_dir", "sync", "rename", "write_bytes"])
@pytest.mark.parametrize("num_drives", [1, 2])
def test_what_fails_behind_the_commit_does_not_fail_the_seal(kind: str, num_drives: int) -> None:
    """The new checkpoint is durable. What fails in withdrawing older ones is another matter."""
    several = kind in ("remove", "list_dir")  # some of which are removed, and not rewritten
    last = 4 if several else 1
    inner = trained(MemoryBackend(), last, num_drives)
    backend = FaultBackend(inner)
    model, optimizer = start_anew(backend, num_drives, keep=1)
    optimizer.restore()
    train(model, optimizer, last + 1, seal=False)
    seen: list[str] = []

    def behind_the_commit(what: str, path: str) -> bool:
        if "rename" in seen and "sync_dir" in seen[seen.index("rename") :]:
            return what == kind  # the commit's last operation is the sync of its rename
        if what == "sync_dir" or (what == "rename" and path.startswith(f"{STORE}/.slot-")):
            seen.append(what)
        return False

    backend.fail_if(behind_the_commit)
    assert optimizer.checkpoint({"step": last + 1}).result().step == last + 1
    assert backend.num_failed == 1
    if several:  # nothing was renamed or synced in vain
        train(model, optimizer, last + 2)
        assert len(slots_in(inner)) <= 3
    else:
        with pytest.warns(RuntimeWarning, match="this process reuses no slot any more"):
            train(model, optimizer, last + 2)
    train(model, optimizer, last + 3)
    optimizer.close()
    assert_at_step(inner, last + 3)
    backend.close()


def test_a_slot_that_cannot_be_removed_fails_no_restore() -> None:
    inner = trained(MemoryBackend(), 4)
    backend = FaultBackend(inner)
    model, optimizer = start_anew(backend, keep=1)
    backend.fail("remove", 1, forever=True)
    assert optimizer.restore(1, discard_newer=True).step == 1
    assert backend.num_failed
    train(model, optimizer, 2)
    optimizer.close()
    assert_at_step(inner, 2)
    backend.close()


@pytest.mark.parametrize("name", ["train_state.safetensors", "manifest.json"])
def test_a_replacement_that_a_crash_has_left_half_made_does_not_block_the_next(name: str) -> None:
    backend = trained(MemoryBackend(), 2)
    write(backend, f"{NEWEST}/{name}.new", bytes(10))
    _, optimizer = start_anew(backend)
    with optimizer:
        assert optimizer.restore().step == 2
        optimizer.checkpoint({"another": "state"}, metrics={"loss": 0.5}).result()
    with open_checkpoint(STORE, backend=backend) as found:
        assert (found.train_state, found.metrics) == ({"another": "state"}, {"loss": 0.5})
        assert found.verify().ok
    assert not [n for n in backend.list_dir(NEWEST) if n.endswith(".new")]


def test_a_slot_that_is_given_back_is_not_removed_from_under_another_writer() -> None:
    """After a failed sync slots are removed by their path, which may name another's by now."""
    inner = MemoryBackend()
    backend = FaultBackend(inner)
    model, optimizer = start(backend)
    train(model, optimizer, 1)
    take_step(model, optimizer, 2)
    backend.fail_if(lambda kind, path: kind == "sync" and "/.slot-" in path)
    with pytest.raises(SealError):
        optimizer.checkpoint().result()
    assert backend.num_failed == 1
    inner.rename(STORE, "/moved")
    inner.make_dir(STORE)
    for name in inner.list_dir("/moved"):
        if name != "LOCK":
            copy_tree(inner, f"/moved/{name}", f"{STORE}/{name}")
    (slot,) = [name for name in inner.list_dir(STORE) if name.startswith(".slot-")]
    before = contents(inner, f"{STORE}/{slot}")
    with pytest.warns(RuntimeWarning, match="sealing step 2 failed"):
        optimizer.restore()
    with pytest.raises(StoreError, match="this is not the directory that was opened"):
        train(model, optimizer, 2)
    optimizer.close()
    assert contents(inner, f"{STORE}/{slot}") == before
    assert_at_step(inner, 1)
    backend.close()


class TestNewest:
    def test_several_that_cannot_be_used_now_are_never_the_newest_again(self) -> None:
        """Their generations are not known, and may be many above the one that is gone on from."""
        backend = trained(MemoryBackend(), 5)
        paths = [f"{STORE}/step-{step:08d}/manifest.json" for step in (2, 3, 4, 5)]
        whole = {path: read(backend, path) for path in paths}
        for path in paths:
            overwrite(backend, path, bytes(64))
        model, optimizer = start_anew(backend, keep=9)
        with pytest.warns(RuntimeWarning) as caught:
            assert optimizer.restore().step == 1
        assert "not using /run/step-00000002, step-00000003" in str(caught[-1].message)
        train(model, optimizer, 2, 3, 4, 5, seal=False)
        train(model, optimizer, 6)
        optimizer.close()
        for path, data in whole.items():
            overwrite(backend, path, data)
        assert_at_step(backend, 6)
        model, optimizer = start_anew(backend, keep=9)
        with optimizer:
            assert optimizer.restore().step == 6
            train(model, optimizer, 7)
            assert same_bits(dict(model.state_dict()), Reference().after(7).model)

    def test_training_begins_where_all_checkpoints_were_removed_beside_the_process(self) -> None:
        backend = trained(MemoryBackend(), 2)
        model, optimizer = start(backend)
        for info in offload.list_checkpoints(STORE, backend=backend):
            remove_tree(backend, info.path)
        with pytest.warns(RuntimeWarning, match="was removed or moved away"):
            assert optimizer.restore() is None
        train(model, optimizer, 1)
        optimizer.close()
        assert_at_step(backend, 1)
