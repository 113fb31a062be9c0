"""Predicted sizes beside the files of real stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload.sizing import Precision, Run, size

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
FORMATS = {
    "exact": {},
    "split and bfloat16": {"master": "split", "state_dtype": "bfloat16"},
    "split and int8": {"master": "split", "state_dtype": "int8"},
}
CHUNK_BYTES = 64 << 10


def sizes_below(directories: list[Path]) -> tuple[int, int, int]:
    """Return number of slots, bytes of all files in slots and parts, and allocated bytes."""
    slots = nbytes = allocated = 0
    for directory in directories:
        for entry in os.scandir(directory):
            if entry.name.startswith(("step-", ".slot-", "part-")):
                slots += not entry.name.startswith("part-")
                stats = [file.stat() for file in os.scandir(entry.path)]
                nbytes += sum(stat.st_size for stat in stats)
                allocated += sum(512 * stat.st_blocks for stat in stats)
    return slots, nbytes, allocated


@pytest.mark.parametrize(
    ("optimizer", "form", "num_drives"),
    [
        ("AdamW", "exact", 1),
        ("AdamW", "split and int8", 2),
        ("Adam amsgrad", "split and bfloat16", 1),
        ("Adam amsgrad", "exact", 2),
        ("SGD momentum", "split and int8", 1),
        ("SGD momentum", "split and bfloat16", 2),
    ],
)
def test_predicted_bytes_are_those_of_the_files(
    optimizer: str, form: str, num_drives: int, tmp_path: Path
) -> None:
    torch_class, settings = OPTIMIZERS[optimizer]
    model = torch.nn.Sequential(
        torch.nn.Embedding(301, 48), torch.nn.Linear(48, 777), torch.nn.Linear(777, 5)
    ).to(torch.bfloat16)
    shares = (3, 2)[:num_drives]
    stores = [tmp_path / f"drive-{n}" for n in range(num_drives)]
    options = offload.Options(
        chunk_bytes=CHUNK_BYTES,
        drives=offload.DriveTuning(shares=shares if num_drives > 1 else None, calibrate=False),
        **FORMATS[form],  # type: ignore[arg-type]
    )
    with offload.OffloadedOptimizer(
        torch_class,
        model.parameters(),
        directory=[str(store) for store in stores],
        model=model,
        keep=2,
        options=options,
        lr=0.01,
        **settings,
    ) as trained:
        for _ in range(4):
            model(torch.arange(7)).float().square().mean().backward()
            trained.step()
            trained.zero_grad()
            trained.checkpoint().result()
        model(torch.arange(7)).float().square().mean().backward()
        trained.step()
        slots, nbytes, allocated = sizes_below(stores)
        weights = tmp_path / "weights.safetensors"
        save_file(model.state_dict(), weights)
        precision = Precision(optimizer=optimizer, **FORMATS[form])  # type: ignore[arg-type]
        predicted = size(
            weights,
            precision=precision,
            shares=shares,
            chunk_bytes=CHUNK_BYTES,
            run=Run(keep=2),
        )
        found = size(stores[0], run=Run(keep=2))
    assert slots == predicted.disk.slots == 3
    assert predicted.disk.exact
    assert predicted.disk.total_bytes == nbytes
    assert predicted.state_bytes == pytest.approx(
        precision.state_bytes * predicted.num_parameters, rel=0.01
    )
    # Preallocated files take whole blocks of the file system, and no hole is left.
    assert nbytes <= allocated <= nbytes + 4096 * 16 * slots * num_drives
    assert found.disk.total_bytes == nbytes
    assert (found.num_parameters, found.parameter_bytes, found.state_bytes) == (
        predicted.num_parameters,
        predicted.parameter_bytes,
        predicted.state_bytes,
    )
    assert found.fits == predicted.fits
