"""A seal: what is prepared is durable, and only what has its name is a checkpoint. One anew."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

import offload
from gds import Backend, MemoryBackend, WrapperBackend
from offload.errors import BrokenOptimizerError, SealError
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_protocol_steps import STORE, Training
from tests.stores.files import contents, everything

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


@pytest.mark.parametrize("others", [[], [OTHER]], ids=["one drive", "two drives"])
def test_a_slot_has_a_manifest_only_when_all_else_is_durable(others: list[str]) -> None:
    """Whoever finds it after a loss of power, under whatever name, finds it whole.

    As long as it has not its name, the checkpoint before it is the newest.
    """
    backend = CrashBackend()
    training = Training(backend, keep=2, directory=[STORE, *others])
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
@pytest.mark.parametrize("anew", [False, True], ids=["first", "anew"])
def test_a_slot_whose_name_failed_stays_as_it_is(kind: str, anew: bool) -> None:
    """It is neither written to nor removed: a later process finds out what it is."""
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    if anew:
        training.steps_and_seal()
        change(training)
    else:
        training.step()
    backend.fail_if(
        lambda what, path: (
            (what == kind == "rename" and "/.slot-" in path)
            or (what == kind == "sync_dir" and path == STORE)
        )
    )
    with pytest.raises(SealError, match=f"injected failure of {kind}"):
        training.optimizer.checkpoint().result()
    before = {path: data for path, data in everything(backend).items() if "/LOCK" not in path}
    if anew:
        with pytest.warns(RuntimeWarning, match="sealing step 1 failed"):
            training.optimizer.restore()
        with pytest.warns(RuntimeWarning, match="reuses no slot any more"):
            training.step()
    else:
        with (
            pytest.warns(RuntimeWarning, match="sealing step 1 failed"),
            pytest.raises(BrokenOptimizerError, match="there is no checkpoint yet"),
        ):
            training.optimizer.restore()
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
    with training.newest() as found:
        assert (found.step, found.train_state) == (1, {"acknowledged": "later"})
    assert training.differences(1) == []
    backend.close()


class TestAnew:
    """The new checkpoint of a step takes the place of the one that the step had."""

    def test_the_new_one_is_found_after_a_loss_of_power(self) -> None:
        backend = CrashBackend()
        training = Training(backend, keep=2)
        training.steps_and_seal()
        change(training)
        training.optimizer.checkpoint().result()
        disk = Disk(backend.log)
        for seed in range(20):
            assert rate_of(disk.power_cut(random.Random(seed)).backend(), 1) == 1e-3
        training.optimizer.close()

    def test_the_place_of_the_old_one_is_used_again_on_all_drives(self) -> None:
        backend = MemoryBackend()
        training = Training(backend, keep=2, directory=[STORE, OTHER])
        training.steps_and_seal()
        for number in range(1, 6):
            change(training, 1e-3 * number)
            training.optimizer.checkpoint().result()
        assert len(names_in(backend, STORE, ".slot-")) <= 2
        assert len(names_in(backend, OTHER, "part-")) <= 3
        assert rate_of(backend, 1) == 5e-3
        training.optimizer.close()

    def test_a_train_state_that_replaces_another_is_whole_at_every_moment(self) -> None:
        backend = CrashBackend()
        training = Training(backend, keep=2)
        training.step()
        training.optimizer.checkpoint({"number": 1}).result()
        before = len(backend.log)
        training.optimizer.checkpoint({"number": 2}, metrics={"loss": 0.5}).result()
        training.optimizer.close()
        disk, rng = Disk(backend.log[:before]), random.Random(20261128)

        def found() -> tuple[int, dict[str, float]]:
            survivor = disk.power_cut(rng).backend()
            with offload.open_checkpoint(STORE, backend=survivor) as checkpoint:
                assert checkpoint.verify().ok
                return checkpoint.train_state["number"], dict(checkpoint.metrics)

        numbers = set()
        for operation in backend.log[before:]:
            disk.apply(operation)
            numbers |= {found()[0] for _ in range(3)}
        assert numbers == {1, 2}
        for _ in range(20):
            assert found() == (2, {"loss": 0.5}), "what is acknowledged is durable"

    def test_a_history_that_starts_over_leaves_no_slot_more_than_it_needs(self) -> None:
        """What was given up is gone when the new history is durable, and not before."""
        backend = MemoryBackend()
        training = Training(backend, keep=4)
        for _ in range(4):
            training.steps_and_seal()
        training.optimizer.close()
        training = Training(backend, keep=1, fresh=True)
        assert training.optimizer.restore() is None, "there is nothing that is not given up"
        training.step()
        assert {"step-00000003", "step-00000004"} <= {*names_in(backend, STORE, "step-")}
        training.optimizer.checkpoint().result()
        assert names_in(backend, STORE, "step-") == ["step-00000001"]
        assert len(names_in(backend, STORE, ".slot-")) == 1
        training.optimizer.close()


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
    assert contents(backend, f"{STORE}/step-00000001") == {}
    training.optimizer.close()


def test_a_store_that_was_moved_as_it_was_sealed_is_what_the_error_tells_of() -> None:
    """To call `checkpoint` again, as after a change of the slot alone, would be of no use."""

    class Moves(WrapperBackend):
        """Is moved away when the names in the slot have been synced, just before its rename."""

        def sync_dir(self, path: str) -> None:
            super().sync_dir(path)
            if "/.slot-" in path:
                self.inner.rename(STORE, f"{STORE}-moved")

    backend = Moves(MemoryBackend())
    training = Training(backend, keep=2)
    training.step()
    with pytest.raises(SealError, match="not the directory that was opened"):
        training.optimizer.checkpoint().result()
    assert names_in(backend, f"{STORE}-moved", "step-") == []
    with suppress(SealError):
        training.optimizer.close()


@pytest.mark.parametrize("others", [[], [OTHER]], ids=["one drive", "two drives"])
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

    fits, too_many = 0, 1 << 16
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if is_accepted(middle) else (fits, middle)
    assert fits > 1000
    assert is_accepted(fits)
    group["note"] = "x" * too_many
    with pytest.raises(offload.OffloadError, match="the manifest needs"):
        training.optimizer.checkpoint()
    training.optimizer.close()
