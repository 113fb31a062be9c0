"""What a child process does to show how little memory exports and imports take.

``python -m tests.exchange.streaming <directory> <elements> <bytes>`` makes a store, lets the kernel
refuse private memory beyond that many bytes more than the process has, and then exports the state
in every format and imports it again. Prints one JSON document.
"""

from __future__ import annotations

import gc
import json
import resource
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import offload
from offload import export_checkpoint, import_checkpoint
from tests.numerics.measure import model_of
from tests.process_memory import reset_peak, resident_bytes

CHUNK_BYTES = 1 << 20
KINDS = ("pt", "hf", "safetensors", "dcp")


def make(directory: Path, size: int) -> int:
    """Make a store with a checkpoint; return the bytes of its state."""
    model = model_of(size // 2, size // 2)
    drives = offload.DriveTuning(calibrate=False)
    options = offload.Options(chunk_bytes=CHUNK_BYTES, ring_chunks=3, drives=drives)
    with offload.AdamW(
        model.named_parameters(), model=model, directory=directory, options=options
    ) as optimizer:
        optimizer.step()
        optimizer.checkpoint().result()
        return optimizer.stats().state_bytes


def export(store: Path, target: Path, kind: str) -> None:
    with offload.open_checkpoint(store) as opened:
        export_checkpoint(opened, target, kind)


def import_again(source: Path, store: Path) -> None:
    made = import_checkpoint(source, str(store), options=offload.Options(chunk_bytes=CHUNK_BYTES))
    if made.num_parameters == 0:
        raise RuntimeError("nothing was imported")


def round_trips(directory: Path) -> dict[str, dict[str, int]]:
    """Export and import in every format; return the growth of resident memory of each."""
    found = {}
    for kind in KINDS:
        target, again = directory / kind, directory / "again"
        found[kind] = {"export": growth(export, directory / "run", target, kind)}
        if kind != "safetensors":  # which is not a format that is imported
            found[kind]["import"] = growth(import_again, target, again)
            shutil.rmtree(again)
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    return found


def growth(function: Any, *arguments: Any) -> int:
    gc.collect()  # what the one before has left in cycles is not this one's
    before = resident_bytes("VmRSS")
    if not reset_peak():
        raise RuntimeError("the kernel does not reset the peak of memory")
    function(*arguments)
    return resident_bytes("VmHWM") - before


def main(directory: Path, size: int, limit_bytes: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)  # the kernel counts stacks whole, and how many there are varies
    make(directory / "small/run", 1 << 16)
    round_trips(directory / "small")  # what is imported when it is first used is not counted
    state_bytes = make(directory / "run", size)
    present = resident_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (present + limit_bytes, resource.RLIM_INFINITY))
    found: dict[str, Any] = {"state": state_bytes, "growth": round_trips(directory)}
    try:
        bytearray(state_bytes)
    except MemoryError:
        found["refused"] = True  # the limit was there
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
