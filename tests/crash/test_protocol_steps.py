"""Steps of the protocol that only a test of their own notices: waits, orders and failed syncs."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable

import pytest
import torch

import offload
import offload.checkpoint.sealed_slot
import offload.format.manifest
import offload.model.model_file
from gds import Backend, MemoryBackend, StorageError
from offload import AdamW, LastK
from offload.errors import BrokenOptimizerError, DamagedError, SealError, StoreError
from offload.store import prune
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend, Kind
from tests.crash.late import GateBackend, LateBackend
from tests.stores.files import flip
from tests.stores.training import HYPER, Model, Reference, backward, differences, optimizer_for
from tests.stores.training import options as options_of

STORE = "/run"
BLOCK_BYTES = 4096
REUSES_NOTHING = "this process reuses no slot any more"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the parameters into many blocks, as those of a large model are."""
    for module in (
        offload.format.manifest,
        offload.model.model_file,
        offload.checkpoint.sealed_slot,
    ):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK_BYTES)


class Training:
    """A model and its optimizer, step by step."""

    def __init__(self, backend: Backend, **changes: object) -> None:
        host_memory = changes.pop("host_memory", 0)
        directory = changes.pop("directory", STORE)
        self.backend = backend
        self.model = Model()
        settings = options_of(backend, host_memory=host_memory)
        self.optimizer: AdamW = optimizer_for(self.model, directory, settings, **changes)

    def step(self) -> None:
        backward(self.model, self.optimizer.num_steps + 1)
        self.optimizer.step()

    def steps_and_seal(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.step()
        self.optimizer.checkpoint().result()

    def newest(self) -> offload.Checkpoint:
        """Open the newest checkpoint as a reader does."""
        return offload.open_checkpoint(STORE, backend=self.backend)

    def differences(self, step: int) -> list[str]:
        """Say what of the newest checkpoint is not to the bit that of a step."""
        with self.newest() as found:
            return differences(found, self.backend, Reference().after(step))


class TestWaits:
    def test_nothing_is_synced_before_all_writes_of_the_state_have_ended(self) -> None:
        backend = LateBackend("/exp_avg")
        training = Training(backend)
        try:
            training.step()
            assert len(backend.late) == 4, "two arrays of two chunks, which fit into the ring"
            assert not any(late.done() for _, _, late in backend.late)
            training.optimizer.checkpoint().result(60)
            assert backend.too_early == []
            assert training.differences(1) == []
        finally:
            backend.finish()
            training.optimizer.close()

    def test_a_chunk_is_not_read_again_before_its_writes_have_ended(self) -> None:
        """Those of the second chunk have, so that there is a frame to read into."""
        backend = LateBackend("/exp_avg", before_byte=BLOCK_BYTES + 1)
        training = Training(backend)
        try:
            training.step()
            assert len(backend.late) == 2, "two arrays of the first chunk"
            assert not any(late.done() for _, _, late in backend.late)
            assert backend.too_early == []
            backend.finish()
            backend.before_byte = 0
            training.steps_and_seal()
            assert training.differences(2) == []
        finally:
            backend.finish()
            training.optimizer.close()

    def test_the_bytes_of_the_parameters_are_those_of_when_they_were_copied(
        self, small_blocks: None
    ) -> None:
        """Transfers end late, and a step overwrites what has been copied at once."""
        backend = LateBackend("/model.safetensors")
        training = Training(backend)
        training.step()
        handle = training.optimizer.checkpoint()
        training.step()
        assert differences(handle.result(60), backend, Reference().after(1)) == []
        assert len(backend.late) > 1
        training.optimizer.close()

    def test_resident_state_that_a_seal_is_about_to_write_is_not_stepped(self) -> None:
        backend = GateBackend("/exp_avg.safetensors")
        training = Training(backend, host_memory="1GiB")
        training.step()
        backend.num_before = 0
        handle = training.optimizer.checkpoint()
        assert backend.reached.wait(60)
        backward(training.model, 2)
        thread = threading.Thread(target=training.optimizer.step)
        thread.start()
        thread.join(0.2)  # so long a step that does not wait has time to do harm
        backend.is_open.set()
        thread.join(60)
        assert differences(handle.result(60), backend, Reference().after(1)) == []
        training.optimizer.checkpoint().result()
        assert training.differences(2) == []
        training.optimizer.close()

    def test_a_step_returns_when_frozen_parameters_have_been_copied_as_well(
        self, small_blocks: None
    ) -> None:
        backend = GateBackend("/model.safetensors")
        model = torch.nn.Module()
        model.trained = torch.nn.Parameter(torch.randn(2048).to(torch.bfloat16))
        model.frozen = torch.nn.Parameter(torch.randn(8192).to(torch.bfloat16), requires_grad=False)
        optimizer = AdamW(
            [model.trained], directory=STORE, model=model, options=options_of(backend), **HYPER
        )
        model.trained.grad = torch.ones_like(model.trained)
        optimizer.step()
        backend.num_before = 2  # the trained parameter's block, and the first of the frozen one
        handle = optimizer.checkpoint()
        assert backend.reached.wait(60)
        frozen = model.frozen.clone()

        def step_and_edit() -> None:
            optimizer.step()
            with torch.no_grad():
                model.frozen.zero_()

        thread = threading.Thread(target=step_and_edit)
        thread.start()
        thread.join(0.2)
        assert torch.equal(model.frozen, frozen), "the step has returned"
        backend.is_open.set()
        thread.join(60)
        assert handle.result(60).verify().ok
        assert not model.frozen.any()
        optimizer.close()

    def test_after_damage_nothing_is_read_into_the_memory_of_a_restore_any_more(
        self, small_blocks: None
    ) -> None:
        backend = LateBackend("/model.safetensors")
        training = Training(backend)
        training.steps_and_seal()
        flip(backend, f"{STORE}/step-00000001/model.safetensors", BLOCK_BYTES + 100)
        backend.late.clear()
        backend.reads_late = True
        with pytest.raises(DamagedError, match="bytes 4096 to"):
            training.optimizer.restore(1)
        assert len(backend.late) > 1
        assert all(late.done() for _, _, late in backend.late)
        training.optimizer.close()


def test_state_that_could_not_be_made_durable_is_not_trained_on() -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    training.steps_and_seal()
    training.step()
    backend.fail("sync", 1, forever=False)
    with pytest.raises(SealError, match="injected failure of sync"):
        training.optimizer.checkpoint().result()
    with pytest.raises(SealError, match="injected failure of sync"):
        training.optimizer.step()
    for call in (training.optimizer.step, training.optimizer.checkpoint):
        with pytest.raises(
            BrokenOptimizerError, match=r"step 2 could not be made durable.*restore"
        ):
            call()
    assert training.optimizer.restore().step == 1
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.steps_and_seal()
    assert training.differences(2) == []
    training.optimizer.close()


def new_train_state(training: Training) -> None:
    training.optimizer.checkpoint({"another": "train state"})


def new_checkpoint(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 1e-3
    training.optimizer.checkpoint()


def pin(training: Training) -> None:
    training.optimizer.pin("one")


def unpin(training: Training) -> None:
    training.optimizer.unpin("one")


def go_back(training: Training) -> None:
    training.optimizer.restore(1, discard_newer=True)


OF_PINS = f"{STORE}/pins"


@pytest.mark.parametrize(
    ("call", "kind", "where"),
    [
        *((call, kind, "") for call in (new_train_state, pin, go_back)
          for kind in ("sync", "rename", "sync_dir")),
        (unpin, "sync_dir", ""),
        (go_back, "sync_dir", OF_PINS),  # pins that are gone by are synced before
        (new_checkpoint, "sync_dir", OF_PINS),
    ],
)  # fmt: skip
def test_a_sync_or_rename_that_failed_ends_all_reuse(
    call: Callable[[Training], None], kind: Kind, where: str
) -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=1 if call is not go_back else 2)
    training.steps_and_seal()
    if where or call in (pin, unpin):
        pin(training)
    training.steps_and_seal()
    if call is go_back and not where:
        training.steps_and_seal()
        call = go_back_to_two
    slots = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    backend.fail_if(lambda what, path: what == kind and path.startswith(where))
    with pytest.raises(StorageError, match=f"injected failure of {kind}"):
        call(training)
    with contextlib.suppress(StoreError):  # what failed may have been done, and then it stays
        training.optimizer.restore()
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.step()
    after = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    assert len(after) > len(slots), "a new one, though another one was free"
    assert backend.violations == []
    training.optimizer.close()


def go_back_to_two(training: Training) -> None:
    training.optimizer.restore(2, discard_newer=True)


def test_a_pin_that_was_moved_away_is_durable_before_its_checkpoint_is_replaced() -> None:
    """Else the name might be found, after a loss of power, on what is not there any more."""
    backend = CrashBackend()
    training = Training(backend, keep=3)
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.pin("best")
    killed = FaultBackend(backend)
    killed.fail_if(lambda kind, path: (kind, path) == ("sync_dir", OF_PINS))
    with pytest.raises(StorageError, match="injected"):
        offload.pin(f"{STORE}/step-00000001", "best", backend=killed)
    new_checkpoint(training)
    training.optimizer.synchronize()
    disk = Disk(backend.log)
    for seed in range(40):
        survivor = disk.power_cut(random.Random(seed)).backend()
        found = offload.list_checkpoints(STORE, backend=survivor)
        assert [info.step for info in found if info.pins] == [1]
    training.optimizer.close()


@pytest.mark.parametrize("others", [[], ["/second/run"]], ids=["one drive", "two drives"])
def test_power_lost_while_nothing_trains_and_a_store_is_pruned(others: list[str]) -> None:
    """What is kept is whole at every moment, and so is the rest while it has its name."""
    backend = CrashBackend()
    training = Training(backend, keep=3, directory=[STORE, *others])
    for _ in range(3):
        training.steps_and_seal()
    training.optimizer.pin("mine", 1)
    training.optimizer.close()
    before = len(backend.log)
    kept = ["step-00000001", "step-00000003"]
    report = prune(STORE, LastK(1), parts=others or None, backend=backend)
    assert [os.path.basename(path) for path in report.kept] == kept
    assert report.unnamed == ()
    wanted = {step: Reference().after(step) for step in range(1, 4)}
    rng = random.Random(20261121)
    disk = Disk(backend.log[:before])
    for operation in backend.log[before:]:
        disk.apply(operation)
        survivor = disk.power_cut(rng).backend()
        found = offload.list_checkpoints(STORE, backend=survivor)
        assert {1, 3} <= {info.step for info in found}, operation
        for info in found:
            with offload.open_checkpoint(info.path, backend=survivor) as checkpoint:
                assert differences(checkpoint, survivor, wanted[info.step]) == []
        # Pruned again, a part may be left that was withdrawn half; it is named.
        again = prune(STORE, LastK(1), parts=others or None, backend=survivor)
        assert {os.path.basename(path) for path in again.kept} >= {*kept}
        for other in others:
            left = [name for name in survivor.list_dir(other) if name.startswith("part-")]
            assert len(left) == 2 + len(again.unnamed)
            assert len(again.unnamed) <= 1
    for _ in range(20):
        names = disk.power_cut(rng).backend().list_dir(STORE)
        assert [name for name in names if name.startswith((".", "step-"))] == kept


def test_resident_state_is_still_to_be_written_after_a_seal_that_failed_before_it() -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.close()
    training = Training(backend, keep=2, host_memory="1GiB")
    training.optimizer.restore()
    training.step()
    backend.fail("open", 1, forever=False)  # of the one that is to make room
    with pytest.raises(SealError, match="injected failure of open"):
        training.optimizer.checkpoint().result()
    with pytest.raises(SealError):
        training.optimizer.synchronize()
    training.optimizer.checkpoint().result()
    assert training.differences(3) == []
    training.steps_and_seal()
    assert training.differences(4) == []
    training.optimizer.close()
