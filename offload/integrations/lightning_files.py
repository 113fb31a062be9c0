"""Relation between the files of a Lightning Trainer and a store's checkpoints, which pins keep.

A file has the `state_dict()` of the optimizer, a small reference to a checkpoint. A checkpoint
lists in its train state the files that it was sealed for. It has one pin for each of these files
that still names it. A file may be a directory, in which each of several ranks has its shards.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from offload import (
    CheckpointInfo,
    OffloadedOptimizer,
    OffloadError,
    Position,
    open_checkpoint,
    reference_of,
    usable_metrics,
)
from offload.integrations.first_rank import decide, num_hosts_of_launcher, rank_of, require_one_host
from offload.integrations.listed_folders import (
    ListedFolders,
    change_pins,
    is_sharded,
    log_kept,
    log_released,
    reference_in,
)
from offload.integrations.places import inode_of_parent, is_remote, make_durable

if TYPE_CHECKING:
    import lightning.pytorch as pl


optimizers_of_ended_fits: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
"""Optimizers that are closed when the next fit of this process begins."""

PIN_PREFIX = "lightning-"
"""Prefix of the names of all pins that belong to files."""

_METADATA = "meta.pt"
"""File that Lightning writes last into a directory with shards."""

_FILES = "lightning_files"
"""Key in a checkpoint's train state: its value lists the files that it was sealed for."""


def train_state(optimizer: OffloadedOptimizer, file: str) -> dict[str, Any]:
    """Return the train state to seal the present state with, as a checkpoint that a file names.

    If this step has been sealed already, its train state is kept, and the file is added to it.
    """
    optimizer.synchronize()
    if not is_remote(file):
        os.makedirs(os.path.dirname(file), exist_ok=True)  # as Lightning is about to do
    survey = _listed("").survey(optimizer)
    folders = {file: inode_of_parent(file, survey.known)}
    entry = {"folders": folders, "store": optimizer.directories[0]}
    newest = next(reversed(optimizer.checkpoints()), None)
    if newest is None or newest.step != optimizer.num_steps:
        return {_FILES: entry}
    with open_checkpoint(newest.path, parts=optimizer.directories[1:]) as checkpoint:
        states, rank = checkpoint.train_states, rank_of(optimizer)
        found = states[rank] if rank < len(states) else states[0]
        state = {} if found is None else found
    if not isinstance(state, dict):
        raise OffloadError(
            f"{file} must refer to {newest.path}, whose train state is a {type(state).__name__}, "
            "so that the reference cannot be added to it: pass a dict as the train state to "
            "checkpoint()"
        )
    uses = survey.uses.get(newest.generation) or ()
    others = {use.folder: use.inode for use in uses if use.status != "removed"}
    return {**state, _FILES: {**entry, "folders": {**others, **folders}}}


def why_in_use(optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo, loaded: str) -> str:
    """Return why a checkpoint must not be withdrawn without consent; empty if it is not in use."""
    uses = _listed(loaded).survey(optimizer).uses.get(checkpoint.generation)
    if uses is None:
        return "made by checkpoint()"
    others = [n for n in checkpoint.pins if not n.startswith(PIN_PREFIX)]
    if others:
        return f"pinned as {others[0]!r}"
    for use in uses:
        if use.status in ("refers", "unreadable", "missing"):
            return f"named by {use.folder}"
    return ""


def _listed(loaded: str) -> ListedFolders:
    """Return the files that checkpoints list.

    They may have been moved to the directory of the file that training resumes from, if any.
    """
    listed = ListedFolders(_FILES, positions_in)
    if loaded and not is_remote(loaded):
        listed.use(os.path.dirname(name_of_file(loaded)))
    return listed


def positions_in(file: str) -> list[Position] | None:
    """Return the positions that a file names; None if it is not finished. No tensor is read.

    Raises:
        OSError: The file cannot be read, or is damaged.
    """
    if os.path.isdir(file):
        is_whole = is_sharded(file) and os.path.isfile(os.path.join(file, _METADATA))
        return _references_in(file) if is_whole else None
    try:
        saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = map(reference_of, saved.get("optimizer_states", ()))
        return [position for position in found if position is not None]
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EBADMSG, "it is damaged", file) from error


def _references_in(directory: str) -> list[Position]:
    """Return the positions that the optimizers of a directory refer to, in their order."""
    found: list[Position] = []
    while (position := reference_in(directory, f"optimizer_{len(found)}")) is not None:
        found.append(position)
    return found


def mend_pins(optimizer: OffloadedOptimizer, loaded: str) -> None:
    """Pin the checkpoints that files name, and remove the pins of files that are gone.

    This is needed since users move and remove files by hand, and a process may be killed between
    writing a file and pinning its checkpoint. `loaded` is the file that training resumes from.
    """
    change_pins(optimizer, lambda: _wrong_pins(optimizer, loaded))


def _wrong_pins(optimizer: OffloadedOptimizer, loaded: str) -> dict[str, str | None]:
    """Return names of pins to add, with the checkpoint's path, and to remove, with None."""
    added: dict[str, str | None] = {}
    removed: dict[str, str | None] = {}
    survey = _listed(loaded).survey(optimizer)
    for checkpoint in optimizer.checkpoints():
        for use in survey.uses.get(checkpoint.generation) or ():
            named = pin_name(use.folder)
            pins = {pin_name(file) for file in (use.folder, use.listed)} & {*checkpoint.pins}
            if use.status == "refers":
                if named not in pins:
                    added[named] = checkpoint.path
                pins -= {named}  # the file was listed with another path
            elif use.status != "removed":
                if pins:
                    log_kept(checkpoint, min(pins), [use], optimizer.directories[0])
                continue
            for name in pins:
                log_released(checkpoint, name, [use])
                removed[name] = None
    return {**added, **{name: None for name in removed if name not in added}}


def pin_name(file: str) -> str:
    """Return the name of the pin for a file: readable, and different for each path."""
    stem = re.sub("[^A-Za-z0-9]+", "-", os.path.basename(file).removesuffix(".ckpt"))[:40]
    return f"{PIN_PREFIX}{stem}-{hashlib.blake2b(os.fsencode(file), digest_size=5).hexdigest()}"


def name_of_file(path: Any) -> str:
    """Return the absolute path of a file, or its URL, as this module lists it."""
    name: str = os.fsdecode(path)
    return name if is_remote(name) else os.path.abspath(name)


_OTHERS = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy")
"""Strategies that are not supported, although some are derived from one that is."""


def require_ranks_of(trainer: pl.Trainer) -> None:
    """Refuse strategies that are not supported with several processes, and several hosts."""
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


class SealedFiles:
    """Methods of a strategy that seal the state before a file names it, and update pins.

    The strategy calls them on every rank, as the optimizer's calls must be made. Lightning makes
    the content of a file on every rank, and writes and removes files on the first one, or on each
    its shards.

    Args:
        trainer: Trainer whose optimizers the files name.
        state_key: Key of the callback in files.
    """

    def __init__(self, trainer: pl.Trainer, state_key: str) -> None:
        self._trainer = trainer
        self._state_key = state_key
        self._save = trainer.strategy.save_checkpoint
        self._remove = trainer.strategy.remove_checkpoint
        self._teardown = trainer.strategy.teardown

    @classmethod
    def install(cls, trainer: pl.Trainer, state_key: str) -> None:
        """Wrap the methods of a Trainer's strategy, once."""
        strategy: Any = trainer.strategy
        if not isinstance(getattr(strategy.save_checkpoint, "__self__", None), cls):
            files = cls(trainer, state_key)
            strategy.save_checkpoint = files.save_checkpoint
            strategy.remove_checkpoint = files.remove_checkpoint
            strategy.teardown = files.teardown

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
        metrics = strategy.broadcast(_monitored(trainer)) or None
        sealed = {
            index: optimizer.checkpoint(train_state(optimizer, file), metrics=metrics).result()
            for index, optimizer in optimizers.items()
        }
        for index, optimizer in optimizers.items():
            states[index] = strategy.optimizer_state(optimizer)
        if trainer.world_size > 1:
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

    def teardown(self) -> None:
        """Note that a fit has ended. Optimizers stay open, for ``Trainer.save_checkpoint``."""
        optimizers_of_ended_fits.update(optimizer for _, optimizer in offloaded(self._trainer))
        self._teardown()


def offloaded(trainer: pl.Trainer) -> Iterator[tuple[int, OffloadedOptimizer]]:
    """Yield the optimizers of this package, each with its number among those of the Trainer."""
    for index, optimizer in enumerate(trainer.optimizers):
        if isinstance(optimizer, OffloadedOptimizer):
            yield index, optimizer


def _monitored(trainer: pl.Trainer) -> dict[str, float]:
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
