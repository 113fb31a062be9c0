"""Stores of one process have the bytes that they had before there were owners.

The digests were computed with the code from before version 4 of the format.
"""

from __future__ import annotations

import hashlib

import pytest

from gds import MemoryBackend
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import Manifest, decode, num_model_blocks, reserved_bytes
from offload.format.slot_files import slot_sizes
from offload.store.slots.slot import create_slot

STORE_ID = "0123456789abcdef" * 2


def layout_of(state_dtype: str) -> Layout:
    suffix = ("_scale",) if state_dtype == "int8" else ()
    moments = tuple(n + s for n in ("exp_avg", "exp_avg_sq") for s in ("", *suffix))
    parameters = (
        ParameterSpec("norm.weight", "F32", (70,), 0, moments),
        ParameterSpec("0.weight", "BF16", (33, 50), 0, ("master", *moments)),
        ParameterSpec("empty", "BF16", (0, 3), 1, ("master", *moments)),
        ParameterSpec("0.bias", "BF16", (33,), 1, ("master", *moments)),
    )
    model = tuple(ModelTensor(p.name, p.dtype, p.shape) for p in parameters)
    model = (*model, ModelTensor("steps", "I16", (), ("tied",)))
    return Layout(parameters, model, 1024, state_dtype)


def manifest_of(layout: Layout) -> Manifest:
    scalars = (("step", "f32", 3.0), ("mu", "float", 0.25), ("n", "int", 7))
    return Manifest(
        store_id=STORE_ID,
        generation=5,
        step=3,
        created="2026-01-01T00:00:00+00:00",
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": float("inf")}),
        layout=layout,
        scalars=(scalars, None, scalars, scalars),
        digests={
            name: tuple(f"{chunk:016x}" for chunk in range(layout.num_chunks))
            for name in layout.array_names
        },
        model_digests=("0" * 16,) * num_model_blocks(layout),
        order=((0, 1), (2, 3)),
        metrics={"loss": 0.5},
        update_code="kernel",
    )


def written(state_dtype: str) -> bytes:
    """Return the manifest, and then each file of a new slot after its name."""
    layout = layout_of(state_dtype)
    data = manifest_of(layout).encode(reserved_bytes(layout, 2))
    backend = MemoryBackend(directories=["/run"])
    sizes = slot_sizes(layout, 2, train_state_bytes=8192)
    with create_slot(backend, "/run/.slot-1", layout, sizes).manifest:
        for name, size in sizes.items():
            with backend.open(f"/run/.slot-1/{name}") as file:
                data += name.encode() + file.read_bytes(0, size)
    return data


@pytest.mark.parametrize(
    ("state_dtype", "version", "expected"),
    [
        ("float32", 2, "853620dcf321df646f5214108a79ff71"),
        ("bfloat16", 3, "880d219f9f2f97bb0313266fd63735b2"),
        ("int8", 3, "b193c013a0644b78b854f2e7878dd36e"),
    ],
)
def test_one_process_writes_the_same_bytes(state_dtype: str, version: int, expected: str) -> None:
    data = written(state_dtype)
    assert hashlib.blake2b(data, digest_size=16).hexdigest() == expected
    assert data.startswith(b'{"format":%d,' % version)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_manifest_comes_back(state_dtype: str) -> None:
    manifest = manifest_of(layout_of(state_dtype))
    assert decode(manifest.encode(1 << 17), "manifest.json") == manifest
