"""Cases of restores, seals and checks of files that only a test of their own notices."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offload.engine.seal
import offload.stream.meter
from gds import MemoryBackend, PosixBackend, StorageError, WrapperBackend
from offload import list_checkpoints, open_checkpoint
from offload.checkpoint.quarantine_mark import read_quarantine
from offload.engine.lifecycle import Lifecycle
from offload.engine.seal import SEAL_THREAD, Seal
from offload.engine.working_slot import StateSlots
from offload.errors import BrokenOptimizerError, DamagedError
from offload.store.file_identity import ids_in
from offload.store.full_disk import naming_free_space
from offload.units import duration
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_concurrency import SealGate
from tests.crash.test_interrupted import GatedSync
from tests.crash.test_meddled_beside import replace_files
from tests.crash.test_quarantine import NEWEST, STORE, damage, goes_on_from, store_with
from tests.crash.test_waiting_for_a_seal import (
    Turnstile,
    goes_on,
    held_checkpoint,
    is_waiting,
    seal_of,
    started,
)
from tests.crash.test_waiting_for_a_seal import backend as turnstile
from tests.fake_gpu.device import FakeDevice
from tests.numerics.pairs import CASES, CUTS
from tests.placement.conftest import device
from tests.placement.test_host_placement import device_pair
from tests.placement.test_host_placement import train as train_on_device
from tests.stores.files import remove_tree
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    take_step,
    train,
)

__all__ = ["device", "turnstile"]  # fixtures


def join_seals() -> None:
    """Wait for the end of all threads that seal."""
    for thread in threading.enumerate():
        if thread.name == SEAL_THREAD:
            thread.join(60)


def test_a_restore_waits_for_the_seal_in_flight() -> None:
    backend = GatedSync()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    take_step(model, optimizer, 1)
    handle = optimizer.checkpoint({"step": 1})
    opens = threading.Timer(0.3, backend.gate.set)
    opens.start()
    found = optimizer.restore()
    opens.join()
    assert handle.done()
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


def test_training_begins_where_all_checkpoints_were_removed_beside_the_process() -> None:
    backend = MemoryBackend()
    store_with(backend)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    for info in list_checkpoints(STORE, backend=backend):
        remove_tree(backend, info.path)
    with pytest.warns(RuntimeWarning, match="was removed or moved away"):
        assert optimizer.restore() is None
    train(model, optimizer, 1)
    with optimizer:
        (info,) = list_checkpoints(STORE, backend=backend)
        assert (info.step, info.valid) == (1, True)


class Filling(WrapperBackend):
    """Has no free space once it is full."""

    is_full = False

    def free_bytes(self, path: str) -> int:
        return 0 if self.is_full else super().free_bytes(path)


def test_a_restore_in_the_same_cut_needs_no_space() -> None:
    backend = Filling(MemoryBackend())
    store_with(backend)
    optimizer = optimizer_for(Model(), STORE, options(backend))
    backend.is_full = True
    found = optimizer.restore()
    assert found is not None
    assert found.step == 2
    optimizer.close()


def test_state_that_need_not_be_encoded_anew_may_be_all_the_same() -> None:
    backend = MemoryBackend()
    settings = options(backend, state_dtype="int8")
    model = Model()
    with optimizer_for(model, STORE, settings) as optimizer:
        train(model, optimizer, 1, 2)
    with optimizer_for(Model(), STORE, settings) as optimizer:
        found = optimizer.restore(reencode=True)
        assert found is not None
        assert found.step == 2


def test_a_restore_that_is_interrupted_as_it_lets_go_of_the_state_leaves_none_to_train_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    train(model, optimizer, 1, 2)

    def interrupted(slots: StateSlots) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StateSlots, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.restore()
    with pytest.raises(BrokenOptimizerError, match=rf"restoring {NEWEST} failed half way"):
        take_step(model, optimizer, 3)
    goes_on_from(optimizer.restore(), model, optimizer, 2)
    optimizer.close()


def test_a_second_damaged_one_in_a_row_is_not_marked_if_it_was_asked_for() -> None:
    backend = MemoryBackend()
    store_with(backend)
    older = f"{STORE}/step-00000001"
    for path in (older, NEWEST):
        damage(backend, "model", path)
    optimizer = optimizer_for(Model(), STORE, options(backend))
    with pytest.raises(DamagedError, match=rf"continue from {older}"):
        optimizer.restore(2)
    with (
        pytest.warns(RuntimeWarning, match=f"not using {NEWEST}"),
        pytest.raises(DamagedError, match=r"not quarantined and not passed over.*two in a row"),
    ):
        optimizer.restore(1)
    assert read_quarantine(backend, NEWEST) is not None
    assert read_quarantine(backend, older) is None
    optimizer.close()


def test_a_reference_that_is_loaded_after_a_restore_reads_no_parameters() -> None:
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    train(model, optimizer, 1, 2)
    reference = optimizer.state_dict()
    optimizer.restore()
    assert optimizer.stats().restore_bytes > 0
    train(model, optimizer, 3, seal=False)
    optimizer.load_state_dict(reference)
    assert optimizer.stats().restore_bytes == 0
    optimizer.close()


def test_the_log_line_of_a_restore_has_the_time_of_this_restore(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = MemoryBackend()
    store_with(backend)
    with (
        caplog.at_level(logging.INFO, "offload"),
        optimizer_for(Model(), STORE, options(backend)) as optimizer,
    ):
        optimizer.restore()
        seconds = optimizer.stats().restore_s
    assert seconds > 0
    (line,) = [message for message in caplog.messages if "restored step 2" in message]
    assert f"restored step 2 in {duration(seconds)}, " in line


def test_a_seal_whose_beginning_was_interrupted_is_not_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread runs already, and finds out that nobody wants the checkpoint any more."""
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    take_step(model, optimizer, 1)
    may_go_on = threading.Event()
    start, run = Seal.start, Seal.run

    def runs_late(seal: Seal, succeeded: Callable[[int, float], None]) -> None:
        assert may_go_on.wait(60)
        run(seal, succeeded)

    def interrupted(seal: Seal, succeeded: Callable[[int, float], None]) -> None:
        start(seal, succeeded)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Seal, "run", runs_late)
        patch.setattr(Seal, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.checkpoint({"step": 1})
        may_go_on.set()
        join_seals()
    assert list_checkpoints(STORE, backend=backend) == []
    take_step(model, optimizer, 2)
    sealed = optimizer.checkpoint({"step": 2}).result()
    assert differences(sealed, backend, Reference().after(2)) == []
    optimizer.close()


def test_a_seal_that_was_interrupted_when_it_had_begun_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step writes into its slot meanwhile, or later."""
    backend = SealGate()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=2)
    take_step(model, optimizer, 1)
    start = Seal.start

    def interrupted(seal: Seal, succeeded: Callable[[int, float], None]) -> None:
        start(seal, succeeded)
        assert backend.reached.wait(60)
        raise KeyboardInterrupt

    backend.shut()
    with monkeypatch.context() as patch:
        patch.setattr(Seal, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.checkpoint({"step": 1})
    backend.is_open.set()
    join_seals()
    train(model, optimizer, 2)
    for step in (1, 2):
        with open_checkpoint(f"{STORE}/step-0000000{step}", backend=backend) as sealed:
            assert sealed.train_state == {"step": step}
            assert differences(sealed, backend, Reference().after(step)) == []
    optimizer.close()


def test_a_checkpoint_is_made_before_the_call_returns_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    take_step(model, optimizer, 1)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(offload.engine.seal, "start", refused)
    handle = optimizer.checkpoint({"step": 1})
    assert handle.done()
    assert differences(handle.result(), backend, Reference().after(1)) == []
    optimizer.close()


def test_what_a_step_waits_for_a_seal_is_counted(
    turnstile: Turnstile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still, but for an hour in which the step waits."""
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(offload.stream.meter, "time", clock)
    model, optimizer = started(turnstile)
    handle = held_checkpoint(turnstile, optimizer)
    model.fill_gradients(2)
    thread = is_waiting(seal_of(optimizer)._progress, optimizer.step)
    now = 3600.0
    turnstile.open_for_all()
    assert goes_on(thread)
    handle.result(60)
    assert optimizer.stats().wait_seal_s == 3600
    optimizer.close()


def test_the_lines_of_a_seal_are_logged_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing has to be called for them."""
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    with caplog.at_level(logging.INFO, "offload"):
        train(model, optimizer, 1, 2)
        join_seals()
        assert [m for m in caplog.messages if "recycled step 1 in" in m], caplog.messages
    optimizer.close()


def test_a_step_is_sealed_anew_if_files_of_its_checkpoint_are_known_to_be_others() -> None:
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=3)
    train(model, optimizer, 1, 2)
    replace_files(backend, NEWEST)
    optimizer.pin("another", 1)  # which looks at all checkpoints
    sealed = optimizer.checkpoint({"step": 2, "again": True}).result()
    assert sealed.train_state == {"step": 2, "again": True}
    assert differences(sealed, backend, Reference().after(2)) == []
    optimizer.close()


def test_what_a_second_checkpoint_of_a_step_reads_of_a_device_is_counted(
    device: FakeDevice,
) -> None:
    """The parameters are compared with the checkpoint; the state need not be."""
    pair = device_pair(CASES["adamw"], CUTS[0])
    train_on_device(pair, (0, 1))
    pair.optimizer.checkpoint({"number": 1}).result()
    before = pair.optimizer.stats()
    pair.optimizer.checkpoint({"number": 2}).result()
    after = pair.optimizer.stats()
    model_bytes = sum(parameter.nbytes for parameter in pair.live.parameters())
    assert after.to_host_bytes - before.to_host_bytes == model_bytes
    assert after.to_device_bytes == before.to_device_bytes
    pair.optimizer.close()


@pytest.mark.parametrize("call", ["step", "checkpoint"])
def test_state_of_which_a_write_has_failed_behind_a_step_is_not_trained_on(call: str) -> None:
    backend = FaultBackend(MemoryBackend(), "later")
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    train(model, optimizer, 1)
    writes = backend.num_done["write"]
    take_step(model, optimizer, 2)
    optimizer.synchronize()
    per_step = backend.num_done["write"] - writes
    backend.fail("write", per_step, forever=False)  # the last one, which the step does not await
    take_step(model, optimizer, 3)
    with pytest.raises((StorageError, BrokenOptimizerError), match="injected failure of write"):
        optimizer.synchronize()
    with pytest.raises(
        BrokenOptimizerError, match=r"a transfer of state failed .*; call restore\(\) to continue"
    ):
        getattr(optimizer, call)()
    goes_on_from(optimizer.restore(), model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize(
    ("newest", "refused", "tier_url", "advice"),
    [
        (NEWEST, [], "", f"call restore() to continue from {NEWEST}"),
        (NEWEST, [], "file:///tier", f"call restore() to continue from {NEWEST}"),
        (NEWEST, ["/run/step-00000001"], "", f"call restore() to continue from {NEWEST}"),
        ("", [NEWEST], "", "no usable checkpoint left: repair one of them"),
        ("", [NEWEST], "file:///tier", "no usable checkpoint left: repair one of them"),
        ("", [], "file:///tier", "call restore() to go on from the newest checkpoint in file:///t"),
        ("", [], "", "there is no checkpoint yet: construct model and optimizer again"),
    ],
)
def test_advice_names_what_training_can_go_on_from(
    newest: str, refused: list[str], tier_url: str, advice: str
) -> None:
    store: Any = SimpleNamespace(
        directory=STORE,
        newest=SimpleNamespace(path=newest) if newest else None,
        refused=[(path, "is damaged") for path in refused],
    )
    memory: Any = SimpleNamespace(error=None)
    lifecycle = Lifecycle(store, memory, decided=True, tier_url=tier_url)
    assert advice in lifecycle.remedy()


def test_identities_are_those_of_regular_files_in_a_directory_of_its_own(tmp_path: Path) -> None:
    backend = PosixBackend(direct=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"1234")
    (folder / "directory").mkdir()
    (folder / "link").symlink_to("file")
    (tmp_path / "other-name").symlink_to("folder")
    names = ["file", "directory", "link", "missing"]
    inode = os.stat(folder / "file").st_ino
    assert ids_in(backend, str(folder), names) == {"file": (inode, 4)}
    assert ids_in(backend, str(tmp_path / "other-name"), names) == {}
    assert ids_in(backend, str(folder / "file"), names) == {}
    assert ids_in(backend, str(tmp_path / "missing"), names) == {}
    backend.close()


def test_a_full_drive_is_named_even_where_its_free_space_is_not_known() -> None:
    backend = FaultBackend(MemoryBackend())
    backend.fail_if(lambda kind, _: kind == "free_bytes")
    full = StorageError(errno.ENOSPC, "create", f"{STORE}/slot")
    with (
        pytest.raises(StorageError) as raised,
        naming_free_space(backend, f"{STORE}/slot", 1 << 20, "a slot"),
    ):
        raise full
    assert raised.value is full
    assert backend.num_failed == 1
