"""A checkpoint found damaged is marked on the drive, and the one before it takes its place."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gds import Backend, Buffer, IOFuture, MemoryBackend, WrapperBackend
from gds._backend import File
from gds._wrapper import WrapperFile
from offload import AdamW, Checkpoint, list_checkpoints, load_parameters, open_checkpoint
from offload.errors import BrokenOptimizerError, CheckpointError, DamagedError
from offload.poison import Poison
from offload.quarantine import QUARANTINE_NAME, read_quarantine, write_quarantine
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)

STORE = "/run"
OTHER = "/other"
NEWEST = f"{STORE}/step-00000002"
SEED = 20261121

STATE = ["master", "exp_avg", "exp_avg_sq"]
READ_AT_ONCE = ["model", "train_state"]


class FlippingBackend(WrapperBackend):
    """Flips a bit in what is read from some files, as a bad cable or memory would."""

    flips = ""
    """The end of their paths; empty for none."""

    def wrap_file(self, file: File) -> File:
        """Return a file that may do so."""
        return _FlippingFile(file, self)


class _FlippingFile(WrapperFile):
    def __init__(self, inner: File, backend: FlippingBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, buffer: Buffer, offset: int) -> IOFuture:
        """Read, and flip a bit."""
        future = super().read(buffer, offset)
        future.result()
        if self._backend.flips and self.path.endswith(self._backend.flips):
            buffer.memoryview()[-1] ^= 0x40
        return future


def flip(backend: Backend, path: str, offset: int = -9) -> None:
    """Change one bit of a file, durably."""
    file = backend.open(path, writable=True)
    try:
        offset %= file.size_bytes
        (byte,) = file.read_bytes(offset, 1)
        file.write_bytes(bytes([byte ^ 0x10]), offset)
        file.sync()
    finally:
        file.close()


def damage(backend: Backend, name: str, checkpoint: str = NEWEST) -> str:
    path = f"{checkpoint}/{name}.safetensors"
    flip(backend, path, 40 if name == "train_state" else -9)
    return path


def train(model: Model, optimizer: AdamW, step: int) -> None:
    backward(model, step)
    optimizer.step()


def train_through(model: Model, optimizer: AdamW, step: int) -> None:
    """Take a step, and wait for it where it runs beside the model."""
    train(model, optimizer, step)
    optimizer.synchronize()


def store_with(backend: Backend, directory: str | list[str] = STORE, keep: int = 2) -> None:
    """Make checkpoints of steps 1 and 2."""
    model = Model()
    with optimizer_for(model, directory, options(backend), keep=keep) as optimizer:
        for step in (1, 2):
            train(model, optimizer, step)
            optimizer.checkpoint({"step": step}).result()


@contextmanager
def warned(*parts: str) -> Iterator[None]:
    """Expect one warning with all these words in it, and only warnings about checkpoints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught]
    assert all(w.category is RuntimeWarning for w in caught), messages
    assert sum(all(part in m for part in parts) for m in messages) == 1, messages


def goes_on_from(checkpoint: Checkpoint | None, model: Model, optimizer: AdamW, step: int) -> None:
    """Check that training continues from a step as if nothing had been after it."""
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.train_state) == (step, {"step": step})
    reference = Reference()
    assert same_bits(dict(model.state_dict()), reference.after(step).model)
    for number in (step + 1, step + 2):
        train(model, optimizer, number)
        sealed = optimizer.checkpoint({"step": number}).result()
        assert differences(sealed, sealed.backend, reference.after(number)) == []


@pytest.mark.parametrize("name", READ_AT_ONCE)
def test_restore_takes_the_one_before(name: str) -> None:
    backend = MemoryBackend()
    store_with(backend)
    path = damage(backend, name)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    with warned(path, "damaged", "is quarantined", "going on from", "step-00000001"):
        found = optimizer.restore()
    assert backend.stat(f"{NEWEST}/{QUARANTINE_NAME}") is not None
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("directories", [1, 2])
@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("name", STATE)
def test_state_that_the_first_step_finds_damaged(
    name: str, overlap: str | None, directories: int
) -> None:
    backend = MemoryBackend()
    where = [STORE, OTHER][:directories]
    store_with(backend, where)
    on_other = directories == 2 and name == "exp_avg"
    part = next((p for p in backend.list_dir(OTHER) if p.endswith("2")), "") if on_other else ""
    path = damage(backend, name, f"{OTHER}/{part}" if on_other else NEWEST)
    model = Model()
    settings = options(backend, overlap=overlap)
    optimizer = optimizer_for(model, where, settings)
    assert optimizer.restore().step == 2
    with pytest.raises(DamagedError) as error:
        train_through(model, optimizer, 3)
    assert f"{path}: bytes " in str(error.value)
    assert "call restore() to go on from /run/step-00000001" in str(error.value)
    with pytest.raises(BrokenOptimizerError, match="step-00000001"):
        optimizer.checkpoint()
    with warned("not using", NEWEST, "damaged"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("name", [*READ_AT_ONCE, *STATE])
def test_later_processes_do_not_try_it_again(name: str) -> None:
    """Not even when the damage is gone: what reads differently each time is not to be trusted."""
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, name)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    if name in READ_AT_ONCE:
        with warned("is quarantined"):
            optimizer.restore()
    else:
        optimizer.restore()
        with pytest.raises(DamagedError):
            train(model, optimizer, 3)
    optimizer.close()
    damage(backend, name)  # the same bit: it is whole again

    with pytest.raises(DamagedError, match=r"quarantined.*damaged.txt.*offload verify"):
        open_checkpoint(NEWEST, backend=backend)
    with pytest.raises(DamagedError, match="quarantined"):
        load_parameters(model, NEWEST, backend=backend)
    with warned("not using", NEWEST), open_checkpoint(STORE, backend=backend) as older:
        assert older.step == 1
    listed = {info.step: info for info in list_checkpoints(STORE, backend=backend)}
    assert not listed[2].valid
    assert f"{name}.safetensors" in listed[2].reason
    optimizer = optimizer_for(Model(), STORE, options(backend))
    with warned("not using", NEWEST, "quarantined"):
        assert optimizer.restore().step == 1
    optimizer.close()

    backend.remove(f"{NEWEST}/{QUARANTINE_NAME}")
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    goes_on_from(optimizer.restore(), model, optimizer, 2)
    optimizer.close()


def test_when_none_is_left() -> None:
    backend = MemoryBackend()
    store_with(backend)
    for step in (1, 2):
        damage(backend, "model", f"{STORE}/step-0000000{step}")
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    with warned("going on from"), pytest.raises(DamagedError) as error:
        optimizer.restore()
    assert "/run/step-00000001/model.safetensors" in str(error.value)
    assert "no usable checkpoint left" in str(error.value)
    assert "fresh=True" in str(error.value)
    with pytest.raises(BrokenOptimizerError):
        train(model, optimizer, 3)
    with warned("not using", NEWEST), pytest.raises(CheckpointError, match="none of its"):
        optimizer.restore()
    optimizer.close()


def test_one_that_was_asked_for_is_not_replaced_by_another() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "model", f"{STORE}/step-00000001")
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    with pytest.raises(DamagedError, match=r"call restore\(\) to go on from .*step-00000002"):
        optimizer.restore(1, discard_newer=True)
    with warned("not using", "step-00000001"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 2)
    optimizer.close()


def test_one_that_this_process_wrote_is_checked_when_it_goes_back_to_it() -> None:
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    for step in (1, 2):
        train(model, optimizer, step)
        optimizer.checkpoint({"step": step}).result()
    train(model, optimizer, 3)
    damage(backend, "exp_avg")
    optimizer.restore()
    with pytest.raises(DamagedError, match="exp_avg"):
        train(model, optimizer, 3)
    with warned("not using"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_its_place_is_taken_when_training_comes_to_its_step_again(keep: int) -> None:
    """With keep=2 its slot is the next to be used: the mark in it must not be sealed."""
    backend = MemoryBackend()
    store_with(backend, [STORE, OTHER])
    damage(backend, "model")
    model = Model()
    optimizer = optimizer_for(model, [STORE, OTHER], options(backend), keep=keep)
    with warned("is quarantined"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 1)
    with open_checkpoint(STORE, backend=backend) as newest:
        assert newest.step == 3
        assert newest.verify().ok
    optimizer.close()
    for directory in (STORE, OTHER):
        slots = [n for n in backend.list_dir(directory) if n.startswith((".slot", "step", "part"))]
        assert len(slots) <= keep + 1, slots
    assert all(
        QUARANTINE_NAME not in backend.list_dir(f"{STORE}/{name}")
        for name in backend.list_dir(STORE)
        if name.startswith((".slot", "step"))
    )


@pytest.mark.parametrize("kind", ["create", "write_bytes", "sync", "sync_dir"])
def test_where_it_cannot_be_marked(kind: str) -> None:
    inner = MemoryBackend()
    store_with(inner)
    damage(inner, "model")
    backend = FaultBackend(inner)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    backend.fail_if(lambda found, path: found == kind and path.startswith(NEWEST))
    with warned("could not be marked", "a later process will try it again"):
        found = optimizer.restore()
    assert backend.num_failed == 1
    assert found is not None
    assert found.step == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # after a failed sync nothing is reused, and it says so
        goes_on_from(found, model, optimizer, 1)
        optimizer.close()
    with open_checkpoint(STORE, backend=inner) as newest:
        assert newest.step == 3


@pytest.mark.parametrize("kind", ["sync", "sync_dir"])
def test_after_a_mark_that_could_not_be_made_durable_nothing_is_reused(kind: str) -> None:
    inner = MemoryBackend()
    store_with(inner)
    damage(inner, "model")
    backend = FaultBackend(inner)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    backend.fail_if(lambda found, path: found == kind and path.startswith(NEWEST))
    with warned("could not be marked"):
        optimizer.restore()
    with warned("this process reuses no slot any more"):
        train(model, optimizer, 2)
    optimizer.close()


def test_the_mark_is_durable_when_restore_returns() -> None:
    backend = CrashBackend()
    store_with(backend)
    damage(backend, "model")
    optimizer = optimizer_for(Model(), STORE, options(backend))
    with warned("is quarantined"):
        optimizer.restore()
    disk = Disk(backend.log)
    rng = random.Random(SEED)
    for _ in range(40):
        reason = read_quarantine(disk.power_cut(rng).backend(), NEWEST)
        assert reason is not None, "a later process would try it again"
        assert f"{NEWEST}/model.safetensors" in reason
    optimizer.close()


def test_a_mark_that_another_process_has_just_made_is_made_durable() -> None:
    """It may have been killed before it has synced the directory."""
    backend = CrashBackend()
    store_with(backend)
    mark = backend.create(f"{NEWEST}/{QUARANTINE_NAME}", 1)
    mark.sync()
    mark.close()
    write_quarantine(backend, NEWEST, "damaged", Poison(STORE))
    disk = Disk(backend.log)
    rng = random.Random(SEED)
    for _ in range(40):
        assert read_quarantine(disk.power_cut(rng).backend(), NEWEST) is not None


@pytest.mark.parametrize("directories", [1, 2])
def test_its_files_stay_as_they_are(directories: int) -> None:
    """Somebody may want to look at it: it is written to no more, nor is what it has elsewhere."""
    backend = MemoryBackend()
    where = [STORE, OTHER][:directories]
    store_with(backend, where)
    damage(backend, "exp_avg")
    paths = [NEWEST]
    if directories == 2:
        with open_checkpoint(NEWEST, backend=backend) as found:
            paths += found.parts
    model = Model()
    optimizer = optimizer_for(model, where, options(backend), keep=2)
    assert optimizer.restore().step == 2
    before = contents(backend, paths)
    with pytest.raises(DamagedError):
        train(model, optimizer, 3)
    with warned("not using", NEWEST):
        optimizer.restore()
    train(model, optimizer, 2)
    for step in (3, 4, 5, 6):
        train(model, optimizer, step)
        optimizer.checkpoint({"step": step}).result()
    after = contents(backend, paths)
    assert after.pop(f"{NEWEST}/{QUARANTINE_NAME}")
    assert after == before
    optimizer.close()


def contents(backend: Backend, directories: list[str]) -> dict[str, bytes]:
    """Return the files in some directories, by path."""
    found = {}
    for path in (f"{d}/{name}" for d in directories for name in backend.list_dir(d)):
        file = backend.open(path)
        found[path] = file.read_bytes(0, file.size_bytes)
        file.close()
    return found


def test_a_mark_made_beside_the_training_does_not_outlive_its_checkpoint() -> None:
    """`offload verify --quarantine` marks one that this process then takes back and rewrites."""
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    for step in (1, 2, 3, 4):
        train(model, optimizer, step)
        sealed = optimizer.checkpoint({"step": step}).result()
        with open_checkpoint(STORE, backend=backend) as newest:
            assert newest.step == step
        write_quarantine(backend, sealed.path, "damaged", Poison(STORE))
    optimizer.close()


@pytest.mark.parametrize("name", ["model", "exp_avg"])
def test_power_lost_while_it_is_quarantined(name: str) -> None:
    backend = CrashBackend()
    store_with(backend, keep=3)
    damage(backend, name)
    before = len(backend.log)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = optimizer.restore()
        if name == "exp_avg":
            with pytest.raises(DamagedError):
                train(model, optimizer, 3)
            found = optimizer.restore()
    after = len(backend.log)
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()

    rng = random.Random(SEED)
    disk = Disk()
    tried = 0
    for number, operation in enumerate(backend.log[:after], 1):
        disk.apply(operation)
        if number < before:
            continue
        for _ in range(4):
            survivor = disk.power_cut(rng).backend()
            model = Model()
            optimizer = optimizer_for(model, STORE, options(survivor), keep=3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = optimizer.restore()
                if found is not None and found.step == 2:
                    assert name == "exp_avg", "damaged parameters must not be restored"
                    with pytest.raises(DamagedError):
                        train(model, optimizer, 3)
                    found = optimizer.restore()
                goes_on_from(found, model, optimizer, 1)
                optimizer.close()
            tried += 1
    print(f"{tried} crash states, seed {SEED}")
    assert tried > 20


class TestVerifyAlways:
    @pytest.mark.parametrize("name", STATE)
    def test_finds_damage_in_the_state_in_training(self, name: str) -> None:
        backend = FlippingBackend(MemoryBackend())
        model = Model()
        optimizer = optimizer_for(model, STORE, options(backend, verify="always"))
        train(model, optimizer, 1)
        optimizer.checkpoint({"step": 1}).result()
        train(model, optimizer, 2)
        backend.flips = f"/{name}.safetensors"
        train(model, optimizer, 3)  # reads ahead for the next one
        backend.flips = ""
        with pytest.raises(DamagedError) as error:
            train(model, optimizer, 4)
        assert f"/.slot-1/{name}.safetensors: bytes " in str(error.value)
        assert "call restore() to go on from /run/step-00000001" in str(error.value)
        found = optimizer.restore()
        assert backend.stat(f"{STORE}/step-00000001/{QUARANTINE_NAME}") is None
        goes_on_from(found, model, optimizer, 1)
        optimizer.close()

    @pytest.mark.parametrize("changes", [{}, {"host_memory": 40_000}, {"overlap": "forward"}])
    def test_gives_the_same_bits(self, changes: dict[str, object]) -> None:
        backend = MemoryBackend()
        model = Model()
        with optimizer_for(model, STORE, options(backend, verify="always", **changes)) as optimizer:
            for step in (1, 2, 3, 4):
                train(model, optimizer, step)
                if step == 2:
                    optimizer.checkpoint({"step": 2})
            sealed = optimizer.checkpoint({"step": 4}).result()
            assert differences(sealed, backend, Reference().after(4)) == []
