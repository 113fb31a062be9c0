"""`restore(verify=True)`: the state is read and checked before anything is trained on it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gds import MemoryBackend
from offload import AdamW, DamagedError
from tests.crash.damaging import (
    BOTH,
    NEWEST,
    STORE,
    damage,
    goes_on_from,
    part_of,
    reason,
    store_with,
    warned,
)
from tests.stores.training import Model, optimizer_for, options, take_step, train


def restoring(backend: Any, directory: Any = STORE, **changes: Any) -> tuple[Model, AdamW]:
    model = Model()
    return model, optimizer_for(model, directory, options(backend, **changes))


@pytest.mark.parametrize(
    ("name", "how", "overlap", "drives"),
    [
        ("master", "argument", None, 1),
        ("exp_avg", "setting", "forward", 1),
        ("exp_avg", "argument", None, 2),
        ("exp_avg_sq", "argument", "forward", 2),
    ],
)
def test_damaged_state_is_passed_over_by_itself(
    name: str, how: str, overlap: str | None, drives: int
) -> None:
    backend, where = MemoryBackend(), BOTH[:drives]
    store_with(backend, where)
    path = damage(backend, name, part_of(backend) if drives == 2 else NEWEST)
    changes = {"verify": "at_restore"} if how == "setting" else {}
    model, optimizer = restoring(backend, where, overlap=overlap, **changes)
    with warned(path, "damaged", "is quarantined", "continuing from", "step-00000001"):
        found = optimizer.restore(verify=None if changes else True)
    assert path in reason(backend)
    goes_on_from(found, model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize("changes", [{}, {"host_memory": "1GiB"}, {"overlap": "forward"}])
def test_the_bits_are_the_same_and_the_log_says_what_was_read(
    changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend()
    store_with(backend, BOTH)
    model, optimizer = restoring(backend, BOTH, **changes)
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


def test_the_argument_comes_before_the_setting() -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "exp_avg")
    model, optimizer = restoring(backend, verify="at_restore")
    assert optimizer.restore(verify=False).step == 2
    with pytest.raises(DamagedError):
        take_step(model, optimizer, 3)
    optimizer.close()


@pytest.mark.parametrize(("asked", "other"), [(2, 1), (1, 2)])
def test_one_that_was_asked_for_is_not_replaced_and_costs_no_other(asked: int, other: int) -> None:
    backend = MemoryBackend()
    store_with(backend)
    damage(backend, "exp_avg", f"{STORE}/step-0000000{asked}")
    model, optimizer = restoring(backend)
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
    model, optimizer = restoring(backend, verify="at_restore")
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
