"""Hugging Face transformers' Trainer, version 5.

offloading = OffloadCallback()
trainer = Trainer(
    model,
    args,
    train_dataset=data,
    optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(directory="run"),
    callbacks=[offloading],
)
trainer.train(resume_from_checkpoint=latest_checkpoint(args.output_dir, "run"))

The Trainer writes ``checkpoint-N`` in this order: model, ``optimizer.pt``, scheduler, random
states, ``trainer_state.json``; then it removes old folders; then comes ``on_save``. What
``optimizer.pt`` refers to must be durable before an older folder is gone, so it is sealed and
pinned when the Trainer asks for the state dict; at ``on_save``, what was removed is unpinned.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from offload import (
    CheckpointError,
    OffloadedOptimizer,
    OffloadError,
    Options,
    Position,
    Retention,
    StoreError,
    list_checkpoints,
    open_checkpoint,
    reference_of,
    usable_metrics,
    verify_before_resume,
)
from offload.integrations.folders import Folders, unwrap

Directory = str | os.PathLike[str]
Directories = Directory | Sequence[Directory]
"""A store: its directory, or one on each drive."""

_REMEDY = (
    "Pass OffloadCallback(discard_newer=True) to give them up, or remove those folders; to go on "
    "from the newest one, pass resume_from_checkpoint=True"
)

_ATTACH = "Pass callbacks=[OffloadCallback()] to the Trainer that saves"


class OffloadCallback(TrainerCallback):
    """Makes the Trainer's checkpoints refer to sealed, pinned checkpoints of the store.

    - When the Trainer saves, the state is sealed, and pinned as ``transformers-<step>``, before
      ``optimizer.pt`` is written. The pin is removed when the Trainer has removed the folder.
    - When it resumes, exactly the checkpoint that the folder refers to is gone on from. A folder
      of a run with a torch optimizer is taken over: its state is streamed into the store.
    - What an evaluation of the same step measured (``eval_loss``) is in the checkpoint: ``offload
      ls`` shows it, and `BestBy` can rank by it.
    - What the optimizer has moved and waited for is in the logs, as ``offload/<name>``; see
      `Stats`. Callbacks that come later in the list get it, too.

    Args:
        discard_newer: Resuming from an older folder may give up checkpoints that newer folders
            refer to. Without it that is refused. Those of folders that were never finished, or have
            been removed, are given up in any case.
        log_stats: Whether to add `Stats` to the logs.
    """

    def __init__(self, *, discard_newer: bool = False, log_stats: bool = True) -> None:
        self._folders = Folders(
            "transformers",
            _is_complete,
            discard_newer=discard_newer,
            remedy=_REMEDY,
            attach=_ATTACH,
        )
        self._log_stats = log_stats
        self._measured: dict[int, dict[str, float]] = {}
        """What the last evaluations found, by the step that they were of; of one step only."""
        self._args: TrainingArguments | None = None
        self._optimizer: OffloadedOptimizer | None = None
        self._created: OffloadedOptimizer | None = None
        self._loading: RemovableHandle | None = None
        self._saving: RemovableHandle | None = None
        self._looking: RemovableHandle | None = None

    def optimizer_cls_and_kwargs(
        self,
        *,
        directory: Directories,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        keep: int | Retention = 1,
        fresh: bool = False,
        options: Options = Options(),  # noqa: B008  (frozen)
        **hyper: Any,
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return what `Trainer` takes under this name: it then makes the optimizer itself.

        Needed with ``model_init``, where ``optimizers=`` is refused. Arguments are those of
        `create_optimizer`. The first of what is returned is a factory, which the Trainer takes as
        well, though its own annotation names a class only.
        """
        settings = {
            "directory": directory,
            "optimizer_class": optimizer_class,
            "keep": keep,
            "fresh": fresh,
            "options": options,
            **hyper,
        }
        # The Trainer calls a factory twice, the second time with the model.
        return cast("type[torch.optim.Optimizer]", lambda: self._create), settings

    def _create(self, model: torch.nn.Module, **settings: Any) -> OffloadedOptimizer:
        if self._args is None:
            raise OffloadError(
                "the callback that made this factory is not the Trainer's: pass it in callbacks=[]"
            )
        if self._created is not None:
            self._created.close()  # of another train(): the store has one writer
        self._created = create_optimizer(model, self._args, **settings)
        self._follow(self._created)
        return self._created

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Begin to follow the optimizer, if there is one already."""
        self._args = args
        if isinstance(kwargs.get("optimizer"), torch.optim.Optimizer):
            self._follow(_unwrap(kwargs["optimizer"]))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Begin to seal what the Trainer saves.

        Raises:
            TypeError: The optimizer is none of this package.
            OffloadError: This is a trial of a hyper-parameter search.
        """
        if state.is_hyper_param_search:
            raise OffloadError(
                "hyperparameter_search() with OffloadCallback: trials would share one directory. "
                "Run each trial as a training of its own, with its own directory"
            )
        optimizer = _unwrap(kwargs.get("optimizer"))
        self._follow(optimizer)
        self._stop_saving()
        self._measured = {}  # of the same number of steps, perhaps, but in another training

        def seal(asked: torch.optim.Optimizer) -> None:
            folder = _folder(args.output_dir or "", state.global_step)
            # Others may ask for the state dict, too; the Trainer has made its folder before.
            if asked is optimizer and os.path.isdir(folder):
                self._folders.seal(optimizer, folder, self._measured.get(state.global_step))

        self._saving = optimizer.register_state_dict_pre_hook(seal)
        if _has_readers(sys._getframe(1).f_locals.get("self")):
            self._looking = optimizer.register_step_post_hook(_let_look)
        self._folders.sync(optimizer)

    def on_save(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Let go of checkpoints whose folders ``save_total_limit`` has removed."""
        if self._optimizer is not None:
            self._folders.sync(self._optimizer)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Take note of what was measured, for the checkpoint that is saved after this step."""
        before = self._measured.get(state.global_step, {})  # of another dataset
        best = args.metric_for_best_model or "loss"
        first = best if best.startswith("eval_") else f"eval_{best}"
        self._measured = {
            state.global_step: usable_metrics({**before, **(metrics or {})}, (first, "eval_loss"))
        }

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Add what the optimizer has moved and waited for, where a loss is logged."""
        if not self._log_stats or self._optimizer is None or logs is None or "loss" not in logs:
            return
        numbers = self._optimizer.stats().scalars()
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)  # the Trainer has made a copy before

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Wait for what runs beside the model, and stop sealing what is saved."""
        self._stop_saving()
        if self._optimizer is not None:
            self._optimizer.synchronize()
            self._folders.sync(self._optimizer)

    def _follow(self, optimizer: OffloadedOptimizer) -> None:
        if self._loading is not None:
            self._loading.remove()
        self._optimizer = optimizer
        self._loading = optimizer.register_load_state_dict_pre_hook(self._before_loading)

    def _before_loading(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        self._folders.go_back(_unwrap(optimizer), state_dict)
        if reference_of(state_dict) is not None or "param_groups" not in state_dict:
            return None
        # Of a run without this package, which by default used the fused kernel.
        groups = [
            {**group, "fused": None} if group.get("fused") else group
            for group in state_dict["param_groups"]
        ]
        return {**state_dict, "param_groups": groups}

    def _stop_saving(self) -> None:
        for handle in (self._saving, self._looking):
            if handle is not None:
                handle.remove()
        self._saving = self._looking = None


def create_optimizer(
    model: torch.nn.Module,
    args: TrainingArguments,
    *,
    directory: Directories,
    optimizer_class: type[torch.optim.Optimizer] | None = None,
    keep: int | Retention = 1,
    fresh: bool = False,
    options: Options = Options(),  # noqa: B008  (frozen)
    **hyper: Any,
) -> OffloadedOptimizer:
    """Make the optimizer that the Trainer would make of its arguments, with its state on SSD.

    Class, hyper-parameters and the two groups (with and without weight decay) are the Trainer's
    own. ``fused`` is left out, as fused kernels cannot be streamed exactly; on a CPU results then
    are those of ``optim="adamw_torch"`` without it.

    Args:
        model: What is trained.
        args: Of the Trainer.
        directory: See `OffloadedOptimizer`.
        optimizer_class: An element-wise torch class, instead of the one that ``args.optim`` names.
        keep: See `OffloadedOptimizer`. What the Trainer keeps is pinned, so 1 will do.
        fresh: See `OffloadedOptimizer`.
        options: See `Options`.
        hyper: Hyper-parameters that go before those of `args`.

    Raises:
        UnsupportedOptimizerError: The class needs more than one element at a time.
    """
    if optimizer_class is None:
        named, chosen = Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, model))
        optimizer_class, defaults = named, {k: v for k, v in chosen.items() if k != "fused"}
    else:
        defaults = {"lr": args.learning_rate}
    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))  # uses no Trainer
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": hyper.get("weight_decay", args.weight_decay)},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if name in decayed else 1]["params"].append(parameter)
    return OffloadedOptimizer(
        optimizer_class,
        groups,
        directory=directory,
        model=model,
        keep=keep,
        fresh=fresh,
        options=options,
        **{**defaults, **hyper},
    )


def latest_checkpoint(
    output_dir: str | os.PathLike[str], directory: Directories, *, verify: bool = False
) -> str | None:
    """Return the newest folder that training can go on from; None if there is none yet.

    To be passed as ``resume_from_checkpoint``. In contrast to ``True`` it passes over folders that
    a killed process has not finished, and over those whose checkpoint the store does not have any
    more; and it allows for a first start. If it passes over one that was saved without
    `OffloadCallback`, it warns.

    Args:
        output_dir: Of the Trainer.
        directory: The optimizer's.
        verify: Read every byte of the checkpoint, 14 per bf16 parameter with Adam, before its
            folder is returned. One that is damaged is quarantined and passed over, with a warning.

    Raises:
        DamagedError: With `verify`: the one before is damaged as well, and is not quarantined. A
            machine with bad memory would condemn one after the other.
    """
    try:
        names = os.listdir(output_dir)
    except FileNotFoundError:
        return None
    steps = (name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for name in names)
    numbers = sorted((int(step) for step in steps if step.isdecimal()), reverse=True)
    store, *parts = _paths(directory)
    try:
        infos = list_checkpoints(store)
    except (CheckpointError, FileNotFoundError):
        infos = []
    sealed = {info.generation: info.path for info in infos if info.valid}
    for number in numbers:
        folder = _folder(output_dir, number)
        position = _position(folder) if _is_complete(folder) else None
        if position is None:
            continue
        if not position.sealed:
            warnings.warn(
                f"passing over {folder}: it was saved without sealing the state, which is lost. "
                f"{_ATTACH}",
                RuntimeWarning,
                stacklevel=2,
            )
        elif position.generation in sealed:
            path = sealed[position.generation]
            found = _damage(path, parts) if verify else ""
            if not found:
                return folder
            warnings.warn(f"passing over {folder}: {found}", RuntimeWarning, stacklevel=2)
    return None


def _paths(directory: Directories) -> list[str]:
    given = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    if not given:
        raise ValueError("directory must be a path, or a list of at least one")
    return [os.path.abspath(os.fspath(path)) for path in given]


def _damage(path: str, parts: Sequence[str]) -> str:
    """Return what is wrong with a checkpoint, and quarantine it; empty if nothing is.

    Args:
        path: Of the checkpoint.
        parts: The optimizer's directories on the other drives.

    Raises:
        DamagedError: It is damaged, and one that was made after it is quarantined.
        StoreError: It cannot be read.
    """
    with open_checkpoint(path, parts=parts or None) as opened:
        report = verify_before_resume(opened)
    if report.unreadable:
        raise StoreError(errno.EIO, "; ".join(report.unreadable), path)
    return report.problems[0] if report.problems else ""


def _has_readers(handler: object) -> bool:
    """Return whether callbacks may look at parameters between a step and the next forward.

    Args:
        handler: What calls the callbacks of a Trainer.
    """
    callbacks = getattr(handler, "callbacks", None)
    return callbacks is None or not all(
        type(callback).__module__.startswith(("transformers.", "offload."))
        for callback in callbacks
    )


def _let_look(*_: object) -> None:
    """Do nothing: if there is a hook, a step waits where it does not see who reads parameters."""


def _folder(output_dir: str | os.PathLike[str], step: int) -> str:
    return os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _position(folder: str) -> Position | None:
    """Return what a complete folder refers to; None if it has a torch optimizer's state."""
    return reference_of(torch.load(os.path.join(folder, OPTIMIZER_NAME), weights_only=True))


def _is_complete(folder: str) -> bool:
    """Return whether the Trainer has finished a folder: it writes its own state last."""
    try:
        with open(os.path.join(folder, TRAINER_STATE_NAME), encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError):
        return False
    return os.path.isfile(os.path.join(folder, OPTIMIZER_NAME))


def _unwrap(optimizer: object) -> OffloadedOptimizer:
    return unwrap(
        optimizer,
        "pass the Trainer optimizers=(create_optimizer(model, args, directory=...), None), or "
        "optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(directory=...) of this "
        "OffloadCallback",
    )
