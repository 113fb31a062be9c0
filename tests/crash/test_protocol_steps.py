"""Steps of the protocol that only a test of their own notices: waits, orders and failed syncs."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable

import pytest
import torch

import offload
from gds import MemoryBackend, StorageError
from offload import AdamW, LastK, load_parameters
from offload.errors import BrokenOptimizerError, DamagedError, SealError, StoreError
from offload.format.digests import MODEL_BLOCK_BYTES
from offload.store import prune
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend, Kind
from tests.crash.late import LateBackend
from tests.crash.seal_gates import BLOCK_BYTES, make_blocks_small
from tests.crash.trained import STORE, Training
from tests.stores.files import flip, overwrite
from tests.stores.training import Reference, differences
from tests.stores.training import options as options_of

REUSES_NOTHING = "this process reuses no slot any more"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_blocks_small(monkeypatch)


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


CALLS: dict[str, Callable[[AdamW], object]] = {
    "new train state": lambda optimizer: optimizer.checkpoint({"another": "train state"}),
    "pin": lambda optimizer: optimizer.pin("two"),
    "unpin": lambda optimizer: optimizer.unpin("one"),
    "go back": lambda optimizer: optimizer.restore(2, discard_newer=True),
}


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("new train state", "sync"), ("new train state", "rename"), ("pin", "sync_dir"),
        ("unpin", "sync_dir"), ("go back", "rename"), ("go back", "sync_dir"),
    ],
)  # fmt: skip
def test_a_sync_or_rename_that_failed_ends_all_reuse(call: str, kind: Kind) -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    for _ in range(3):
        training.steps_and_seal()
    training.optimizer.pin("one", 2)
    slots = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    backend.fail_if(lambda what, _: what == kind)
    with pytest.raises(StorageError, match=f"injected failure of {kind}"):
        CALLS[call](training.optimizer)
    with contextlib.suppress(StoreError):  # what failed may have been done, and then it stays
        training.optimizer.restore()
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.step()
    after = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    assert len(after) > len(slots), "a new one, though another one was free"
    assert backend.violations == []
    training.optimizer.close()


def test_a_pin_that_was_moved_away_is_durable_before_its_checkpoint_is_replaced() -> None:
    """Else the name might be found, after a loss of power, on what is not there any more."""
    backend = CrashBackend()
    training = Training(backend, keep=3)
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.pin("best")
    killed = FaultBackend(backend)
    killed.fail_if(lambda kind, path: (kind, path) == ("sync_dir", f"{STORE}/pins"))
    with pytest.raises(StorageError, match="injected"):
        offload.pin(f"{STORE}/step-00000001", "best", backend=killed)
    training.optimizer.param_groups[0]["lr"] = 1e-3
    training.optimizer.checkpoint().result()
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
    training = Training(backend, keep=3, directories=[STORE, *others])
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


@pytest.mark.parametrize("block", [0, 1, 2])
def test_every_block_of_the_parameters_is_checked(block: int) -> None:
    """Real models have more than the one block that fits all other tests."""

    def build() -> torch.nn.Module:
        model = torch.nn.Module()
        model.trained = torch.nn.Parameter(torch.zeros(64))
        large = torch.zeros(MODEL_BLOCK_BYTES * 2 // 4 + 1000)
        model.frozen = torch.nn.Parameter(large, requires_grad=False)
        return model

    backend, model = MemoryBackend(), build()
    settings = {"directory": STORE, "options": options_of(backend)}
    with AdamW([model.trained], model=model, **settings) as optimizer:
        model.trained.grad = torch.ones(64)
        optimizer.step()
        found = optimizer.checkpoint().result()
    size = sum(p.nbytes for p in model.parameters())
    first = found.files["model.safetensors"] - size + block * MODEL_BLOCK_BYTES
    overwrite(backend, f"{found.path}/model.safetensors", b"\1", first + 100)
    model = build()
    with AdamW([model.trained], model=model, **settings) as optimizer:
        with pytest.raises(DamagedError, match=f"bytes {first} to ") as error:
            optimizer.restore()
        assert found.path in str(error.value)
    backend.remove(f"{found.path}/damaged.txt")
    with pytest.raises(DamagedError, match=f"bytes {first} to "):
        load_parameters(build(), STORE, backend=backend)


@pytest.mark.parametrize("call", ["step", "checkpoint"])
def test_state_of_which_a_write_has_failed_behind_a_step_is_not_trained_on(call: str) -> None:
    backend = FaultBackend(MemoryBackend(), "later")
    training = Training(backend)
    training.steps_and_seal()
    writes = backend.num_done["write"]
    training.step()
    training.optimizer.synchronize()
    per_step = backend.num_done["write"] - writes
    backend.fail("write", per_step, forever=False)  # the last one, which the step does not await
    training.step()
    with pytest.raises((StorageError, BrokenOptimizerError), match="injected failure of write"):
        training.optimizer.synchronize()
    with pytest.raises(
        BrokenOptimizerError, match=rf"a transfer of state failed .*continue from {STORE}/step-0000"
    ):
        getattr(training.optimizer, call)()
    assert training.optimizer.restore().step == 1
    training.steps_and_seal()
    assert training.differences(2) == []
    training.optimizer.close()
    backend.close()
