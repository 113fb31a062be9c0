"""Bridge to Lightning: each ``.ckpt`` of the Trainer names a sealed checkpoint of the store.

A ``.ckpt`` holds the parameters and, as ``optimizer_states``, a small reference to a checkpoint of
the store. `OffloadCallback` ensures that this checkpoint exists when a ``.ckpt`` is written or
loaded:

- Saving: the state is sealed and durable before the file is written. When the file is durable, too,
  its pin moves from the checkpoint that it named before to the one that it names now.
- Removing: when ``ModelCheckpoint`` removes a file, the file's pin is removed as well.
- Loading: the exact checkpoint that the file names is restored before Lightning loads the rest.

So at any time each ``.ckpt`` names a checkpoint that is sealed, and either pinned or the newest,
which is always kept. A killed process can leave a file whose pin has not moved yet; the next fit
corrects this. It can also leave a checkpoint whose file was never written. No file can name such a
checkpoint, so it is withdrawn if the next fit continues from an older one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import override

from offload import (
    CheckpointInfo,
    MismatchError,
    OffloadedOptimizer,
    OffloadError,
    Position,
    Stats,
    reference_of,
)
from offload.integrations.first_rank import decide, require_ranks
from offload.integrations.folders import make_steps_wait
from offload.integrations.lightning_files import (
    PIN_PREFIX,
    SealedFiles,
    mend_pins,
    offloaded,
    optimizers_of_ended_fits,
    random_states,
    require_ranks_of,
    set_random_states,
    why_in_use,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError:  # the older package has the same code under another name
        import pytorch_lightning as pl


class OffloadCallback(pl.Callback):
    """Callback that makes each ``.ckpt`` name a checkpoint: ``Trainer(callbacks=[...])``.

    As without this callback, ``configure_optimizers`` returns the optimizer, ``ModelCheckpoint``
    decides when to save and which files to keep, and ``fit(ckpt_path=...)`` continues to the same
    losses. The random states of Python, numpy and torch are saved and restored as well.

    Args:
        discard_newer: Whether ``fit(ckpt_path=...)`` may go back to an older ``.ckpt`` although the
            store has checkpoints of newer files, or checkpoints that the user has made. These are
            withdrawn then, and newer ``.ckpt`` files cannot be resumed from any more.
        log_stats: Whether the Trainer's loggers get ``stats().scalars()``, every
            ``log_every_n_steps``; ``"all"`` for all numbers of `Stats`.

    Raises:
        ValueError: `log_stats` is something else.
    """

    def __init__(
        self, *, discard_newer: bool = False, log_stats: bool | Literal["all"] = True
    ) -> None:
        if log_stats not in (True, False, "all"):
            raise ValueError(f'log_stats must be True, False or "all", got {log_stats!r}')
        self._discard_newer = discard_newer
        self._log_stats = log_stats
        self._logged_step = 0
        self._logged: dict[int, Stats] = {}
        """Statistics of each optimizer at the last log."""
        self._is_late = False
        """Whether the strategy loads files after `on_fit_start`."""
        self._references: Sequence[Any] = ()
        """State dict of each optimizer in the file that is being loaded."""
        self._random: Mapping[str, Any] | None = None
        """Random states of the file that is being loaded."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wrap the strategy's methods, so that saving and removing files is noticed.

        Optimizers of earlier fits in this process are closed.

        Raises:
            OffloadError: The Trainer's strategy for several processes is not supported, or files
                are written asynchronously.
        """
        if stage != "fit":
            return
        if trainer.world_size > 1:
            require_ranks_of(trainer)
        self._references, self._random = (), None
        self._logged = {}
        if any(
            kind.__name__ == "AsyncCheckpointIO"
            for kind in type(trainer.strategy.checkpoint_io).__mro__
        ):
            raise OffloadError(
                "AsyncCheckpointIO may still write a .ckpt when the next one is requested, so "
                "the checkpoint that each .ckpt refers to cannot be determined: remove it. It "
                "gains little, because the .ckpt is small without the optimizer's state"
            )
        SealedFiles.install(trainer, self.state_key)
        # These optimizers hold their stores, however their fits ended, and this fit makes new ones.
        while optimizers_of_ended_fits:
            optimizers_of_ended_fits.pop().close()

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note the references to restore; there are no optimizers yet."""
        self._references = checkpoint.get("optimizer_states", ())

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the checkpoints that the file names, with their parameters.

        Raises:
            MismatchError: A checkpoint does not exist, or newer ones that are still in use would
                be withdrawn.
            PinError: A checkpoint that would be withdrawn has a pin that is not of a file.
            OffloadError: There is no optimizer of this package.
        """
        optimizers = dict(offloaded(trainer))
        if not optimizers:
            raise OffloadError(
                "configure_optimizers() returned no optimizer of this package, so OffloadCallback "
                "has nothing to do: return an offload.AdamW, or remove the callback"
            )
        loaded = str(trainer.ckpt_path or "")
        references, self._references = self._references, ()
        self._is_late = trainer.strategy.restore_checkpoint_after_setup
        for optimizer in optimizers.values():
            require_ranks(optimizer, trainer.world_size, trainer.num_nodes, "Lightning")
            if self._is_late:  # the strategy is about to load the file, with the optimizer
                optimizer.torch_form = True
                optimizer.register_load_state_dict_pre_hook(
                    partial(self._before_loading, loaded=loaded)
                )
        found = {
            optimizers[index]: self._find(optimizers[index], wanted, loaded)
            for index, reference in enumerate(references)
            if index in optimizers and (wanted := reference_of(reference)) is not None
        }
        for optimizer, checkpoint in found.items():  # only after all of them have been found
            if checkpoint is not None:
                _go_back(optimizer, checkpoint)
        for optimizer in optimizers.values():
            optimizer.warn_unsealed = False  # `SealedFiles` seals before a file is written
            if not self._is_late:
                mend_pins(optimizer, loaded)
            if _has_readers(trainer, pl_module):
                make_steps_wait(optimizer)
        if self._random is not None:
            set_random_states(self._random)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the number of steps taken so far.

        If the strategy has loaded the file only now, pins are corrected only now, too.
        """
        if self._is_late:
            for _, optimizer in offloaded(trainer):
                mend_pins(optimizer, str(trainer.ckpt_path or ""))
        self._logged_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random states again after a resume within an epoch.

        Making the epoch's iterator anew has drawn random numbers.
        """
        if self._random is not None and batch_idx > 0:
            set_random_states(self._random)
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
        """Log statistics of the optimizers at the steps at which Lightning logs."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set outside of the class
        if not (self._log_stats and trainer.loggers and every):
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # Lightning's own axis of metrics
        stepped, self._logged_step = trainer.global_step != self._logged_step, trainer.global_step
        if not stepped or (step + 1) % every:
            return
        optimizers = list(offloaded(trainer))
        scalars: dict[str, float] = {}
        for index, optimizer in optimizers:
            prefix = "offload/" if len(optimizers) == 1 else f"offload{index}/"
            stats, before = optimizer.stats(), self._logged.get(index)
            scalars |= stats.scalars(prefix, since=before, all=self._log_stats == "all")
            self._logged[index] = stats
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=step)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the random states, since Lightning does not save them."""
        return {"random": random_states()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note the random states of a file; they are set when training is about to begin.

        If `on_fit_start` has been called already, they are set at once.
        """
        ranks = state_dict.get("random_of_ranks", ())
        is_same = dist.is_initialized() and len(ranks) == dist.get_world_size()
        self._random = ranks[dist.get_rank()] if is_same else state_dict["random"]
        if self._is_late:
            set_random_states(self._random)

    def _find(
        self, optimizer: OffloadedOptimizer, wanted: Position, loaded: str
    ) -> CheckpointInfo | None:
        """Return the checkpoint that a file names; None if it is the present state.

        Raises:
            MismatchError: The state was not sealed, or the checkpoint does not exist, or newer ones
                that are still in use would be withdrawn. Nothing has been changed.
        """
        present = optimizer.position  # on every rank, since it may wait for a step of all of them
        if present.is_same_as(wanted):
            return None
        return decide(optimizer, lambda: self._find_sealed(optimizer, wanted, loaded))

    def _find_sealed(
        self, optimizer: OffloadedOptimizer, wanted: Position, loaded: str
    ) -> CheckpointInfo:
        """Return the checkpoint that a file names, with the errors of `_find`."""
        if not wanted.sealed:
            raise MismatchError(
                f"{loaded} names step {wanted.step}, which was not sealed when the file was "
                "written: the Trainer that wrote it had no OffloadCallback. It has the parameters "
                "only (load_from_checkpoint reads them). To continue from the newest checkpoint "
                "of the store, call restore() in configure_optimizers() and fit without ckpt_path"
            )
        try:
            found = optimizer.find(wanted)
        except MismatchError as error:
            raise MismatchError(f"{loaded}: {error}") from error
        reasons = {c.path: why_in_use(optimizer, c, loaded) for c in _newer(optimizer, found)}
        listed = "; ".join(f"{path}, {reason}" for path, reason in reasons.items() if reason)
        if listed and not self._discard_newer:
            raise MismatchError(
                f"{loaded} names {found.path}, and the store has newer checkpoints that are still "
                f"wanted: {listed}. Continue from one of those, or pass "
                "OffloadCallback(discard_newer=True) to withdraw them and go on from here"
            )
        return found

    def _before_loading(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, loaded: str
    ) -> None:
        """Restore the checkpoint that a state dict names, if the strategy loads it by itself."""
        wanted = reference_of(state_dict)
        if wanted is None or not isinstance(optimizer, OffloadedOptimizer):
            return
        found = self._find(optimizer, wanted, loaded)
        if found is not None:
            _go_back(optimizer, found)


def _go_back(optimizer: OffloadedOptimizer, found: CheckpointInfo) -> None:
    """Restore a checkpoint, and withdraw newer ones after removing their pins for files."""
    for checkpoint in _newer(optimizer, found):
        for name in checkpoint.pins:
            if name.startswith(PIN_PREFIX):
                optimizer.unpin(name)
    optimizer.restore(found, discard_newer=True)


def _newer(optimizer: OffloadedOptimizer, than: CheckpointInfo) -> list[CheckpointInfo]:
    return [c for c in optimizer.checkpoints() if c.generation > than.generation]


_HOOKS_AFTER_STEP = (
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
)
"""Hooks of a module that may read its parameters between a step and the next forward."""

_READING_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging")
"""Callbacks of Lightning that read parameters between a step and the next forward."""


def _has_readers(trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Return whether code may read parameters between a step and the next forward."""
    if any(
        getattr(type(pl_module), n) is not getattr(pl.LightningModule, n) for n in _HOOKS_AFTER_STEP
    ):
        return True
    classes = [type(callback).__mro__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return any(
        not mro[0].__module__.startswith(("lightning.", "pytorch_lightning.", "offload."))
        or any(kind.__name__ in _READING_CALLBACKS for kind in mro)
        for mro in classes
    )
