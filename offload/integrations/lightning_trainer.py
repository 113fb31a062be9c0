"""What the callback for Lightning reads from a Trainer, and the random states of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload import OffloadedOptimizer, usable_metrics

if TYPE_CHECKING:
    import lightning.pytorch as pl


def offloaded(trainer: pl.Trainer) -> Iterator[tuple[int, OffloadedOptimizer]]:
    """Yield the optimizers of this package, each with its number among those of the Trainer."""
    for index, optimizer in enumerate(trainer.optimizers):
        if isinstance(optimizer, OffloadedOptimizer):
            yield index, optimizer


def monitored(trainer: pl.Trainer) -> dict[str, float]:
    """Return the metrics that files are ranked by, so that ``offload ls`` shows them."""
    monitors = [getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks]
    names = [name for name in monitors if name]
    return usable_metrics({name: trainer.callback_metrics.get(name) for name in names}, names)


def random_states() -> dict[str, Any]:
    """Return the random states as builtins and tensors, which load with ``weights_only=True``."""
    state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = state
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the random states that `random_states` has returned."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
