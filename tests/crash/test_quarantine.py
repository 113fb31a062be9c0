"""A checkpoint found damaged is marked on the drive, and the one before it takes its place."""

from __future__ import annotations

import logging
import random

import pytest

from gds import Backend, MemoryBackend
from offload import (
    AdamW,
    BrokenOptimizerError,
    DamagedError,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
    verify_and_mark,
)
from tests.campaigns import FULL
from tests.crash.crash_backend import CrashBackend, moments
from tests.crash.damaging import (
    BOTH,
    MARK,
    NEWEST,
    READ_AT_ONCE,
    SEED,
    STATE,
    STORE,
    after_power_cuts,
    damage,
    goes_on_from,
    mark,
    part_of,
    reason,
    store_with,
    train_through,
    unheeded,
    warned,
)
from tests.crash.fault_backend import FaultBackend, Kind
from tests.crash.flipping import FlippingBackend
from tests.crash.meanwhile import Looking
from tests.stores.training import (
    Model,
    optimizer_for,
    options,
    take_step,
    train,
)


def reopened(
    backend: Backend, directory: str | list[str] = STORE, **changes: object
) -> tuple[Model, AdamW]:
    """Return the model and the optimizer of a new process."""
    keep, model = changes.pop("keep", 2), Model()
    return model, optimizer_for(model, directory, options(backend, **changes), keep=keep)


@pytest.mark.parametrize(
    ("name", "overlap", "drives"),
    [
        ("model", None, 1),
        ("train_state", None, 1),
        ("master", None, 2),
        ("exp_avg", "forward", 2),
        ("exp_avg_sq", None, 1),
    ],
)
def test_the_one_before_takes_its_place_and_nobody_tries_it_again(
    name: str, overlap: str | None, drives: int
) -> None:
    """Not even when the damage is gone: what reads differently each time is not to be trusted."""
    backend, where = MemoryBackend(), BOTH[:drives]
    store_with(backend, where)
    place = part_of(backend) if name == "exp_avg" else NEWEST
    path = damage(backend, name, place)
    model, optimizer = reopened(backend, where, overlap=overlap)
    if name in READ_AT_ONCE:
        with warned(path, "damaged", "is quarantined", "continuing from", "step-00000001"):
            found = optimizer.restore()
    else:
        assert optimizer.restore().step == 2
        with pytest.raises(DamagedError) as error:
            train_through(model, optimizer, 3)
        assert f"{path}: bytes " in str(error.value)
        assert "call restore() to continue from /run/step-00000001" in str(error.value)
        with pytest.raises(BrokenOptimizerError, match="step-00000001"):
            optimizer.checkpoint()
        with warned("not using", NEWEST, "damaged"):
            found = optimizer.restore()
    assert found.step == 1
    optimizer.close()
    damage(backend, name, place)  # the same bit: it is whole again

    with pytest.raises(DamagedError, match=r"quarantined.*damaged.txt.*offload verify"):
        open_checkpoint(NEWEST, backend=backend)
    with pytest.raises(DamagedError, match="quarantined"):
        load_parameters(model, NEWEST, backend=backend)
    with warned("not using", NEWEST), open_checkpoint(STORE, backend=backend) as older:
        assert older.step == 1
    listed = {info.step: info for info in list_checkpoints(STORE, backend=backend)}
    assert not listed[2].valid
    assert f"{name}.safetensors" in listed[2].reason
    model, optimizer = reopened(backend, where)
    with warned("not using", NEWEST, "quarantined"):
        found = optimizer.restore()
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


def test_warnings_of_restore_point_at_the_line_that_called_it() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "model")
    for message in ("is quarantined", "not using"):  # the first restore marks it
        _, optimizer = reopened(backend)
        with pytest.warns(RuntimeWarning, match=message) as caught:
            optimizer.restore()
        assert {warning.filename for warning in caught} == {__file__}
        optimizer.close()


def verified_by_a_person(backend: Backend) -> dict[int, bool]:
    """Read all checkpoints as `offload verify --quarantine` does; say which are whole."""
    found = {}
    for name in (n for n in backend.list_dir(STORE) if n.startswith("step-")):
        with open_checkpoint(f"{STORE}/{name}", even_quarantined=True, backend=backend) as opened:
            found[opened.step] = verify_and_mark(opened).ok
    return found


def restored_whenever_told_to(model: Model, optimizer: AdamW) -> None:
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
    backend, model = MemoryBackend(), Model()
    with optimizer_for(model, STORE, options(backend), keep=4) as optimizer:
        train(model, optimizer, 1, 2, 3, 4)
    bad = FlippingBackend(backend)
    bad.flips = f"/{name}.safetensors"
    bad.ways = ("read_bytes" if name == "train_state" else "read", "read_again")
    for _ in range(2):  # whoever starts the program again and again changes nothing
        model, optimizer = reopened(bad, keep=4)
        for _ in range(2):
            with unheeded(), pytest.raises(DamagedError) as error:
                restored_whenever_told_to(model, optimizer)
        optimizer.close()
    assert f"{STORE}/step-00000003/{name}.safetensors" in str(error.value)
    assert "not quarantined and not passed over" in str(error.value)
    assert f"offload verify {STORE} --quarantine" in str(error.value)
    valid = [info.valid for info in list_checkpoints(STORE, backend=backend)]
    assert valid == [True, True, True, False], "one is marked, and no other"

    # On another machine, or with other memory, all of them are whole, and none is lost.
    assert verified_by_a_person(backend) == {1: True, 2: True, 3: True, 4: True}
    model, optimizer = reopened(backend, keep=4)
    goes_on_from(optimizer.restore(), model, optimizer, 4)
    optimizer.close()


def test_what_a_person_has_marked_is_passed_over() -> None:
    """Two are damaged indeed; then training goes on from the third."""
    backend, model = MemoryBackend(), Model()
    with optimizer_for(model, STORE, options(backend), keep=3) as optimizer:
        train(model, optimizer, 1, 2, 3)
    for step in (2, 3):
        damage(backend, "model", f"{STORE}/step-0000000{step}")
    _, optimizer = reopened(backend, keep=3)
    with warned("continuing from", "step-00000002"), pytest.raises(DamagedError, match="two in a"):
        optimizer.restore()
    optimizer.close()
    assert verified_by_a_person(backend) == {1: True, 2: False, 3: False}
    for newest in (1, 2):  # one that is damaged later is given up again: none before it is newer
        model, optimizer = reopened(backend, keep=3)
        with unheeded():
            found = optimizer.restore()
        goes_on_from(found, model, optimizer, newest)
        damage(backend, "model", f"{STORE}/step-0000000{newest + 2}")
        optimizer.close()


def test_two_processes_may_mark_one_at_once() -> None:
    class Marked(Looking):
        def look(self, moment: str, path: str) -> None:
            if (moment, path) == ("before create", f"{NEWEST}/{MARK}"):
                mark(self.inner)

    store_with(inner := MemoryBackend())
    damage(inner, "model")
    model, optimizer = reopened(Marked(inner))
    with pytest.warns(RuntimeWarning, match=r"model\.safetensors") as said:
        found = optimizer.restore()
    assert not any("could not be marked" in str(warning.message) for warning in said)
    assert reason(inner) == "somebody thought so"
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("kind", ["create", "write_bytes", "sync", "sync_dir"])
def test_where_it_cannot_be_marked(kind: Kind) -> None:
    inner = MemoryBackend()
    store_with(inner)
    damage(inner, "model")
    backend = FaultBackend(inner)
    model, optimizer = reopened(backend)
    backend.fail_if(lambda found, path: found == kind and path.startswith(NEWEST))
    with warned("could not be marked", "a later process will try it again"):
        found = optimizer.restore()
    assert backend.num_failed == 1
    if kind.startswith("sync"):
        with warned("this process reuses no slot any more"):
            take_step(model, optimizer, 2)
        optimizer.checkpoint().result()
    else:
        goes_on_from(found, model, optimizer, 1)
    optimizer.close()
    assert list_checkpoints(STORE, backend=inner)[-1].valid


@pytest.mark.parametrize("name", ["model", "exp_avg"])
def test_power_lost_while_it_is_quarantined(name: str) -> None:
    backend = CrashBackend()
    store_with(backend, keep=3)
    damage(backend, name)
    before = len(backend.log)
    model, optimizer = reopened(backend, keep=3)
    with unheeded():
        found = optimizer.restore()
        if name == "exp_avg":
            with pytest.raises(DamagedError):
                take_step(model, optimizer, 3)
            found = optimizer.restore()
    for survivor in after_power_cuts(backend):
        assert f"{NEWEST}/{name}.safetensors" in reason(survivor), "it would be tried again"
    after = len(backend.log)
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()

    rng, tried = random.Random(SEED), 0
    for number, (disk, _, _) in enumerate(moments(backend.log[:after]), 1):
        for _ in range(0 if number < before else 4 if FULL else 1):
            survivor = disk.power_cut(rng).backend()
            model, optimizer = reopened(survivor, keep=3)
            with unheeded():
                found = optimizer.restore()
                if found is not None and found.step == 2:
                    assert name == "exp_avg", "damaged parameters must not be restored"
                    with pytest.raises(DamagedError):
                        take_step(model, optimizer, 3)
                    found = optimizer.restore()
                goes_on_from(found, model, optimizer, 1)
                optimizer.close()
            tried += 1
    assert tried > 4


class TestVerifyAlways:
    @pytest.mark.parametrize("name", STATE)
    def test_finds_damage_in_the_state_in_training(self, name: str) -> None:
        backend = FlippingBackend(MemoryBackend())
        model, optimizer = reopened(backend, verify="always")
        train(model, optimizer, 1)
        take_step(model, optimizer, 2)
        backend.flips, backend.ways = f"/{name}.safetensors", ("read", "read_again")
        take_step(model, optimizer, 3)  # reads ahead for the next one
        with pytest.raises(DamagedError) as error:
            take_step(model, optimizer, 4)
        assert f"/.slot-1/{name}.safetensors: bytes " in str(error.value)
        assert "call restore() to continue from /run/step-00000001" in str(error.value)
        backend.flips = ""
        found = optimizer.restore()
        assert reason(backend, f"{STORE}/step-00000001") == ""
        goes_on_from(found, model, optimizer, 1)
        optimizer.close()


@pytest.mark.parametrize(
    ("name", "how", "overlap", "drives"),
    [
        ("master", "argument", None, 1),
        ("exp_avg", "setting", "forward", 1),
        ("exp_avg", "argument", None, 2),
        ("exp_avg_sq", "argument", "forward", 2),
    ],
)
def test_a_restore_that_reads_the_state_passes_over_what_is_damaged(
    name: str, how: str, overlap: str | None, drives: int
) -> None:
    backend, where = MemoryBackend(), BOTH[:drives]
    store_with(backend, where)
    path = damage(backend, name, part_of(backend) if drives == 2 else NEWEST)
    changes = {"verify": "at_restore"} if how == "setting" else {}
    model, optimizer = reopened(backend, where, overlap=overlap, **changes)
    with warned(path, "damaged", "is quarantined", "continuing from", "step-00000001"):
        found = optimizer.restore(verify=None if changes else True)
    assert path in reason(backend)
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("changes", [{}, {"host_memory": "1GiB"}, {"overlap": "forward"}])
def test_a_restore_that_reads_the_state_gives_the_same_bits_and_logs_what_it_read(
    changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend()
    store_with(backend, BOTH)
    model, optimizer = reopened(backend, BOTH, **changes)
    with caplog.at_level(logging.INFO, "offload"):
        found = optimizer.restore(verify=True)
    state_bytes = optimizer.stats().state_bytes
    assert f"all {state_bytes / (1 << 20):.1f} MiB of state are as they were written" in caplog.text
    assert optimizer.stats().restore_bytes > state_bytes
    assert optimizer.stats().wait_read_s == 0, "no part of a step"
    if "host_memory" in changes:
        before = backend.counters().bytes_read
        take_step(model, optimizer, 3)
        assert backend.counters().bytes_read == before, "it is read once"
        found = optimizer.restore(verify=True)
    goes_on_from(found, model, optimizer, 2)
    optimizer.close()


@pytest.mark.parametrize(("asked", "other"), [(2, 1), (1, 2)])
def test_one_that_was_asked_for_is_not_replaced_and_costs_no_other(asked: int, other: int) -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "exp_avg", f"{STORE}/step-0000000{asked}")
    model, optimizer = reopened(backend)
    said = rf"exp_avg.*call restore\(\) to continue from .*-0000000{other}"
    with pytest.raises(DamagedError, match=said):
        optimizer.restore(asked, discard_newer=asked == 1, verify=True)
    with warned("not using", f"step-0000000{asked}"):
        found = optimizer.restore(verify=True)
    goes_on_from(found, model, optimizer, other)
    optimizer.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_reference_is_checked_where_it_is_loaded(damaged: bool) -> None:
    """As the Trainer and Lightning do it, who do not call restore() themselves."""
    backend = MemoryBackend()
    model = Model()
    with optimizer_for(model, STORE, options(backend)) as optimizer:
        train(model, optimizer, 1, 2)
        reference = optimizer.state_dict()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    if damaged:
        damage(backend, "exp_avg_sq")
    model, optimizer = reopened(backend, verify="at_restore")
    model.load_state_dict(weights)
    if damaged:
        with pytest.raises(DamagedError, match=r"exp_avg_sq.*step-00000001"):
            optimizer.load_state_dict(reference)
        assert "exp_avg_sq" in reason(backend)
    else:
        optimizer.load_state_dict(reference)
        train(model, optimizer, 3)
        goes_on_from(optimizer.restore(), model, optimizer, 3)
    optimizer.close()
