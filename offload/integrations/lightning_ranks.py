"""Files of a Lightning Trainer with several processes.

Lightning makes the content of a file on every rank, and writes and removes files on the first one,
or on each its shards. The strategy's methods for both are called on every rank, and so are the
optimizer's. They are wrapped here, as file access is wrapped in one process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from offload import OffloadedOptimizer, OffloadError, usable_metrics
from offload.integrations.ckpt_files import name_of_file, pin_name, train_state
from offload.integrations.first_rank import decide, num_hosts_of_launcher, require_one_host
from offload.integrations.places import make_durable

if TYPE_CHECKING:
    import lightning.pytorch as pl


_OTHERS = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy")
"""Strategies that are not supported, although some are derived from one that is."""


def require_ranks_of(trainer: pl.Trainer) -> None:
    """Refuse strategies that are not supported, and several hosts.

    Args:
        trainer: Trainer of several processes.

    Raises:
        OffloadError: The message names the strategy.
    """
    require_one_host(max(trainer.num_nodes, num_hosts_of_launcher()), "Lightning")
    names = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not {"DDPStrategy", "ModelParallelStrategy"} & {*names} or {*_OTHERS} & {*names}:
        remedy = (
            "FSDP1 puts parameters of its own in the place of the model's"
            if "FSDPStrategy" in names
            else "it has not been tried"
        )
        raise OffloadError(
            f'{names[0]} is not supported: {remedy}. Use strategy="ddp"; or, for FSDP2, '
            "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1), with "
            "fully_shard in configure_model()"
        )


class RankFiles:
    """Methods of a strategy that seal the state before a file names it, and update pins.

    Args:
        trainer: Trainer whose optimizers the files name.
        state_key: Key of the callback in files.
    """

    def __init__(self, trainer: pl.Trainer, state_key: str) -> None:
        self._trainer = trainer
        self._state_key = state_key
        self._save = trainer.strategy.save_checkpoint
        self._remove = trainer.strategy.remove_checkpoint

    @classmethod
    def install(cls, trainer: pl.Trainer, state_key: str) -> None:
        """Wrap the methods of a Trainer's strategy, once."""
        strategy: Any = trainer.strategy
        if not isinstance(getattr(strategy.save_checkpoint, "__self__", None), cls):
            files = cls(trainer, state_key)
            strategy.save_checkpoint = files.save_checkpoint
            strategy.remove_checkpoint = files.remove_checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a file. When this returns, the file and the checkpoint that it names are durable.

        Raises:
            SealError: The state could not be sealed. An existing file is unchanged.
            OffloadError: This step has been sealed with a train state that is not a dict.
        """
        trainer, strategy = self._trainer, self._trainer.strategy
        states = checkpoint.get("optimizer_states")  # None if only parameters are saved
        optimizers = dict(offloaded(trainer))
        if states is None or not optimizers:
            self._save(checkpoint, filepath, storage_options=storage_options)
            return
        file = strategy.broadcast(name_of_file(filepath))
        metrics = strategy.broadcast(monitored(trainer)) or None
        sealed = {
            index: optimizer.checkpoint(train_state(optimizer, file), metrics=metrics).result()
            for index, optimizer in optimizers.items()
        }
        for index, optimizer in optimizers.items():
            states[index] = strategy.optimizer_state(optimizer)
        own = checkpoint["callbacks"][self._state_key]
        of_ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(of_ranks, own["random"])
        checkpoint["callbacks"][self._state_key] = {**own, "random_of_ranks": of_ranks}
        self._save(checkpoint, file, storage_options=storage_options)
        strategy.barrier()  # shards of all ranks have been written
        for index, optimizer in optimizers.items():
            decide(optimizer, lambda: make_durable(file))
            optimizer.pin(pin_name(file), sealed[index].path)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file, and then its pin."""
        self._remove(filepath)
        name = pin_name(self._trainer.strategy.broadcast(name_of_file(filepath)))
        for _, optimizer in offloaded(self._trainer):
            if name in optimizer.pins():
                optimizer.unpin(name)


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
