"""`restore(verify=True)`: the state is read and checked before anything is trained on it."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from gds import MemoryBackend
from offload import AdamW
from offload.checkpoint.quarantine_mark import read_quarantine
from offload.errors import DamagedError
from offload.stream.frame import HostFrames
from tests.crash.flipping import FlippingBackend
from tests.crash.test_quarantine import (
    NEWEST,
    OTHER,
    STATE,
    STORE,
    damage,
    goes_on_from,
    store_with,
    warned,
)
from tests.stores.training import Model, optimizer_for, options, take_step, train

HOW = ["argument", "setting"]


def restoring(
    how: str, backend: Any, directory: Any = STORE, **changes: Any
) -> tuple[Model, AdamW]:
    model = Model()
    if how == "setting":
        changes["verify"] = "at_restore"
    return model, optimizer_for(model, directory, options(backend, **changes))


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", STATE)
def test_damaged_state_is_passed_over_by_itself(name: str, how: str, overlap: str | None) -> None:
    backend = MemoryBackend()
    store_with(backend)
    path = damage(backend, name)
    model, optimizer = restoring(how, backend, overlap=overlap)
    with warned(path, "damaged", "is quarantined", "continuing from", "step-00000001"):
        found = optimizer.restore(verify=True if how == "argument" else None)
    assert path in str(read_quarantine(backend, NEWEST))
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


def test_state_on_another_drive_is_checked_too() -> None:
    backend = MemoryBackend()
    store_with(backend, [STORE, OTHER])
    (part,) = [name for name in backend.list_dir(OTHER) if name.endswith("2")]
    damage(backend, "exp_avg", f"{OTHER}/{part}")
    model, optimizer = restoring("argument", backend, [STORE, OTHER])
    with warned("continuing from", "step-00000001"):
        found = optimizer.restore(verify=True)
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("changes", [{}, {"host_memory": 40_000}, {"overlap": "forward"}])
def test_the_bits_are_the_same_and_the_first_step_does_not_check_again(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend()
    store_with(backend, [STORE, OTHER])
    model, optimizer = restoring("argument", backend, [STORE, OTHER], **changes)
    checks = []
    original = HostFrames.digests
    monkeypatch.setattr(
        HostFrames,
        "digests",
        lambda self, arrays: (
            checks.append(list(arrays)) if len(arrays) == 1 else None,
            original(self, arrays),
        )[1],
    )
    with caplog.at_level(logging.INFO, "offload"):
        found = optimizer.restore(verify=True)
    state_bytes = optimizer.stats().state_bytes
    assert len(checks) >= 3, "of each array of each chunk"
    assert f"all {state_bytes / (1 << 20):.1f} MiB of state are as they were written" in caplog.text
    assert optimizer.stats().restore_bytes > state_bytes
    assert optimizer.stats().wait_read_s == 0, "no part of a step"
    checks.clear()
    take_step(model, optimizer, 3)
    optimizer.synchronize()
    assert checks == []
    optimizer.restore()  # and once more, without
    take_step(model, optimizer, 3)
    optimizer.synchronize()
    assert len(checks) >= 3
    optimizer.checkpoint({"step": 3}).result()
    assert found.step == 2
    goes_on_from(optimizer.restore(), model, optimizer, 3)
    optimizer.close()


def test_state_that_stays_in_memory_is_read_once() -> None:
    backend = MemoryBackend()
    store_with(backend)
    model, optimizer = restoring("argument", backend, host_memory="1GiB")
    optimizer.restore(verify=True)
    before = backend.counters().bytes_read
    take_step(model, optimizer, 3)
    assert backend.counters().bytes_read == before
    optimizer.close()


def test_the_argument_comes_before_the_setting() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "exp_avg")
    model, optimizer = restoring("setting", backend)
    assert optimizer.restore(verify=False).step == 2
    with pytest.raises(DamagedError):
        take_step(model, optimizer, 3)
    optimizer.close()


def test_one_that_was_asked_for_is_not_replaced_by_another() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "exp_avg")
    model, optimizer = restoring("argument", backend)
    with pytest.raises(
        DamagedError, match=r"exp_avg.*call restore\(\) to continue from .*-00000001"
    ):
        optimizer.restore(2, verify=True)
    with warned("not using", NEWEST):
        found = optimizer.restore(verify=True)
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


def test_an_older_one_that_is_damaged_does_not_cost_the_newer_ones() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "exp_avg", f"{STORE}/step-00000001")
    model, optimizer = restoring("argument", backend)
    with pytest.raises(DamagedError):
        optimizer.restore(1, discard_newer=True, verify=True)
    with warned("not using", "step-00000001"):
        found = optimizer.restore(verify=True)
    goes_on_from(found, model, optimizer, 2)
    optimizer.close()


def test_a_second_one_in_a_row_is_not_passed_over() -> None:
    backend = MemoryBackend()
    store_with(backend)
    for step in (1, 2):
        damage(backend, "exp_avg", f"{STORE}/step-0000000{step}")
    _, optimizer = restoring("argument", backend)
    with warned("continuing from"), pytest.raises(DamagedError, match="two in a row"):
        optimizer.restore(verify=True)
    assert read_quarantine(backend, f"{STORE}/step-00000001") is None
    optimizer.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_reference_is_checked_where_it_is_loaded(damaged: bool) -> None:
    """As the Trainer and Lightning do it, who do not call restore() themselves."""
    backend = MemoryBackend()
    model = Model()
    with optimizer_for(model, STORE, options(backend)) as optimizer:
        train(model, optimizer, 1, 2)
        reference, weights = optimizer.state_dict(), dict(model.state_dict())
        weights = {name: value.clone() for name, value in weights.items()}
    if damaged:
        damage(backend, "exp_avg_sq")
    model, optimizer = restoring("setting", backend)
    model.load_state_dict(weights)
    if damaged:
        with pytest.raises(DamagedError, match=r"exp_avg_sq.*step-00000001"):
            optimizer.load_state_dict(reference)
        assert "exp_avg_sq" in str(read_quarantine(backend, NEWEST))
    else:
        optimizer.load_state_dict(reference)
        take_step(model, optimizer, 3)
        optimizer.checkpoint({"step": 3}).result()
        goes_on_from(optimizer.restore(), model, optimizer, 3)
    optimizer.close()


def test_one_wrong_read_does_not_count_here_either() -> None:
    inner = MemoryBackend()
    store_with(inner)
    backend = FlippingBackend(inner)
    model, optimizer = restoring("argument", backend)
    names = random.Random(1).sample(STATE, 2)
    for name in names:
        backend.flips, backend.left = f"/{name}.safetensors", 1
        goes_on_from_here = optimizer.restore(verify=True)
        assert goes_on_from_here.step == 2
    assert backend.num_flipped == {"read": 2}
    goes_on_from(goes_on_from_here, model, optimizer, 2)
    optimizer.close()
