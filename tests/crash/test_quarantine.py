"""A checkpoint found damaged is marked on the drive, and the one before it takes its place."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gds import Backend, MemoryBackend, WrapperBackend
from gds.contract import File
from offload import AdamW, Checkpoint, list_checkpoints, load_parameters, open_checkpoint
from offload.checkpoint.quarantine_mark import read_quarantine
from offload.errors import BrokenOptimizerError, CheckpointError, DamagedError
from offload.format.names import QUARANTINE_NAME
from offload.store.poison import Poison
from offload.store.quarantine import remove_quarantine, verify_and_mark, write_quarantine
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.flipping import FlippingBackend
from tests.stores.files import flip, read
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    same_bits,
    take_step,
    train,
)

STORE = "/run"
OTHER = "/other"
NEWEST = f"{STORE}/step-00000002"
SEED = 20261121

STATE = ["master", "exp_avg", "exp_avg_sq"]
READ_AT_ONCE = ["model", "train_state"]


def damage(backend: Backend, name: str, checkpoint: str = NEWEST) -> str:
    path = f"{checkpoint}/{name}.safetensors"
    flip(backend, path, 40 if name == "train_state" else -9)
    return path


def train_through(model: Model, optimizer: AdamW, step: int) -> None:
    """Take a step, and wait for it where it runs beside the model."""
    take_step(model, optimizer, step)
    optimizer.synchronize()


def store_with(backend: Backend, directory: str | list[str] = STORE, keep: int = 2) -> None:
    """Make checkpoints of steps 1 and 2."""
    model = Model()
    with optimizer_for(model, directory, options(backend), keep=keep) as optimizer:
        train(model, optimizer, 1, 2)


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
        take_step(model, optimizer, number)
        sealed = optimizer.checkpoint({"step": number}).result()
        assert differences(sealed, sealed.backend, reference.after(number)) == []


@pytest.mark.parametrize("name", READ_AT_ONCE)
def test_restore_takes_the_one_before(name: str) -> None:
    backend = MemoryBackend()
    store_with(backend)
    path = damage(backend, name)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    with warned(path, "damaged", "is quarantined", "continuing from", "step-00000001"):
        found = optimizer.restore()
    assert backend.stat(f"{NEWEST}/{QUARANTINE_NAME}") is not None
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


def test_warnings_of_restore_point_at_the_line_that_called_it() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "model")
    for message in ("is quarantined", "not using"):  # the first restore marks it
        optimizer = optimizer_for(Model(), STORE, options(backend))
        with pytest.warns(RuntimeWarning, match=message) as caught:
            optimizer.restore()
        assert {warning.filename for warning in caught} == {__file__}
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
    assert "call restore() to continue from /run/step-00000001" in str(error.value)
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
            take_step(model, optimizer, 3)
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
    store_with(backend, keep=1)
    damage(backend, "model")
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    with pytest.raises(DamagedError) as error:
        optimizer.restore()
    assert f"{NEWEST}/model.safetensors" in str(error.value)
    assert "no usable checkpoint left" in str(error.value)
    assert "fresh=True" in str(error.value)
    with pytest.raises(BrokenOptimizerError):
        take_step(model, optimizer, 3)
    with warned("not using", NEWEST), pytest.raises(CheckpointError, match="none of its"):
        optimizer.restore()
    optimizer.close()


def verified_by_a_person(backend: Backend) -> dict[int, bool]:
    """Read all checkpoints with `mark`, as `offload verify --quarantine`; say which are whole."""
    found = {}
    for name in (n for n in backend.list_dir(STORE) if n.startswith("step-")):
        with open_checkpoint(f"{STORE}/{name}", even_quarantined=True, backend=backend) as opened:
            found[opened.step] = verify_and_mark(opened).ok
    return found


def until_it_fails(model: Model, optimizer: AdamW) -> None:
    """Do what a program does that calls `restore` whenever it is told to."""
    for _ in range(2):
        found = optimizer.restore()
        try:
            take_step(model, optimizer, found.step + 1)
        except DamagedError as error:
            if "call restore()" not in str(error):
                raise


@pytest.mark.parametrize("name", ["model", "train_state", "exp_avg"])
def test_a_second_one_in_a_row_is_not_marked_before_a_person_has_looked(name: str) -> None:
    """Or a machine with bad memory would give up one healthy checkpoint after the other."""
    backend = MemoryBackend()
    model = Model()
    with optimizer_for(model, STORE, options(backend), keep=4) as optimizer:
        train(model, optimizer, 1, 2, 3, 4)
    bad = FlippingBackend(backend)
    bad.flips = f"/{name}.safetensors"
    bad.ways = ("read_bytes" if name == "train_state" else "read", "read_again")
    for _ in range(3):  # whoever starts the program again and again changes nothing
        model = Model()
        optimizer = optimizer_for(model, STORE, options(bad), keep=4)
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(DamagedError) as error:
                    until_it_fails(model, optimizer)
        optimizer.close()
    assert f"{STORE}/step-00000003/{name}.safetensors" in str(error.value)
    assert "not quarantined and not passed over" in str(error.value)
    assert f"offload verify {STORE} --quarantine" in str(error.value)
    assert [info.valid for info in list_checkpoints(STORE, backend=backend)] == [
        *[True] * 3,
        False,
    ], "one is marked, and no other"

    # On another machine, or with other memory, all of them are whole, and none is lost.
    assert verified_by_a_person(backend) == {1: True, 2: True, 3: True, 4: True}
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=4)
    goes_on_from(optimizer.restore(), model, optimizer, 4)
    optimizer.close()


def test_what_a_person_has_marked_is_passed_over() -> None:
    """Two are damaged indeed; then training goes on from the third."""
    backend = MemoryBackend()
    model = Model()
    with optimizer_for(model, STORE, options(backend), keep=3) as optimizer:
        train(model, optimizer, 1, 2, 3)
    for step in (2, 3):
        damage(backend, "model", f"{STORE}/step-0000000{step}")
    optimizer = optimizer_for(Model(), STORE, options(backend), keep=3)
    with warned("continuing from", "step-00000002"), pytest.raises(DamagedError, match="two in a"):
        optimizer.restore()
    optimizer.close()
    assert verified_by_a_person(backend) == {1: True, 2: False, 3: False}
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 1)
    # One that is damaged later is given up again: those before it are no longer newer.
    damage(backend, "model", f"{STORE}/step-00000003")
    optimizer.close()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=3)
    with warned("continuing from", "step-00000002"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 2)
    optimizer.close()


class TestLifting:
    def test_the_mark_of_a_whole_checkpoint_is_lifted_and_training_takes_it_again(self) -> None:
        backend = MemoryBackend()
        store_with(backend, [STORE, OTHER])
        write_quarantine(backend, NEWEST, "somebody thought so", Poison(STORE))
        with open_checkpoint(
            NEWEST, parts=[OTHER], even_quarantined=True, backend=backend
        ) as opened:
            assert opened.quarantined == "somebody thought so"
            report = opened.verify()
            assert report.ok
            assert report.quarantined == "somebody thought so", "a look changes nothing"
            report = verify_and_mark(opened)
            assert (report.ok, report.quarantined) == (True, "")
            assert opened.quarantined == ""
        model = Model()
        optimizer = optimizer_for(model, [STORE, OTHER], options(backend))
        goes_on_from(optimizer.restore(), model, optimizer, 2)
        optimizer.close()

    def test_the_mark_of_a_damaged_one_stays_and_says_why(self) -> None:
        backend = MemoryBackend()
        store_with(backend)
        path = damage(backend, "exp_avg")
        write_quarantine(backend, NEWEST, "somebody thought so", Poison(STORE))
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            report = verify_and_mark(opened)
        assert not report.ok
        assert path in report.problems[0]
        assert report.quarantined == "somebody thought so"

    def test_what_could_not_be_read_is_neither_marked_nor_lifted(self) -> None:
        inner = MemoryBackend()
        store_with(inner)
        backend = FaultBackend(inner)
        for marked in (False, True):
            if marked:
                write_quarantine(inner, NEWEST, "somebody thought so", Poison(STORE))
            with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
                backend.fail("read", 2, forever=False)
                report = verify_and_mark(opened)
            assert report.problems == ()
            assert "injected failure of read" in report.unreadable[0]
            assert not report.ok
            assert bool(report.quarantined) is marked

    def test_a_lifted_mark_does_not_come_back_after_a_loss_of_power(self) -> None:
        backend = CrashBackend()
        store_with(backend)
        write_quarantine(backend, NEWEST, "somebody thought so", Poison(STORE))
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            verify_and_mark(opened)
        disk = Disk(backend.log)
        rng = random.Random(SEED)
        for _ in range(40):
            assert read_quarantine(disk.power_cut(rng).backend(), NEWEST) is None

    def test_a_mark_of_a_damaged_checkpoint_is_durable(self) -> None:
        backend = CrashBackend()
        store_with(backend)
        damage(backend, "master")
        with open_checkpoint(NEWEST, backend=backend) as opened:
            assert verify_and_mark(opened).quarantined
        disk = Disk(backend.log)
        rng = random.Random(SEED)
        for _ in range(40):
            assert "master" in (read_quarantine(disk.power_cut(rng).backend(), NEWEST) or "")

    @pytest.mark.parametrize("kind", ["remove", "sync_dir"])
    def test_a_mark_that_cannot_be_lifted_is_an_error(self, kind: str) -> None:
        inner = MemoryBackend()
        store_with(inner)
        write_quarantine(inner, NEWEST, "somebody thought so", Poison(STORE))
        backend = FaultBackend(inner)
        with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as opened:
            backend.fail_if(lambda found, _: found == kind)
            with pytest.raises(OSError, match=f"injected failure of {kind}"):
                verify_and_mark(opened)

    def test_two_processes_that_mark_or_lift_at_once_are_both_right(self) -> None:
        class Quicker(WrapperBackend):
            """Another process does the same just before."""

            def create(self, path: str, size_bytes: int) -> File:
                write_quarantine(self.inner, NEWEST, "the other", Poison(STORE))
                return super().create(path, size_bytes)

            def remove(self, path: str) -> None:
                super().remove(path)
                super().remove(path)

        backend = MemoryBackend()
        store_with(backend)
        write_quarantine(Quicker(backend), NEWEST, "mine", Poison(STORE))
        assert read_quarantine(backend, NEWEST) == "the other"
        remove_quarantine(Quicker(backend), NEWEST)
        assert read_quarantine(backend, NEWEST) is None


def test_one_that_was_asked_for_is_not_replaced_by_another() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "model", f"{STORE}/step-00000001")
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    with pytest.raises(DamagedError, match=r"call restore\(\) to continue from .*step-00000002"):
        optimizer.restore(1, discard_newer=True)
    with warned("not using", "step-00000001"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 2)
    optimizer.close()


def test_one_that_this_process_wrote_is_checked_when_it_goes_back_to_it() -> None:
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    train(model, optimizer, 1, 2)
    take_step(model, optimizer, 3)
    damage(backend, "exp_avg")
    optimizer.restore()
    with pytest.raises(DamagedError, match="exp_avg"):
        take_step(model, optimizer, 3)
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
        take_step(model, optimizer, 2)
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
        take_step(model, optimizer, 3)
    with warned("not using", NEWEST):
        optimizer.restore()
    take_step(model, optimizer, 2)
    train(model, optimizer, 3, 4, 5, 6)
    after = contents(backend, paths)
    assert after.pop(f"{NEWEST}/{QUARANTINE_NAME}")
    assert after == before
    optimizer.close()


def contents(backend: Backend, directories: list[str]) -> dict[str, bytes]:
    """Return the files in some directories, by path."""
    paths = [f"{d}/{name}" for d in directories for name in backend.list_dir(d)]
    return {path: read(backend, path) for path in paths}


def test_a_mark_made_beside_the_training_does_not_outlive_its_checkpoint() -> None:
    """`offload verify --quarantine` marks what ``fresh=True`` then takes back and rewrites."""
    backend = MemoryBackend()
    store_with(backend)
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=1, fresh=True)
    for step in (1, 2):
        write_quarantine(backend, f"{STORE}/step-{step:08d}", "damaged", Poison(STORE))
    for step in (1, 2, 3, 4):
        take_step(model, optimizer, step)
        optimizer.checkpoint({"step": step}).result()
        with open_checkpoint(STORE, backend=backend) as newest:
            assert newest.step == step
    optimizer.close()


@pytest.mark.parametrize("directories", [1, 2])
def test_what_was_marked_before_training_starts_over_stays(directories: int) -> None:
    """For somebody to look at, or to repair: ``fresh=True`` takes back what can be restored."""
    backend = MemoryBackend()
    where = [STORE, OTHER][:directories]
    store_with(backend, where)
    damage(backend, "model")
    write_quarantine(backend, NEWEST, "damaged", Poison(STORE))
    with open_checkpoint(NEWEST, even_quarantined=True, backend=backend) as marked:
        parts = list(marked.parts)
    before = contents(backend, [NEWEST, *parts])
    model = Model()
    with optimizer_for(model, where, options(backend), keep=1, fresh=True) as optimizer:
        for step in (1, 2, 3, 4):
            take_step(model, optimizer, step)
            if step != 2:  # which would take its place
                optimizer.checkpoint({"step": step}).result()
    assert contents(backend, [NEWEST, *parts]) == before
    names = [name for name in backend.list_dir(STORE) if name.startswith("step-")]
    assert names == ["step-00000002", "step-00000004"]


def test_what_is_marked_beside_the_training_is_left_alone() -> None:
    """For somebody to look at, as what `restore` has marked; each has a part of the space."""
    backend = MemoryBackend()
    model = Model()
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    for step in (1, 2, 3, 4):
        take_step(model, optimizer, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sealed = optimizer.checkpoint({"step": step}).result()
        with open_checkpoint(STORE, backend=backend) as newest:
            assert newest.step == step
        if step in (2, 3):
            write_quarantine(backend, sealed.path, "damaged", Poison(STORE))
    optimizer.close()
    names = [name for name in backend.list_dir(STORE) if name.startswith("step-")]
    assert names == ["step-00000002", "step-00000003", "step-00000004"]


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
                take_step(model, optimizer, 3)
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
                        take_step(model, optimizer, 3)
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
        take_step(model, optimizer, 1)
        optimizer.checkpoint({"step": 1}).result()
        take_step(model, optimizer, 2)
        backend.flips, backend.ways = f"/{name}.safetensors", ("read", "read_again")
        take_step(model, optimizer, 3)  # reads ahead for the next one
        with pytest.raises(DamagedError) as error:
            take_step(model, optimizer, 4)
        assert f"/.slot-1/{name}.safetensors: bytes " in str(error.value)
        assert "call restore() to continue from /run/step-00000001" in str(error.value)
        backend.flips = ""
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
                take_step(model, optimizer, step)
                if step == 2:
                    optimizer.checkpoint({"step": 2})
            sealed = optimizer.checkpoint({"step": 4}).result()
            assert differences(sealed, backend, Reference().after(4)) == []
