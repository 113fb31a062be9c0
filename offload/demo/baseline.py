"""Measurement of `torch.save` and `torch.load` for the same state, on the same disk."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch.serialization import get_crc32_options, set_crc32_options


@dataclass(frozen=True, slots=True)
class Baseline:
    """Costs of `torch.save` and `torch.load`."""

    bytes: int
    """Size of the file in bytes. It holds 16-bit parameters, FP32 masters and both moments."""

    save_s: float
    """Seconds for saving and fsync, the faster of two runs."""

    load_s: float
    """Seconds for loading from the disk, not from the page cache, the faster of two runs."""


def measure(checkpoint: str, arrays: list[str], scratch: str) -> Baseline:
    """Save the state of a checkpoint with `torch.save`, load it again, and remove the file.

    Args:
        checkpoint: Directory of a checkpoint; its files are read with `safetensors`.
        arrays: Names of the checkpoint's files to save, without ``.safetensors``.
        scratch: Path of the file to write; it must be on the disk to be measured.
    """
    state: dict[str, Any] = {
        name: load_file(os.path.join(checkpoint, f"{name}.safetensors")) for name in arrays
    }
    saves: list[float] = []
    loads: list[float] = []
    checksums = get_crc32_options()
    # Without its checksums torch.save takes half the time. The comparison is with the faster
    # variant.
    set_crc32_options(False)
    try:
        for _ in range(2):
            began = time.perf_counter()
            torch.save(state, scratch)
            _sync(scratch)
            saves.append(time.perf_counter() - began)
        state.clear()
        for _ in range(2):
            _forget(scratch)
            began = time.perf_counter()
            torch.load(scratch, map_location="cpu", weights_only=True)
            loads.append(time.perf_counter() - began)
        return Baseline(bytes=os.path.getsize(scratch), save_s=min(saves), load_s=min(loads))
    finally:
        set_crc32_options(checksums)
        if os.path.exists(scratch):
            os.remove(scratch)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _forget(path: str) -> None:
    """Drop a file's pages from the page cache, so that reading it reads the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
