"""What the demo compares checkpoints with: `torch.save` of the same state to the same disk."""

from __future__ import annotations

import os
import time
from typing import Any


def measure_torch_save(checkpoint: str, arrays: list[str], scratch: str) -> dict[str, Any]:
    """Save the state of a checkpoint with `torch.save`, load it again, and remove the file.

    Returns:
        Entries of the report. Each time is the faster of two runs: of saving with fsync, and of
        loading from the disk, not from the page cache.

    Args:
        checkpoint: Directory of a checkpoint; its files are read with `safetensors`.
        arrays: Names of the checkpoint's files to save, without ``.safetensors``.
        scratch: Path of the file to write; it must be on the disk to be measured.
    """
    import torch
    from safetensors.torch import load_file
    from torch.serialization import get_crc32_options, set_crc32_options

    state: dict[str, Any] = {
        name: load_file(os.path.join(checkpoint, f"{name}.safetensors")) for name in arrays
    }
    saves: list[float] = []
    loads: list[float] = []
    checksums = get_crc32_options()
    # Without its checksums torch.save takes half the time. The comparison is with the faster
    # variant.
    set_crc32_options(False)
    fd = os.open(scratch, os.O_RDONLY | os.O_CREAT)
    try:
        for _ in range(2):
            began = time.perf_counter()
            torch.save(state, scratch)
            os.fsync(fd)
            saves.append(time.perf_counter() - began)
        state.clear()
        for _ in range(2):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            torch.load(scratch, map_location="cpu", weights_only=True)
            loads.append(time.perf_counter() - began)
        return {
            "torch_save_bytes": os.path.getsize(scratch),
            "torch_save_s": min(saves),
            "torch_load_s": min(loads),
        }
    finally:
        set_crc32_options(checksums)
        os.close(fd)
        os.remove(scratch)
