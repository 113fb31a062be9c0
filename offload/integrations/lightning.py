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

import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from offload import (
    CheckpointInfo,
    MismatchError,
    OffloadedOptimizer,
    OffloadError,
    Position,
    reference_of,
    usable_metrics,
)
from offload.integrations.ckpt_files import (
    PIN_PREFIX,
    make_durable,
    mend_pins,
    name_of_file,
    pin_name,
    train_state,
    wanted_by,
)

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
        found = {
            optimizers[index]: self._find(optimizers[index], wanted, loaded)
            for index, reference in enumerate(references)
            if index in optimizers and (wanted := reference_of(reference)) is not None
        }
        for optimizer, checkpoint in found.items():  # now that each of them has been found
            if checkpoint is not None:
                _go_back(optimizer, checkpoint)
        for optimizer in optimizers.values():
            optimizer.warn_unsealed = False  # it is sealed before a file is written
            mend_pins(optimizer, loaded)
            if _has_readers(trainer, pl_module):
                optimizer.register_step_post_hook(_let_look)
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

    def _find(
        self, optimizer: OffloadedOptimizer, wanted: Position, loaded: str
    ) -> CheckpointInfo | None:
        """Return the checkpoint that a file names; None if the optimizer is there already.

        Raises:
            MismatchError: As `on_fit_start`. Nothing has been changed.
        """
        if optimizer.position.is_same_as(wanted):
            return None
        if not wanted.sealed:
            raise MismatchError(
                f"{loaded} names step {wanted.step}, which was not sealed when the file was "
                "written: the Trainer that wrote it had no OffloadCallback. What it has is the "
                "parameters (load_from_checkpoint). To continue from the newest checkpoint of the "
                "store, call restore() in configure_optimizers() and fit without ckpt_path"
            )
        try:
            found = optimizer.find(wanted)
        except MismatchError as error:
            raise MismatchError(f"{loaded}: {error}") from error
        reasons = {c.path: wanted_by(c, loaded) for c in _newer(optimizer, found)}
        listed = "; ".join(f"{path}, {reason}" for path, reason in reasons.items() if reason)
        if listed and not self._discard_newer:
            raise MismatchError(
                f"{loaded} names {found.path}, and the store has newer checkpoints that are still "
                f"wanted: {listed}. Continue from one of those, or pass "
                "OffloadCallback(discard_newer=True) to withdraw them and go on from here"
            )
        return found


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
        file = name_of_file(path)
        states = checkpoint.get("optimizer_states")  # without them it is the parameters only
        if states is None:
            self._inner.save_checkpoint(checkpoint, path, storage_options)
            return
        optimizers = dict(_offloaded(self._trainer))
        metrics = _monitored(self._trainer) or None
        handles = {
            index: optimizer.checkpoint(train_state(optimizer, file), metrics=metrics)
            for index, optimizer in optimizers.items()
        }
        sealed = {index: handle.result() for index, handle in handles.items()}
        for index, optimizer in optimizers.items():
            states[index] = optimizer.state_dict()
        self._inner.save_checkpoint(checkpoint, path, storage_options)
        make_durable(file)
        for index, optimizer in optimizers.items():
            optimizer.pin(pin_name(file), sealed[index].path)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file."""
        return self._inner.load_checkpoint(path, *args, **kwargs)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, and then its pin."""
        self._inner.remove_checkpoint(path)
        name = pin_name(name_of_file(path))
        for _, optimizer in _offloaded(self._trainer):
            if name in optimizer.pins():
                optimizer.unpin(name)

    @override
    def teardown(self) -> None:
        """Take note that a fit has ended; ``Trainer.save_checkpoint`` may still be called."""
        _of_ended_fits.update(optimizer for _, optimizer in _offloaded(self._trainer))
        self._inner.teardown()


def _go_back(optimizer: OffloadedOptimizer, found: CheckpointInfo) -> None:
    """Restore a checkpoint, and give up those that are newer, with the pins for files."""
    for checkpoint in _newer(optimizer, found):
        for name in checkpoint.pins:
            if name.startswith(PIN_PREFIX):
                optimizer.unpin(name)
    optimizer.restore(found, discard_newer=True)


def _newer(optimizer: OffloadedOptimizer, than: CheckpointInfo) -> list[CheckpointInfo]:
    return [c for c in optimizer.checkpoints() if c.generation > than.generation]


_AFTER_A_STEP = (
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
)
"""Hooks of a module that may look at its parameters between a step and the next forward."""

_READERS = ("WeightAveraging", "StochasticWeightAveraging")
"""Callbacks of Lightning that do."""


def _has_readers(trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Return whether there is code that may look at parameters before the next forward."""
    if any(
        getattr(type(pl_module), n) is not getattr(pl.LightningModule, n) for n in _AFTER_A_STEP
    ):
        return True
    classes = [type(callback).__mro__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return any(
        not mro[0].__module__.startswith(("lightning.", "pytorch_lightning.", "offload."))
        or any(kind.__name__ in _READERS for kind in mro)
        for mro in classes
    )


def _let_look(*_: object) -> None:
    """Do nothing: if there is a hook, a step waits where it does not see who reads parameters."""


def _offloaded(trainer: pl.Trainer) -> Iterator[tuple[int, OffloadedOptimizer]]:
    for index, optimizer in enumerate(trainer.optimizers):
        if isinstance(optimizer, OffloadedOptimizer):
            yield index, optimizer


def _monitored(trainer: pl.Trainer) -> dict[str, float]:
    """Return what files are ranked by, so that ``offload ls`` shows it."""
    names = [getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks]
    return usable_metrics({name: trainer.callback_metrics.get(name) for name in names if name})


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
