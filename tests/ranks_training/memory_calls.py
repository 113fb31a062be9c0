"""Optimizers of ranks whose state stays in the memory of a directory."""

from __future__ import annotations

import dataclasses

import offload
from tests.ranks_training.calls import Calls


def open_in(training: Calls, directory: str, size: int | None) -> None:
    """Make the optimizer with a directory for its memory."""
    options = {**training.setting.options, "host_memory": offload.MemoryDirectory(directory, size)}
    training.setting = dataclasses.replace(training.setting, options=options)
    training.open()


def kept_bytes(training: Calls) -> int:
    """Return how much state stays in memory."""
    return training.optimizer.stats().resident_bytes
