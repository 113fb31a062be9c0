"""What a child process does to measure the memory of exports and imports."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import offload
from tests.numerics.measure import model_of, reset_peak, resident_bytes

CHUNK_BYTES = 4 << 20


def run(command: str, directory: str, size: int) -> dict[str, int]:
    torch.set_num_threads(1)
    if command == "make":
        return make(directory, size)
    return measure_export(command, directory)


def make(directory: str, size: int) -> dict[str, int]:
    model = model_of(size // 2, size // 2)
    options = offload.Options(chunk_bytes=CHUNK_BYTES, ring_chunks=3, calibrate=False)
    with offload.AdamW(
        model.named_parameters(), model=model, directory=f"{directory}/run", options=options
    ) as optimizer:
        optimizer.step()
        optimizer.checkpoint().result()
        return {"state": optimizer.stats().state_bytes}


def measure_export(kind: str, directory: str) -> dict[str, int]:
    from offload.exporting import export_checkpoint

    if kind == "dcp":
        import offload.dcp_files
    target = Path(directory) / f"export-{kind}"
    with offload.open_checkpoint(f"{directory}/run") as opened:
        state = sum(opened.state_arrays.values())
        before = resident_bytes("VmRSS")
        if not reset_peak():
            raise RuntimeError("the kernel does not reset the peak of memory")
        export_checkpoint(opened, target, kind)
        peak = resident_bytes("VmHWM")
    found = {"state": state, "peak_above": peak - before}
    if kind != "safetensors":  # which is not a format that is imported
        found["import_peak_above"] = measure_import(str(target), f"{directory}/again")
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return found


def measure_import(source: str, directory: str) -> int:
    from offload.foreign_files import open_foreign
    from offload.importing import import_checkpoint

    before = resident_bytes("VmRSS")
    reset_peak()
    options = offload.Options(chunk_bytes=CHUNK_BYTES)
    made = import_checkpoint(open_foreign(source), directory, options=options, step=1)
    peak = resident_bytes("VmHWM")
    if made.num_parameters == 0:
        raise RuntimeError("nothing was imported")
    shutil.rmtree(directory)
    return peak - before
