"""Recorded stores: what was written is read, and training goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch

import offload
from offload import export_checkpoint
from tests.format.recorded_stores import (
    CHECKPOINT_STEP,
    LAST_STEP,
    SETTINGS,
    SHAPES,
    Model,
    expected,
    optimizer_for,
    state_digests,
    stored_digests,
    tensor_digests,
    train,
    unpack,
)

pytestmark = pytest.mark.parametrize("name", SETTINGS)


@pytest.fixture
def store(name: str, tmp_path: Path) -> Path:
    return unpack(name, tmp_path)


def test_state_is_read_and_exported_as_it_was_written(name, store, tmp_path):
    with offload.open_checkpoint(store) as checkpoint:
        assert checkpoint.verify().ok
        assert stored_digests(checkpoint.path) == expected(name)["stored"]
        assert state_digests(checkpoint) == expected(name)["state"]
        export_checkpoint(checkpoint, tmp_path / "out", "safetensors")
    loaded = {
        array: safetensors.torch.load_file(tmp_path / "out" / f"{array}.safetensors")
        for array in ("master", "exp_avg", "exp_avg_sq")
    }
    for parameter in SHAPES:
        exported = {a: values[parameter] for a, values in loaded.items() if parameter in values}
        digests = dict(expected(name)["state"][parameter])
        if parameter == "full":
            del digests["master"]  # it is its own
        assert tensor_digests(exported) == digests


@pytest.mark.parametrize("seals", [(LAST_STEP,), (4, 5, LAST_STEP)], ids=["at-the-end", "often"])
def test_training_goes_on_with_the_bits_of_the_code_that_made_it(name, store, seals):
    model = Model()
    done = CHECKPOINT_STEP
    with optimizer_for(model, store, name) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == done
        for step in seals:
            train(model, optimizer, done + 1, step)
            checkpoint = optimizer.checkpoint().result()
            done = step
        assert stored_digests(checkpoint.path) == expected(name)["stored_after"]
        assert state_digests(checkpoint) == expected(name)["state_after"]


def test_other_chunks_in_the_options_change_nothing(name, store):
    model = Model()
    options = offload.Options(
        chunk_bytes=1 << 20, train_state_bytes=8192, allow_volatile=True, **SETTINGS[name]
    )
    with offload.Adam(
        model.parameters(), directory=store, model=model, options=options
    ) as optimizer:
        optimizer.restore()
        train(model, optimizer, CHECKPOINT_STEP + 1, LAST_STEP)
        path = optimizer.checkpoint().result().path
    assert stored_digests(path) == expected(name)["stored_after"]
