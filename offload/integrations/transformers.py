"""Bridge to the Trainer of Hugging Face transformers, version 5.

offloading = OffloadCallback(close=True)
trainer = Trainer(
    model,
    args,
    train_dataset=data,
    optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(directory="run"),
    callbacks=[offloading],
)
trainer.train(resume_from_checkpoint=latest_checkpoint(args.output_dir, "run"))

The Trainer writes ``checkpoint-N`` in this order: model, ``optimizer.pt``, scheduler, random
states, ``trainer_state.json``. Then it removes old folders, and then it calls ``on_save``. The
checkpoint that ``optimizer.pt`` refers to must be durable before an older folder is removed. So it
is sealed and pinned when the Trainer asks for the state dict. At ``on_save`` the checkpoints of
removed folders are unpinned.

With several processes all of them seal, but with DistributedDataParallel only the first one asks
for the state dict. The others seal at ``on_save``, which is the next call that they get. Until then
the first one waits for them. With FSDP2 all of them ask.
"""

from __future__ import annotations

import os
from typing import Any, Literal, cast

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offload import OffloadedOptimizer, OffloadError, Options, Retention, usable_metrics
from offload.integrations.first_rank import num_hosts_of_launcher, require_ranks
from offload.integrations.folders import Folders, make_steps_wait, unwrap
from offload.integrations.hf_trainer import (
    ATTACH,
    Directories,
    folder_of,
    fsdp_version,
    has_readers,
    positions_in,
    require_processes,
    resumed_from,
)
from offload.integrations.hf_trainer import handler as handler_of_call
from offload.integrations.hf_trainer import latest_checkpoint as latest_checkpoint
from offload.integrations.training_log import TrainingLog

_REMEDY = (
    "Pass OffloadCallback(discard_newer=True) to withdraw them, or remove those folders; to "
    "continue from the newest one, pass resume_from_checkpoint=latest_checkpoint(...)"
)


class OffloadCallback(TrainerCallback):
    """Callback that makes the Trainer's folders refer to sealed, pinned checkpoints of the store.

    - When the Trainer saves, the state is sealed, and pinned as ``transformers-<step>``, before
      ``optimizer.pt`` is written. The pin is removed when the Trainer has removed the folder.
    - When the Trainer resumes, it continues from exactly the checkpoint that the folder refers to.
      If the folder is of a run with a torch optimizer, its state is streamed into the store.
    - Metrics of an evaluation at the same step (``eval_loss``) are in the checkpoint: ``offload
      ls`` shows them, and `BestBy` can rank by them.
    - The log has five numbers of the optimizer: seconds per step, rates of reading and writing,
      the part of the time that is spent waiting for drives, and bytes written. TensorBoard, W&B
      and other callbacks of ``report_to`` get them, too, because this callback moves itself to the
      front of the Trainer's list when training begins. Totals go on after a resume.

    With several processes, each has a callback of its own.

    Args:
        discard_newer: Whether resuming from an older folder may withdraw checkpoints that newer
            folders refer to. Without it, such a resume is refused. Checkpoints of folders that were
            never finished, or have been removed, are withdrawn in any case.
        log_stats: True for the five numbers of `Stats.scalars` in the log, ``"all"`` for every
            other value of `Stats` that is not zero besides, False for none.
        close: Whether to close the optimizer at the end of training. An error that ends the
            training leaves it open.

    Raises:
        ValueError: `log_stats` is something else.
    """

    def __init__(
        self,
        *,
        discard_newer: bool = False,
        log_stats: bool | Literal["all"] = True,
        close: bool = False,
    ) -> None:
        if log_stats not in (True, False, "all"):
            raise ValueError(f'log_stats must be True, False or "all", got {log_stats!r}')
        self._folders = Folders(
            "transformers",
            positions_in,
            discard_newer=discard_newer,
            remedy=_REMEDY,
            attach=ATTACH,
        )
        self._log_stats = log_stats
        self._close = close
        self._log: TrainingLog | None = None
        """Numbers of the present optimizer for the log."""
        self._measured: dict[int, dict[str, float]] = {}
        """Metrics of the last evaluations, by their step. There is at most one step."""
        self._sealed = ""
        """Folder that the present state has been sealed for; empty before the first one."""
        self._args: TrainingArguments | None = None
        self._optimizer: OffloadedOptimizer | None = None
        self._created: OffloadedOptimizer | None = None
        self._load_hook: RemovableHandle | None = None
        self._save_hooks: list[RemovableHandle] = []

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
        """Return the argument ``optimizer_cls_and_kwargs`` for a Trainer that makes the optimizer.

        This is needed with ``model_init``, since the Trainer then refuses ``optimizers=``. The
        arguments are those of `create_optimizer`.

        Returns:
            A factory and its keyword arguments. The Trainer accepts a factory, although its own
            annotation names only a class.
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
            self._created.close()  # a previous train() made it, and a store has one writer
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
        """Note the arguments, and put a hook on the optimizer if it exists already."""
        self._args = args
        self._folders.use(args.output_dir or "")
        if isinstance(kwargs.get("optimizer"), torch.optim.Optimizer):
            self._follow(_unwrap(kwargs["optimizer"]))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Begin to seal the state whenever the Trainer saves.

        Raises:
            TypeError: The optimizer is not one of this package.
            OffloadError: This is a trial of a hyper-parameter search; or there are several
                processes, and the arguments or the optimizer do not allow that.
        """
        if state.is_hyper_param_search:
            raise OffloadError(
                "hyperparameter_search() with OffloadCallback: trials would share one directory. "
                "Run each trial as a training of its own, with its own directory"
            )
        optimizer = _unwrap(kwargs.get("optimizer"))
        require_processes(args)
        require_ranks(optimizer, args.world_size, num_hosts_of_launcher(), "the Trainer")
        if fsdp_version(args) and not optimizer.torch_form:
            raise OffloadError(
                "the Trainer has asked for the state of an FSDP2 model before OffloadCallback saw "
                "the optimizer: pass the Trainer optimizer_cls_and_kwargs=offloading."
                "optimizer_cls_and_kwargs(directory=...) of this OffloadCallback"
            )
        log = self._follow(optimizer)
        self._remove_save_hooks()
        self._sealed = ""
        self._measured = {}  # metrics of another training, perhaps with the same number of steps

        def seal(asked: torch.optim.Optimizer) -> None:
            """Seal the state for the Trainer's folder, if the Trainer asks for the state dict."""
            folder = folder_of(args.output_dir or "", state.global_step)
            # Other code may ask for the state dict, too. The Trainer first makes the folder.
            if asked is not optimizer or not os.path.isdir(folder):
                return
            if optimizer.num_ranks == 1 or self._sealed != folder:
                self._seal(optimizer, folder, state, log)

        self._save_hooks = [
            optimizer.register_state_dict_pre_hook(seal),
            optimizer.register_step_pre_hook(self._before_step),
        ]
        handler = handler_of_call()
        if has_readers(handler):
            self._save_hooks.append(make_steps_wait(optimizer))
        if handler is not None and self in handler.callbacks:
            # Callbacks of `report_to` come first in the list, and get logs as they are then.
            others = [callback for callback in handler.callbacks if callback is not self]
            handler.callbacks = [self, *others]
        self._folders.sync(optimizer)
        log.start(optimizer.stats(), self._folders.totals(optimizer))

    def _seal(
        self, optimizer: OffloadedOptimizer, folder: str, state: TrainerState, log: TrainingLog
    ) -> None:
        self._folders.seal(
            optimizer,
            folder,
            self._measured.get(state.global_step),
            totals=lambda: log.totals(optimizer.stats()),
        )
        self._sealed = folder

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Add the folder's small files to its checkpoint, and unpin what has lost its folder.

        With several processes, those that the Trainer has not asked for the state dict seal first.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        folder = folder_of(args.output_dir or "", state.global_step)
        is_late = optimizer.num_ranks > 1 and self._sealed != folder
        if is_late and self._log is not None and not args.save_only_model:
            self._seal(optimizer, folder, state, self._log)
        self._folders.finish(optimizer)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Note the metrics, for the checkpoint that is saved after this step."""
        before = self._measured.get(state.global_step, {})  # metrics of another dataset
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
        """Add the optimizer's numbers to logs that have a loss."""
        optimizer, log = self._optimizer, self._log
        if not self._log_stats or optimizer is None or log is None:
            return
        if logs is None or "loss" not in logs:
            return
        stats = optimizer.stats()
        numbers = log.all_numbers(stats) if self._log_stats == "all" else log.main_numbers(stats)
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)  # a copy that the Trainer made before this call

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Wait for a step beside the model, and stop sealing when the Trainer saves.

        With ``close=True`` the optimizer is closed as well.

        Raises:
            OffloadError: Closing failed; see `OffloadedOptimizer.close`.
        """
        self._remove_save_hooks()
        if self._optimizer is not None:
            self._optimizer.synchronize()
            self._folders.finish(self._optimizer)  # not every save calls `on_save`
            if self._close:
                self._optimizer.close()

    def _follow(self, optimizer: OffloadedOptimizer) -> TrainingLog:
        """Put a hook on the optimizer, and return the numbers for its log."""
        if self._load_hook is not None:
            self._load_hook.remove()
        if self._log is None or optimizer is not self._optimizer:
            self._log = TrainingLog(optimizer.stats())
        self._optimizer = optimizer
        if self._args is not None and fsdp_version(self._args):
            optimizer.torch_form = True
        self._load_hook = optimizer.register_load_state_dict_pre_hook(self._before_loading)
        return self._log

    def _before_loading(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if folder := resumed_from():
            self._folders.use(os.path.dirname(os.path.abspath(folder)))
        self._folders.go_back(_unwrap(optimizer), state_dict)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Finish a save that did not call `on_save`, as on SIGTERM, while the state is the same."""
        if self._folders.is_unfinished:
            self._folders.finish(_unwrap(optimizer))

    def _remove_save_hooks(self) -> None:
        while self._save_hooks:
            self._save_hooks.pop().remove()


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
    """Make the optimizer that the Trainer would make from its arguments, with its state on SSD.

    Class, hyper-parameters and the two groups (with and without weight decay) are the Trainer's
    own. ``fused`` is left out, since fused kernels cannot be streamed exactly. On a CPU the results
    are then those of ``optim="adamw_torch"`` without ``fused``.

    Args:
        model: Model to train.
        args: Arguments of the Trainer.
        directory: Directory of the store; see `OffloadedOptimizer`.
        optimizer_class: Element-wise torch class, instead of the one that ``args.optim`` names.
        keep: Retention policy; see `OffloadedOptimizer`. 1 is enough, since the checkpoints of the
            Trainer's folders are pinned.
        fresh: Start over in a store that has checkpoints; see `OffloadedOptimizer`.
        options: Settings of the machine; see `Options`.
        hyper: Hyper-parameters that override those in `args`.

    Raises:
        UnsupportedOptimizerError: The class needs more than one element at a time.
        OffloadError: The optimizer cannot be made, see `OffloadedOptimizer`; or the arguments are
            not supported with several processes.
    """
    require_processes(args)
    if optimizer_class is None:
        named, chosen = Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, model))
        optimizer_class, defaults = named, {k: v for k, v in chosen.items() if k != "fused"}
    else:
        defaults = {"lr": args.learning_rate}
    # The method does not use its `self`, so it needs no Trainer.
    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
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


def _unwrap(optimizer: object) -> OffloadedOptimizer:
    return unwrap(
        optimizer,
        "pass the Trainer optimizers=(create_optimizer(model, args, directory=...), None), or "
        "optimizer_cls_and_kwargs=offloading.optimizer_cls_and_kwargs(directory=...) of this "
        "OffloadCallback",
    )
