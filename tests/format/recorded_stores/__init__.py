"""Stores with compressed state that were recorded, so that what is on drives stays readable.

`int8.tar.xz` and `bfloat16.tar.xz` hold one checkpoint each, and `expected.json` digests of it and
of what it was trained on to. `python -m tests.format.recorded_stores` makes them anew, which only a
change of the format calls for.

All values are such that no processor rounds otherwise: products are exact, so that it does not
matter whether an operation is fused, and square roots are those of vector units.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import offload

HERE = Path(__file__).parent
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"state_dtype": "int8"},
    "bfloat16": {"state_dtype": "bfloat16", "master": "split", "rounding_seed": 5},
}
CHECKPOINT_STEP, LAST_STEP = 3, 6
SHAPES = {"odd": (33, 7), "tiny": (5,), "large": (7, 613), "norm": (61,), "full": (19, 3)}
"""Sizes are odd, and chunks of 1024 elements end inside of ``large`` at no multiple of 32."""


class Model(torch.nn.Module):
    """Parameters of both dtypes, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            numel = torch.Size(shape).numel()
            values = ((torch.arange(numel) * 29 % 201 - 100) / 256).view(shape)
            dtype = torch.float32 if name == "full" else torch.bfloat16
            self.register_parameter(name, torch.nn.Parameter(values.to(dtype)))


def optimizer_for(model: Model, directory: str | Path, name: str) -> offload.Adam:
    """Return the optimizer of a store."""
    options = offload.Options(
        chunk_bytes=4096, train_state_bytes=8192, allow_volatile=True, **SETTINGS[name]
    )
    return offload.Adam(
        model.parameters(),
        lr=2.0**-6,
        betas=(0.5, 0.5),
        eps=2.0**-10,
        directory=directory,
        model=model,
        options=options,
    )


def train(model: Model, optimizer: offload.OffloadedOptimizer, first: int, last: int) -> None:
    """Take steps `first` to `last`, counted from 1."""
    for step in range(first, last + 1):
        for number, parameter in enumerate(model.parameters()):
            index = torch.arange(parameter.numel())
            gradient = ((index * 37 + step * 101 + number * 11) % 255 - 127) / 64
            parameter.grad = gradient.view(parameter.shape).to(parameter.dtype)
        optimizer.step()


def unpack(name: str, directory: Path) -> Path:
    """Put a store into a directory; returns its path."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "run"


def expected(name: str) -> dict[str, Any]:
    """Return what was recorded of a store."""
    found: dict[str, Any] = json.loads((HERE / "expected.json").read_text())[name]
    return found


def stored_digests(path: str | Path) -> dict[str, str]:
    """Return a digest of the data of each tensor file of a checkpoint, headers left out."""
    found = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        if file.name != "train_state.safetensors":
            raw = file.read_bytes()
            data = raw[8 + int.from_bytes(raw[:8], "little") :]
            found[file.name] = hashlib.sha256(data).hexdigest()
    return found


def state_digests(checkpoint: offload.Checkpoint) -> dict[str, dict[str, str]]:
    """Return a digest of the FP32 state of each parameter."""
    return {name: tensor_digests(offload.read_state(checkpoint, name)) for name in SHAPES}


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of the bytes of each tensor."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in sorted(tensors.items())
    }
