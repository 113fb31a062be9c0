"""FP32 state as docs/format.md defines it, for every form of state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from tests.format import recorded_stores
from tests.format.spec_reader import chunk_starts, fp32_state, read_manifest
from tests.numerics.models import Mixed, give_gradients, trainable

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "split": {"master": "split"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "split-int8": {"state_dtype": "int8", "master": "split"},
}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor], name: str) -> None:
    assert found.keys() == expected.keys()
    for array, values in expected.items():
        wanted = values.numpy()
        assert found[array].shape == wanted.shape
        same = found[array].view(np.uint32) == wanted.view(np.uint32)
        nan = np.isnan(found[array]) & np.isnan(wanted)
        assert (same | nan).all(), f"{array} of {name}"


@pytest.mark.parametrize(
    ("form", "edited"),
    [
        ("float32", True),
        ("split", False),
        ("split", True),
        ("bfloat16", True),
        ("int8", False),
        ("int8", True),
        ("split-int8", True),
    ],
)
def test_state_is_what_the_page_says(form, edited, tmp_path):
    model = Mixed()
    options = offload.Options(chunk_bytes=4096, allow_volatile=True, **FORMATS[form])
    with offload.AdamW(
        model.parameters(), lr=1e-2, directory=tmp_path / "run", model=model, options=options
    ) as optimizer:
        for step in range(5):
            give_gradients(step, model)
            if step == 4:
                model.big.grad[2000] = float("nan")
                model.big.grad[2500] = float("inf")
            optimizer.step()
        if edited:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.7, 0.7)
                model.matrix[3, 4] = -0.0
                model.matrix[5, 6] = float("nan")
                model.matrix_half[3, 4] = float("inf")
        path = Path(optimizer.checkpoint().result().path)
    body = read_manifest(path)
    with offload.open_checkpoint(path) as checkpoint:
        for name in trainable(model):
            assert_same(fp32_state(path, name), offload.read_state(checkpoint, name), name)
    starts = chunk_starts(body)
    assert len(body["digests"]["exp_avg"]) == len(starts) - 1
    moved = [start for start in starts[:-1] if start % body["chunk_elements"]]
    assert bool(moved) == ("int8" in form)


@pytest.mark.parametrize("name", recorded_stores.SETTINGS)
def test_recorded_stores_are_read_from_the_page(name, tmp_path):
    path = recorded_stores.unpack(name, tmp_path) / f"step-{recorded_stores.CHECKPOINT_STEP:08}"
    for parameter in recorded_stores.SHAPES:
        found = fp32_state(path, parameter)
        digests = recorded_stores.tensor_digests({a: torch.tensor(v) for a, v in found.items()})
        assert digests == recorded_stores.expected(name)["state"][parameter]
