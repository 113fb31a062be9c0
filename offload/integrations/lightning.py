"""Lightning: seal when the Trainer saves, keep what its files name, and go on exactly there.

A ``.ckpt`` holds the parameters and, as ``optimizer_states``, a small reference to a checkpoint of
the store. `OffloadCallback` sees to it that there is one whenever a ``.ckpt`` is written or loaded:

- saving: the state is sealed and durable, and only then the file is written. When that is durable,
  too, its pin moves from what it named before to what it names now;
- removing: a file that ``ModelCheckpoint`` gives up takes its pin along;
- loading: the very checkpoint that the file names is restored, before Lightning loads the rest.

So at every instant each ``.ckpt`` names a checkpoint that is sealed, and either pinned or the
newest, which always stays. What a process that is killed can leave is a file whose pin has not
moved yet, which the next fit makes good, and a checkpoint whose file was never written. The next
fit gives that up, as nothing can name it, if it continues from an older one.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import random
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from offload.checkpoint import open_checkpoint
from offload.errors import MismatchError, OffloadError
from offload.opening import StoredCheckpoint
from offload.optimizer import OffloadedOptimizer
from offload.state_reference import find_sealed, is_reference, read_reference
from offload.store import Store

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import CheckpointIO
else:
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.plugins import CheckpointIO
    except ModuleNotFoundError:  # the same code, under its older name
        import pytorch_lightning as pl
        from pytorch_lightning.plugins import CheckpointIO

_PIN_PREFIX = "lightning-"
_FILES = "lightning_files"
"""In the train state of a checkpoint: which files it was sealed for."""

_of_ended_fits: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
"""Optimizers that are closed when the next fit of this process begins."""


class OffloadCallback(pl.Callback):
    """Makes Lightning's checkpoints checkpoints of the store: ``Trainer(callbacks=[...])``.

    ``configure_optimizers`` returns the optimizer, ``ModelCheckpoint`` decides when to save and
    what to keep, ``fit(ckpt_path=...)`` continues: as without it, to the same losses. Python's,
    numpy's and torch's random states are saved and restored as well.

    Args:
        discard_newer: Whether ``fit(ckpt_path=...)`` may go back to a ``.ckpt`` although newer
            ones, or other checkpoints that someone has asked for, are in the store. They are
            withdrawn then, and newer ``.ckpt`` files cannot be resumed from any more.
        log_stats: Whether to give ``stats().scalars()`` to the Trainer's loggers, every
            ``log_every_n_steps``.
    """

    def __init__(self, *, discard_newer: bool = False, log_stats: bool = True) -> None:
        self._discard_newer = discard_newer
        self._log_stats = log_stats
        self._logged_step = 0
        self._references: Sequence[Any] = ()
        """What the file that is being loaded holds of each optimizer."""
        self._random: Mapping[str, Any] | None = None
        """Random states of the file that is being loaded."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look from now on at what the Trainer saves, loads and removes.

        Raises:
            OffloadError: There are several processes, or files are written behind training.
        """
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise OffloadError(
                f"Trainer has {trainer.world_size} processes, and a store belongs to one: use "
                "devices=1, num_nodes=1"
            )
        self._references, self._random = (), None
        files = trainer.strategy.checkpoint_io
        if not isinstance(files, _SealingIO):
            if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(files).__mro__):
                raise OffloadError(
                    "AsyncCheckpointIO writes a .ckpt after the next one may have been asked for, "
                    "so that it is not known what it names when: leave it out. The optimizer's "
                    "state is not in the .ckpt, which is small"
                )
            trainer.strategy.checkpoint_io = _SealingIO(files, trainer)
        while _of_ended_fits:  # however it ended: they hold their stores, and are made anew
            _of_ended_fits.pop().close()

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take note of what is to be restored, once there are optimizers."""
        self._references = checkpoint.get("optimizer_states", ())

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore what the file names, parameters included.

        Raises:
            MismatchError: It is not there, or others that are still wanted would be given up.
            PinError: One that would be given up is pinned by someone else.
            OffloadError: There is no optimizer of this package.
        """
        optimizers = dict(_offloaded(trainer))
        if not optimizers:
            raise OffloadError(
                "configure_optimizers() returned no optimizer of this package, so there is "
                "nothing that OffloadCallback could do: return an offload.AdamW, or leave it out"
            )
        loaded = str(trainer.ckpt_path or "")
        references, self._references = self._references, ()
        for index, reference in enumerate(references):
            if index in optimizers and is_reference(reference):
                self._restore(optimizers[index], reference, loaded)
        for optimizer in optimizers.values():
            _mend_pins(optimizer, loaded)
        if self._random is not None:
            _set_random_states(self._random)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take note of the step that is there already."""
        self._logged_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """In the middle of an epoch, undo what making its iterator anew has drawn."""
        if self._random is not None and batch_idx > 0:
            _set_random_states(self._random)
        self._random = None

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log statistics where Lightning logs."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set where none looks
        if not (self._log_stats and trainer.loggers and every):
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # where its own metrics are
        stepped, self._logged_step = trainer.global_step != self._logged_step, trainer.global_step
        if not stepped or (step + 1) % every:
            return
        optimizers = list(_offloaded(trainer))
        scalars: dict[str, float] = {}
        for index, optimizer in optimizers:
            prefix = "offload/" if len(optimizers) == 1 else f"offload{index}/"
            scalars |= optimizer.stats().scalars(prefix)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=step)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the random states, of which Lightning saves none."""
        return {"random": _random_states()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take note of random states; they are set when training is about to begin."""
        self._random = state_dict["random"]

    def _restore(
        self, optimizer: OffloadedOptimizer, reference: Mapping[str, Any], loaded: str
    ) -> None:
        engine = optimizer._live_engine()
        wanted, _ = read_reference(dict(reference))
        if engine.position.is_same_as(wanted):
            return  # configure_optimizers() has gone there already
        if not wanted.sealed:
            raise MismatchError(
                f"{loaded} names step {wanted.step}, which was not sealed when the file was "
                "written: the Trainer that wrote it had no OffloadCallback. What it has is the "
                "parameters (load_from_checkpoint). To continue from the newest checkpoint of the "
                "store, call restore() in configure_optimizers() and fit without ckpt_path"
            )
        try:
            found = find_sealed(engine.store, wanted, engine.position)
        except MismatchError as error:
            raise MismatchError(f"{loaded}: {error}") from error
        generation = found.manifest.generation
        newer = [c for c in engine.store.checkpoints if c.manifest.generation > generation]
        reasons = {c.path: _wanted_by(engine.store, c, loaded) for c in newer}
        wanted_by = {path: reason for path, reason in reasons.items() if reason}
        if wanted_by and not self._discard_newer:
            listed = "; ".join(f"{path}, {reason}" for path, reason in wanted_by.items())
            raise MismatchError(
                f"{loaded} names {found.path}, and the store has newer checkpoints that are still "
                f"wanted: {listed}. Continue from one of those, or pass "
                "OffloadCallback(discard_newer=True) to withdraw them and go on from here"
            )
        for checkpoint in newer:
            for name in _pins_of(engine.store, checkpoint):
                if name.startswith(_PIN_PREFIX):
                    optimizer.unpin(name)
        optimizer.restore(found.path, discard_newer=True)


class _SealingIO(CheckpointIO):
    """Seals before a file is written that names the state, and keeps pins in step with files.

    Args:
        inner: What writes, reads and removes the files.
        trainer: Whose optimizers they are about.
    """

    def __init__(self, inner: CheckpointIO, trainer: pl.Trainer) -> None:
        super().__init__()
        self._inner = inner
        self._trainer = trainer

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a file. When this returns it is durable, and so is what it names.

        Raises:
            SealError: The state could not be sealed. What the file named before, it still names.
            OffloadError: This step has been sealed with a train state that is not a dict.
        """
        file = _name_of_file(path)
        states = checkpoint.get("optimizer_states")  # without them it is the parameters only
        if states is None:
            self._inner.save_checkpoint(checkpoint, path, storage_options)
            return
        optimizers = dict(_offloaded(self._trainer))
        metrics = _monitored(self._trainer) or None
        handles = {
            index: optimizer.checkpoint(_train_state(optimizer, file), metrics=metrics)
            for index, optimizer in optimizers.items()
        }
        sealed = {index: handle.result() for index, handle in handles.items()}
        for index, optimizer in optimizers.items():
            states[index] = optimizer.state_dict()
        self._inner.save_checkpoint(checkpoint, path, storage_options)
        _make_durable(file)
        for index, optimizer in optimizers.items():
            optimizer.pin(_pin_name(file), sealed[index].path)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file."""
        return self._inner.load_checkpoint(path, *args, **kwargs)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, and then its pin."""
        self._inner.remove_checkpoint(path)
        name = _pin_name(_name_of_file(path))
        for _, optimizer in _offloaded(self._trainer):
            if any(pin.name == name for pin in optimizer._live_engine().store.keeping.pins().pins):
                optimizer.unpin(name)

    @override
    def teardown(self) -> None:
        """Take note that a fit has ended; ``Trainer.save_checkpoint`` may still be called."""
        _of_ended_fits.update(optimizer for _, optimizer in _offloaded(self._trainer))
        self._inner.teardown()


def _offloaded(trainer: pl.Trainer) -> Iterator[tuple[int, OffloadedOptimizer]]:
    for index, optimizer in enumerate(trainer.optimizers):
        if isinstance(optimizer, OffloadedOptimizer):
            yield index, optimizer


def _monitored(trainer: pl.Trainer) -> dict[str, float]:
    """Return what files are ranked by, so that ``offload ls`` shows it."""
    names = [getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks]
    values = {name: trainer.callback_metrics.get(name) for name in names if name}
    return {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}


def _train_state(optimizer: OffloadedOptimizer, file: str) -> dict[str, Any]:
    """Return what a checkpoint of the present state holds, if a file is to name it, too."""
    optimizer.synchronize()
    engine = optimizer._live_engine()
    newest = engine.store.newest
    if newest is None or newest.manifest.step != engine.num_steps:
        return {_FILES: [file]}
    with open_checkpoint(newest.path) as checkpoint:
        state = {} if checkpoint.train_state is None else checkpoint.train_state
    if not isinstance(state, dict):
        raise OffloadError(
            f"{newest.path} is of the step that {file} is to name, and checkpoint() was given a "
            f"{type(state).__name__} for its train state: give it a dict, to which what is needed "
            "here can be added"
        )
    return {**state, _FILES: sorted({*_listed_files(state), file})}


def _files_of(checkpoint: StoredCheckpoint, loaded: str) -> list[str]:
    """Return the files that may name a checkpoint; none if it was not sealed for any.

    Args:
        checkpoint: Knows the paths of the files that it was sealed for.
        loaded: The file that is being resumed from: the others may have been moved with it.
    """
    with open_checkpoint(checkpoint.path) as opened:
        files = _listed_files(opened.train_state)
    beside = os.path.dirname(_name_of_file(loaded)) if loaded else ""
    moved = [f"{beside}/{os.path.basename(file)}" for file in files if beside]
    return list(dict.fromkeys([*files, *moved]))


def _listed_files(train_state: Any) -> list[str]:
    listed = train_state.get(_FILES) if isinstance(train_state, dict) else None
    return [f for f in listed if isinstance(f, str)] if isinstance(listed, list) else []


def _wanted_by(store: Store, checkpoint: StoredCheckpoint, loaded: str) -> str:
    """Return why a checkpoint must not be given up without being asked; empty if nobody cares."""
    files = _files_of(checkpoint, loaded)
    if not files:
        return "made by checkpoint()"
    others = [n for n in _pins_of(store, checkpoint) if not n.startswith(_PIN_PREFIX)]
    if others:
        return f"pinned as {others[0]!r}"
    for file in files:
        if (named := _named_by(file)) is None or _identity(checkpoint) in named:
            return f"named by {file}"
    return ""


def _named_by(file: str) -> set[tuple[Any, ...]] | None:
    """Return which checkpoints a file names; None if that cannot be told. Reads no tensor."""
    if "://" in file:
        return None  # not looked for over a network
    try:
        saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = [state for state in saved.get("optimizer_states", ()) if is_reference(state)]
    except FileNotFoundError:
        return set()
    except (OSError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError):
        return None
    return {tuple(state.get(k) for k in ("store", "step", "generation")) for state in found}


def _identity(checkpoint: StoredCheckpoint) -> tuple[Any, ...]:
    manifest = checkpoint.manifest
    return manifest.store_id, manifest.step, manifest.generation


def _mend_pins(optimizer: OffloadedOptimizer, loaded: str) -> None:
    """Pin what files name, and remove pins for files that are gone.

    Files are moved and removed by hand, and a process may be killed between a file and its pin.
    """
    store = optimizer._live_engine().store
    for checkpoint in list(store.checkpoints):
        for file in _files_of(checkpoint, loaded):
            name, named = _pin_name(file), _named_by(file)
            pinned = name in _pins_of(store, checkpoint)
            if named is not None and pinned and not os.path.lexists(file):
                optimizer.unpin(name)
            elif named is not None and not pinned and _identity(checkpoint) in named:
                optimizer.pin(name, checkpoint.path)


def _pins_of(store: Store, checkpoint: StoredCheckpoint) -> tuple[str, ...]:
    return store.keeping.pins().of(checkpoint.path, checkpoint.manifest)


def _pin_name(file: str) -> str:
    """Name the pin for a file: readable, and different for each path."""
    stem = re.sub("[^A-Za-z0-9]+", "-", os.path.basename(file).removesuffix(".ckpt"))[:40]
    return f"{_PIN_PREFIX}{stem}-{hashlib.blake2b(file.encode(), digest_size=5).hexdigest()}"


def _name_of_file(path: Any) -> str:
    name: str = os.fspath(path)
    return name if "://" in name else os.path.abspath(name)


def _make_durable(file: str) -> None:
    """Sync a local file and its directory: an older one may be removed next."""
    if os.path.isfile(file):
        for path in (file, os.path.dirname(file)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _random_states() -> dict[str, Any]:
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


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
