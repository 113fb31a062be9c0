"""Steps of the protocol that only a test of their own notices: what `tests/mutation` showed."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

import offload.checkpoint.sealed_slot
import offload.format.manifest
import offload.model.model_file
from gds import Backend, Buffer, File, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload import AdamW, LastK
from offload.engine.seal import Seal
from offload.errors import BrokenOptimizerError, SealError, StoreError
from offload.format.digests import DigestContext
from offload.format.header import build_header
from offload.format.known_leaves import KnownLeaves
from offload.model.model_file import BlockBuffers, ModelImage
from offload.model.model_writing import write_model
from offload.store.maintenance.pruning import prune
from offload.stream.passes import RingPass, ring_for_one_pass
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend, Kind
from tests.stores.training import (
    HYPER,
    Model,
    Reference,
    Snapshot,
    backward,
    differences,
    optimizer_for,
)
from tests.stores.training import options as options_of

STORE = "/run"
BLOCK_BYTES = 4096
REUSES_NOTHING = "this process reuses no slot any more"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
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


class LateFile(WrapperFile):
    """Writes when it is waited for, and not before: what is in the buffer by then."""

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return _Late(self.inner, source, offset)  # type: ignore[return-value]


class _Late(Future[int]):
    def __init__(self, file: File, source: Buffer, offset: int) -> None:
        super().__init__()
        self._transfer = file, source, offset

    def is_of(self, path: str, offset: int) -> bool:
        return (self._transfer[0].path, self._transfer[2]) == (path, offset)

    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            file, source, offset = self._transfer
            self.set_result(file.write(source, offset).result())
        return super().result(timeout)


class LateBackend(WrapperBackend):
    """Writes moments when it is waited for, and sees what is synced or read before that."""

    def __init__(self, before_byte: int = 1 << 62) -> None:
        super().__init__(MemoryBackend())
        self.before_byte = before_byte
        """Writes that begin from there on end at once."""
        self.late: list[_Late] = []
        self.synced_too_early: list[str] = []
        self.read_too_early: list[str] = []

    def wrap_file(self, file: File) -> File:
        return _LateStateFile(file, self)


class _LateStateFile(WrapperFile):
    def __init__(self, inner: File, backend: LateBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if "/exp_avg" not in self.path or offset >= self._backend.before_byte:
            return super().write(source, offset)
        self._backend.late.append(_Late(self.inner, source, offset))
        return self._backend.late[-1]  # type: ignore[return-value]

    def read(self, into: Buffer, offset: int) -> IOFuture:
        if any(late.is_of(self.path, offset) for late in self._backend.late if not late.done()):
            self._backend.read_too_early.append(self.path)
        return super().read(into, offset)

    def sync(self) -> None:
        if any(not late.done() for late in self._backend.late):
            self._backend.synced_too_early.append(self.path)
        super().sync()


def test_nothing_is_synced_before_all_writes_of_the_state_have_ended() -> None:
    backend = LateBackend()
    training = Training(backend)
    try:
        training.step()
        assert len(backend.late) == 4, "two arrays of two chunks, which fit into the ring"
        assert not any(late.done() for late in backend.late)
        sealed = training.optimizer.checkpoint().result(60)
        assert backend.synced_too_early == []
        assert differences(sealed, backend, Reference().after(1)) == []
    finally:
        for late in backend.late:
            late.result()  # else closing waits for them
        training.optimizer.close()


def test_a_chunk_is_not_read_again_before_its_writes_have_ended() -> None:
    """Those of the second chunk have, so that there is a frame to read into."""
    backend = LateBackend(before_byte=BLOCK_BYTES + 1)
    training = Training(backend)
    try:
        training.step()
        assert len(backend.late) == 2, "two arrays of the first chunk"
        assert not any(late.done() for late in backend.late)
        assert backend.read_too_early == []
        for late in backend.late:
            late.result()
        backend.before_byte = 0
        training.steps_and_seal()
        assert newest_differs(training, Reference().after(2)) == []
    finally:
        for late in backend.late:
            late.result()  # else closing waits for them
        training.optimizer.close()


def test_what_was_read_ahead_from_another_slot_is_not_taken() -> None:
    """No pass leaves such, at present; whoever names another slot gets what is in that."""
    training = Training(MemoryBackend(), keep=2)
    training.steps_and_seal()
    training.steps_and_seal()
    engine = training.optimizer._engine
    streamer, layout = engine.state.ring(), engine.state.layout
    older, newest = (checkpoint.slot for checkpoint in engine.store.checkpoints)
    assert streamer._source is newest, "it has read ahead for the next step"
    streamer.begin(older, [0, 1])
    frame = streamer.take(0)
    buffer, offset = frame.buffer(layout.plans[0], "exp_avg")
    file = older.array("exp_avg", 0)
    assert bytes(buffer.memoryview()) == file.read_bytes(offset, buffer.nbytes)
    streamer.discard(frame)
    training.optimizer.close()


def test_resident_state_that_a_seal_is_about_to_write_is_not_stepped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(MemoryBackend(), host_memory="1GiB")
    training.step()
    streamer = training.optimizer._engine.state.ring()
    flush = streamer.flush()
    wait_until = streamer._changed.wait_until
    found_at_once = []

    def seal_goes_on(reached: Callable[[], object]) -> object:
        with streamer._changed:
            found_at_once.append(bool(reached()))
        flush.start(training.optimizer._engine.state.slots.present)
        return wait_until(reached)

    monkeypatch.setattr(streamer._changed, "wait_until", seal_goes_on)
    frame = streamer.take(1)
    assert found_at_once == [False], "it can be changed before it has been written"
    streamer.keep(frame)
    monkeypatch.undo()
    training.steps_and_seal()
    assert newest_differs(training, Reference().after(2)) == []
    training.optimizer.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("host_memory", ["0", "1GiB"], ids=["ring", "resident"])
def test_a_pass_that_only_reads_leaves_the_state_as_it_is_after_an_error(
    host_memory: str, error: type[BaseException]
) -> None:
    training = Training(MemoryBackend(), host_memory=host_memory)
    training.step()
    state = training.optimizer._engine.state
    reading = RingPass(state.ring(), source=state.slots.present)
    reading.announce([0, 1])
    with pytest.raises(error), reading.taken(0):
        raise error
    training.steps_and_seal()
    assert newest_differs(training, Reference().after(2)) == []
    training.optimizer.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_fails_frees_its_frame_and_writes_nothing(error: type[BaseException]) -> None:
    training = Training(MemoryBackend())
    training.steps_and_seal()
    checkpoint = training.optimizer._engine.store.newest
    assert checkpoint is not None
    slot = training.optimizer._engine.store.slot_of(checkpoint)
    layout = checkpoint.manifest.layout
    with ring_for_one_pass(training.backend, layout) as streamer:
        for _ in range(5):  # more often than there are frames
            writing = RingPass(streamer, source=None, target=slot)
            writing.announce([0])
            with pytest.raises(error), writing.taken(0):
                raise error
    training.optimizer.close()
    assert newest_differs(training, Reference().after(1)) == []


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_the_bytes_of_the_parameters_are_those_of_when_they_were_copied(
    num_blocks: int, small_blocks: None
) -> None:
    """Transfers end late, and a step overwrites what has been copied at once."""
    backend = MemoryBackend()
    values = torch.arange(num_blocks * BLOCK_BYTES // 4, dtype=torch.float32)
    live = values.clone()
    header = build_header([("x", "F32", tuple(live.shape))])
    file = backend.create("/model", header.file_bytes)
    image = ModelImage(header, {"x": live})

    def step(copied: int) -> None:
        live[: copied // 4] = -1

    write_model(
        image,
        LateFile(file),
        BlockBuffers(backend, header.file_bytes),
        DigestContext("store", 1),
        KnownLeaves(readable=False),
        step,
    )
    assert bool((live == -1).all())
    data = file.read_bytes(header.data_start, values.nbytes)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), values)


class GateBackend(WrapperBackend):
    """Holds back one of the writes to ``model.safetensors``."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.num_before = -1
        self.is_open = threading.Event()

    def wrap_file(self, file: File) -> File:
        return _GatedFile(file, self)


class _GatedFile(WrapperFile):
    def __init__(self, inner: File, backend: GateBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self.path.endswith("model.safetensors"):
            if self._backend.num_before == 0:
                assert self._backend.is_open.wait(60)
            self._backend.num_before -= 1
        return super().write(source, offset)


def test_a_step_returns_when_frozen_parameters_have_been_copied_as_well(
    small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GateBackend()
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.randn(2048).to(torch.bfloat16))
    model.frozen = torch.nn.Parameter(torch.randn(8192).to(torch.bfloat16), requires_grad=False)
    optimizer = AdamW(
        [model.trained], directory=STORE, model=model, options=options_of(backend), **HYPER
    )
    model.trained.grad = torch.ones_like(model.trained)
    optimizer.step()
    waits = threading.Event()
    original = Seal.wait_all_copied

    def watched(seal: Seal) -> None:
        waits.set()
        original(seal)

    monkeypatch.setattr(Seal, "wait_all_copied", watched)
    backend.num_before = 2  # the trained parameter's block, and the first of the frozen one
    handle = optimizer.checkpoint()
    frozen = model.frozen.clone()

    def step_and_edit() -> None:
        optimizer.step()
        with torch.no_grad():
            model.frozen.zero_()

    thread = threading.Thread(target=step_and_edit)
    thread.start()
    try:
        assert waits.wait(60), "the step has returned"
        assert torch.equal(model.frozen, frozen)
    finally:
        backend.is_open.set()
        thread.join(60)
    assert handle.result(60).verify().ok
    assert not model.frozen.any()
    optimizer.close()


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
    assert newest_differs(training, Reference().after(2)) == []
    training.optimizer.close()


@pytest.mark.parametrize("kind", ["sync", "rename", "sync_dir"])
def test_a_train_state_that_could_not_be_replaced_ends_all_reuse(kind: Kind) -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=1)
    training.steps_and_seal()
    training.steps_and_seal()
    slots = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    assert len(slots) == 1, "there is one that the next step could have used"
    backend.fail(kind, 1, forever=False)
    with pytest.raises(StorageError, match=f"injected failure of {kind}"):
        training.optimizer.checkpoint({"another": "train state"})
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.step()
    assert len([name for name in backend.list_dir(STORE) if name.startswith(".slot-")]) == 2
    training.steps_and_seal()
    assert backend.violations == []
    training.optimizer.close()


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
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.optimizer.checkpoint({"acknowledged": "later"}).result()
    training.optimizer.close()
    with _newest(training) as found:
        assert (found.step, found.train_state) == (1, {"acknowledged": "later"})
        assert differences(found, backend, Reference().after(1)) == []


def test_a_store_that_could_not_be_named_reuses_nothing() -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, directory=[STORE, "/other"])
    backend.fail_if(lambda kind, path: kind == "sync" and path.endswith("/store.json"))
    with pytest.raises(StorageError, match="injected failure of sync"):
        training.step()
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.optimizer.step()
    training.optimizer.close()


@pytest.mark.parametrize("kind", ["rename", "sync_dir", "sync"])
def test_a_checkpoint_that_could_not_be_withdrawn_ends_all_reuse(kind: Kind) -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    training.steps_and_seal()
    training.steps_and_seal()
    backend.fail(kind, 1, forever=False)
    with pytest.raises(StorageError, match=f"injected failure of {kind}"):
        training.optimizer.restore(1, discard_newer=True)
    with contextlib.suppress(StoreError):  # it may be there still, and then it stays
        training.optimizer.restore(1, discard_newer=True)
    training.optimizer.restore()
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.step()
    assert backend.violations == []
    training.optimizer.close()


@pytest.mark.parametrize(
    ("call", "kind"),
    [("pin", "sync"), ("pin", "rename"), ("pin", "sync_dir"), ("unpin", "sync_dir")],
)
def test_a_pin_that_could_not_be_made_durable_ends_all_reuse(call: str, kind: Kind) -> None:
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=1)
    training.steps_and_seal()
    training.optimizer.pin("one")
    training.steps_and_seal()
    backend.fail(kind, 1, forever=False)
    with pytest.raises(StorageError, match=f"injected failure of {kind}"):
        getattr(training.optimizer, call)("one")
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.step()
    assert backend.violations == []
    training.optimizer.close()


@pytest.mark.parametrize("what", ["withdrawn", "replaced"])
def test_pins_that_could_not_be_made_durable_end_all_reuse(what: str) -> None:
    """Before a checkpoint is taken back or replaced the pins that are gone by are synced."""
    backend = FaultBackend(MemoryBackend())
    training = Training(backend, keep=2)
    training.steps_and_seal()
    training.optimizer.pin("one")
    training.steps_and_seal()
    backend.fail_if(lambda kind, path: kind == "sync_dir" and path == f"{STORE}/pins")
    if what == "withdrawn":
        with pytest.raises(StorageError, match="injected failure of sync_dir"):
            training.optimizer.restore(1, discard_newer=True)
    else:
        training.optimizer.param_groups[0]["lr"] = 1e-3
        with pytest.raises(StorageError, match="injected failure of sync_dir"):
            training.optimizer.checkpoint()
    assert training.optimizer.restore().step == 2
    with pytest.warns(RuntimeWarning, match=REUSES_NOTHING):
        training.step()
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
    killed.fail_if(lambda kind, path: kind == "sync_dir" and path == f"{STORE}/pins")
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


@pytest.mark.parametrize("others", [[], ["/second/run"]], ids=["one-drive", "two-drives"])
def test_power_lost_while_nothing_trains_and_a_store_is_pruned(others: list[str]) -> None:
    """What is kept is whole at every moment, and so is the rest while it has its name."""
    backend = CrashBackend()
    training = Training(backend, keep=4, directory=[STORE, *others])
    for _ in range(4):
        training.steps_and_seal()
    training.optimizer.pin("mine", 2)
    training.optimizer.close()
    before = len(backend.log)
    report = prune(STORE, LastK(1), parts=others or None, backend=backend)
    assert [os.path.basename(path) for path in report.kept] == ["step-00000002", "step-00000004"]
    assert report.unnamed == ()
    reference = Reference()
    wanted = {step: reference.after(step) for step in range(1, 5)}
    rng = random.Random(20261121)
    disk = Disk(backend.log[:before])
    for operation in backend.log[before:]:
        disk.apply(operation)
        for _ in range(3):
            survivor = disk.power_cut(rng).backend()
            found = offload.list_checkpoints(STORE, backend=survivor)
            assert {2, 4} <= {info.step for info in found}, operation
            for info in found:
                with offload.open_checkpoint(info.path, backend=survivor) as checkpoint:
                    assert differences(checkpoint, survivor, wanted[info.step]) == []
        # Pruned again, a part may be left that was withdrawn half; it is named.
        again = prune(STORE, LastK(1), parts=others or None, backend=survivor)
        assert {os.path.basename(path) for path in again.kept} >= {"step-00000002", "step-00000004"}
        for other in others:
            left = [name for name in survivor.list_dir(other) if name.startswith("part-")]
            assert len(left) == 2 + len(again.unnamed)
            assert len(again.unnamed) <= 1
    for _ in range(20):
        names = disk.power_cut(rng).backend().list_dir(STORE)
        assert [name for name in names if name.startswith((".", "step-"))] == [
            "step-00000002",
            "step-00000004",
        ]


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
    assert newest_differs(training, Reference().after(3)) == []
    training.steps_and_seal()
    assert newest_differs(training, Reference().after(4)) == []
    training.optimizer.close()


def test_what_cannot_be_read_now_is_never_the_newest_again() -> None:
    """Its generation is not known, so that of the next checkpoint is far above all others."""
    backend = MemoryBackend()
    training = Training(backend, keep=3)
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.close()
    manifest = backend.open(f"{STORE}/step-00000002/manifest.json", writable=True)
    whole = manifest.read_bytes(0, manifest.size_bytes)
    manifest.write_bytes(bytes(64), 0)

    training = Training(backend, keep=3)
    with pytest.warns(RuntimeWarning, match="not using /run/step-00000002"):
        assert training.optimizer.restore().step == 1
    training.step()
    training.steps_and_seal()
    training.optimizer.close()
    manifest.write_bytes(whole, 0)
    manifest.close()

    training = Training(backend, keep=3)
    assert training.optimizer.restore().step == 3
    training.optimizer.close()


def test_a_history_that_was_given_up_is_gone_when_the_new_one_is_durable() -> None:
    backend = MemoryBackend()
    training = Training(backend, keep=3)
    training.steps_and_seal(4)
    training.steps_and_seal()
    training.optimizer.close()
    training = Training(backend, keep=1, fresh=True)
    assert training.optimizer.restore() is None, "there is nothing that is not given up"
    training.step()
    names = set(backend.list_dir(STORE))
    assert {"step-00000004", "step-00000005"} <= names
    training.optimizer.checkpoint().result()
    names = {name for name in backend.list_dir(STORE) if name.startswith("step-")}
    assert names == {"step-00000001"}
    training.optimizer.close()


def test_a_leftover_slot_whose_headers_were_lost_is_written_anew() -> None:
    """Nothing of a free slot is durable but what was synced: its sizes alone may have survived."""
    backend = MemoryBackend()
    training = Training(backend, keep=1)
    training.steps_and_seal()
    training.steps_and_seal()
    training.optimizer.close()
    (slot,) = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    for name in backend.list_dir(f"{STORE}/{slot}"):
        if name.endswith(".safetensors"):
            file = backend.open(f"{STORE}/{slot}/{name}", writable=True)
            file.write_bytes(bytes(file.size_bytes), 0)
            file.close()
    training = Training(backend, keep=1)
    training.optimizer.restore()
    training.steps_and_seal()
    training.optimizer.close()
    with _newest(training) as found:
        assert found.step == 3
        assert differences(found, backend, Reference().after(3)) == []


def test_a_store_whose_maker_was_killed_is_durable_when_a_checkpoint_is() -> None:
    """The directory was made, and seen by the next process; nobody had synced its name."""
    backend = CrashBackend()
    backend.make_dir("/data")
    backend.sync_dir("/")
    backend.make_dir("/data/run")
    training = Training(backend, directory="/data/run")
    training.steps_and_seal()
    training.optimizer.close()
    disk = Disk(backend.log)
    for seed in range(40):
        survivor = disk.power_cut(random.Random(seed)).backend()
        with offload.open_checkpoint("/data/run", backend=survivor) as found:
            assert found.step == 1


@pytest.mark.parametrize("keep", [2, 3])
def test_sealing_a_step_again_costs_no_older_checkpoint(keep: int) -> None:
    """The new one takes the place of the old one of its step: retention has one to spare less."""
    backend = MemoryBackend()
    training = Training(backend, keep=keep)
    for _ in range(keep):
        training.steps_and_seal()
    training.optimizer.param_groups[0]["lr"] = 1e-3
    training.optimizer.checkpoint().result()
    names = [name for name in backend.list_dir(STORE) if name.startswith("step-")]
    assert names == [f"step-{step:08d}" for step in range(1, keep + 1)]
    training.steps_and_seal()
    names = [name for name in backend.list_dir(STORE) if name.startswith("step-")]
    assert names == [f"step-{step:08d}" for step in range(2, keep + 2)]
    training.optimizer.close()


def _newest(training: Training) -> offload.Checkpoint:
    return offload.open_checkpoint(STORE, backend=training.backend)


def newest_differs(training: Training, expected: Snapshot) -> list[str]:
    """Say what of the newest checkpoint is not as expected."""
    with _newest(training) as found:
        return differences(found, training.backend, expected)
