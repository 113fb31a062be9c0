"""The optimizer that a training loop uses, with the interface of torch.optim."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat, TypeAlias, overload

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import _global_optimizer_post_hooks

from offload.ambient import neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.engine import Engine
from offload.engine.finalizer import close_left_open, close_quietly
from offload.engine.reference import is_reference
from offload.engine.seal import SealHandle
from offload.engine.state_dict import load_reference, load_tensors, materialize, refer
from offload.engine.stats import Stats
from offload.engine.strategy import StepStrategy, WaitedFor
from offload.engine.training_state import TrainingState
from offload.errors import OffloadError
from offload.exchange.torch_dicts import (
    MASTERS,
    NUM_STEPS,
    MaterializedState,
    StateElsewhere,
    number_parameters,
)
from offload.format.metrics import take_metrics
from offload.format.train_state import require_state
from offload.model.parameters import check_given_once, check_iterable, describe_parameters
from offload.model.process_groups import ProcessGroup, require_one_process
from offload.options import Options, Overlap
from offload.placement.choose import device_of
from offload.retention.policy import Retention, as_retention
from offload.stream.drives import Directory, as_directories
from offload.update.device_updater import require_steps
from offload.update.rules import UpdateRule

CheckpointName: TypeAlias = int | str | os.PathLike[str] | Checkpoint
"""Designation of a checkpoint by the user: its step number, its path, or the object itself."""


class OffloadedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state lives on SSD, where it also is the checkpoint.

    ``step()`` gives the same bits as the wrapped class with FP32 masters in memory. The memory for
    optimizer state is a fixed ring of buffers: 0 bytes per parameter, instead of 12 for Adam.

    Args:
        optimizer_class: An element-wise torch optimizer class.
        params: Parameters, ``named_parameters()``, or group dictionaries, as torch takes them.
        directory: Directory of the store, on a local drive, used by one process at a time. It is
            created if missing. Nothing is written to it before the first step or checkpoint, but
            free space is checked in the constructor. A list of directories on several drives
            spreads the state over them; the first is the store, and holds the parameters.
        model: Module that gives parameters the names of its state dict. Its buffers and frozen
            parameters are put into checkpoints, so that ``model.safetensors`` is the whole state
            dict. None for parameters only.
        keep: Number of checkpoints to keep, at least 1, or a policy such as
            ``LastK(2) | EverySteps(1000) | BestBy("val_loss")``. The newest checkpoint and pinned
            ones are kept in any case. The disk holds one more slot.
        fresh: Start over in a store that has checkpoints. They are withdrawn once the first new
            checkpoint is durable.
        process_group: `offload.SEPARATE` if this is one of several processes that each train a
            model of their own, in a directory of their own. Without it, several processes are
            refused.
        options: Settings for streaming and storing; see `Options`.
        hyper: Keyword arguments of `optimizer_class`.

    Raises:
        ProcessGroupError: There are several ranks, or `model` is wrapped for several ranks.
        UnsupportedOptimizerError: The class or a flag needs more than one element at a time.
        UnsupportedParameterError: A parameter is complex, sparse, FP64, a DTensor, or on a device
            that is neither the CPU nor a CUDA device; or it shares memory with another trained
            parameter.
        StoreLockedError: Another process trains in this directory.
        VolatileStoreError: The content of the directory would be lost at power-off.
        RemoteStoreError: Another machine, or a program, serves the files of the directory.
        UnreadableError: A file or directory in the store could not be read. Its content may be
            whole. Nothing has been changed.
        StoreFullError: There is no room for ``keep + 1`` slots in addition to the pinned ones.
        PinError: ``fresh=True`` would withdraw a pinned checkpoint.
        StoreError: The directory cannot be used, or is not a store of this kind. The message says
            why.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        directory: Directory | Sequence[Directory],
        model: torch.nn.Module | None = None,
        keep: int | Retention = 2,
        fresh: bool = False,
        options: Options = Options(),  # noqa: B008  (frozen)
        process_group: ProcessGroup = None,
        **hyper: Any,
    ) -> None:
        require_one_process(process_group, model)
        retention = as_retention(keep)
        check_iterable(params)
        if not isinstance(options, Options):
            raise TypeError(
                f"options must be an offload.Options, got {type(options).__name__}: leave it out "
                "for the defaults, or write options=offload.Options(...)"
            )
        close_left_open()
        if options.overlap is not None and model is None:
            raise ValueError(
                f"overlap={options.overlap!r} needs model=, the module that is called in training: "
                "pass the one whose parameters() you gave"
            )
        self._engine: Engine | None = None
        self._materialized: MaterializedState | None = None
        self._running = ""
        on_device = options.placement == "device"
        rule = UpdateRule(optimizer_class, hyper, allow_fused=on_device)
        super().__init__(params, dict(rule.defaults))
        self.state = StateElsewhere()
        if options.overlap == "backward":
            from offload.overlap.backward_hooks import require_no_ddp  # slow, see `_strategy_for`

            require_no_ddp(p for group in self.param_groups for p in group["params"])
        for group in self.param_groups:  # refuse unsupported formats before making a directory
            options.state_format.stored_arrays("F32", rule.rule(group).arrays)
        with neutral():
            describe_parameters(self.param_groups, model, rule, options.state_format)
        if on_device:
            split = options.master == "split"
            require_steps(rule, self.param_groups, options.state_dtype, split=split)
        strategy = _strategy_for(options.overlap, model)
        state = TrainingState(
            rule,
            as_directories(directory),
            model=model,
            keep=retention,
            fresh=fresh,
            options=options,
            device=device_of(self.param_groups),
        )
        try:
            engine = Engine(state, strategy(state))
            engine.require_space(self.param_groups)
        except BaseException:
            state.close()
            raise
        self._engine = engine
        # A garbage-collected optimizer releases its store, without reporting on its last seal.
        self._finalizer = weakref.finalize(self, close_quietly, engine)
        optimizer = weakref.ref(self)
        engine.strategy.attach(lambda: getattr(optimizer(), "param_groups", None))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # compiled, torch's arithmetic would differ in the last bit
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimizer step: stream the state through torch's own update.

        The call returns when the parameters are updated (with ``overlap="forward"``, earlier). The
        last writes may still be in flight, which is safe, since no resume reads them.

        Args:
            closure: Function that re-evaluates the model and returns the loss, as in torch.

        Returns:
            The result of the closure; None without a closure.

        Raises:
            NotRestoredError: The store has checkpoints. Call `restore` first, or construct the
                optimizer with ``fresh=True``.
            SealError: The checkpoint before this step could not be sealed. This step was not
                taken; another call continues.
            BrokenOptimizerError: An earlier step failed half way; call `restore`.
            SlotFullError: The disk is full, because of pins or checkpoints that are kept for good.
                This step was not taken; make room as the message says, and call it again.
            OverlapError: The options' `overlap` does not allow the call, or does not allow a use of
                parameters or gradients before it.
            DamagedError: The state that was read differs from the data written; call `restore`.
            gds.StorageError: Reading or writing failed half way; call `restore`.
        """
        if self._materialized is not None:
            raise OffloadError("step() is not possible within materialized(): leave it first")
        loss = None
        if closure is not None:
            self._live_engine().strategy.require_closures()
            with torch.enable_grad():
                loss = closure()
        with self._exclusive("step") as engine:
            engine.step(self.param_groups)
            if self._optimizer_step_post_hooks or _global_optimizer_post_hooks:
                engine.strategy.before_hooks()
        return loss

    def checkpoint(
        self, train_state: Any = None, *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> SealHandle:
        """Make the present state a checkpoint, in the background.

        No optimizer state is read, copied or moved. The parameters are written beside it, and the
        directory is renamed. The call returns at once. Parameters must not be edited before the
        next `step` unless ``.result()`` of the handle has returned. If the present step has a
        checkpoint already and nothing has changed, that checkpoint is kept. Then only its train
        state is replaced, and its metrics if new ones are given.

        Args:
            train_state: Other values needed to continue (schedulers, random states, position in the
                data), captured by value during the call: JSON-like values, numpy arrays, tensors.
                A bare text, path or number is refused, since it may be meant as a file name or a
                step number.
            metrics: Measured values, such as ``{"val_loss": 1.2}``: at most 16 Python numbers or
                tensors of one element. `BestBy` ranks by them, and ``offload ls`` shows them. A
                value that is not finite is left out, with a `RuntimeWarning`.

        Returns:
            A handle; its ``result()`` returns when the checkpoint is durable.

        Raises:
            SealError: The checkpoint before this one could not be sealed.
            MetricError: A metric is not a number. The message names it. Nothing has been done.
            PinError: Another checkpoint of this step is pinned, and would be replaced.
            SlotFullError: The disk is full, because of pins or checkpoints that are kept for good.
                Make room as the message says, and call this again.
            TrainStateTypeError: `train_state` cannot be stored losslessly, or is a bare text, path
                or number. The class is that of `offload.format`.
            TrainStateTooLargeError: `train_state` is larger than the space reserved for it. The
                class is that of `offload.format`.
            OverlapError: With ``overlap="backward"``, a backward has begun since the last step.
        """
        checked = None if metrics is None else take_metrics(metrics)
        require_state(train_state)
        with self._exclusive("checkpoint") as engine:
            engine.store.keeping.warn_unranked(engine.num_steps, metrics or {})
            if engine.frozen_space.is_due:
                engine.frozen_space.warn(engine.lay_out(self.param_groups))
            return engine.checkpoint(self.param_groups, train_state, checked)

    def pin(self, name: str, checkpoint: CheckpointName | None = None) -> None:
        """Keep a checkpoint until `unpin`, regardless of `keep`. The pin is durable on return.

        A name that is in use moves: the checkpoint that had it is subject to `keep` again. From
        the next step on, the disk holds one more slot.

        Args:
            name: Name of the pin, such as ``"best"``, of letters, digits, ``.``, ``_`` and ``-``.
            checkpoint: Step number or path of a checkpoint, or a `Checkpoint`; None for the newest.
                A checkpoint that is being sealed is waited for.

        Raises:
            SealError: The last checkpoint could not be sealed; nothing has been pinned.
            CheckpointNotFoundError: The checkpoint does not exist, or not any more.
            PinError: The name is not allowed.
            gds.StorageError: The pin could not be written durably.
        """
        with self._exclusive("pin") as engine:
            engine.pin(name, _which(checkpoint))

    def unpin(self, name: str) -> None:
        """Remove a pin, durably. If nothing else keeps its checkpoint, that is recycled later.

        Raises:
            CheckpointNotFoundError: There is no pin of this name. The message lists the pins.
            gds.StorageError: The pin could not be removed durably.
        """
        with self._exclusive("unpin") as engine:
            engine.store.keeping.unpin(name)

    def restore(
        self,
        checkpoint: CheckpointName | None = None,
        *,
        discard_newer: bool = False,
        verify: bool | None = None,
    ) -> Checkpoint | None:
        """Continue from a checkpoint of this store, by default the newest usable one.

        This reads only the parameters and buffers, into the live tensors, and compares them with
        their digests. The optimizer state is read and compared in the first step, or in this call
        with `verify`. Hyper-parameters become those of the checkpoint. Parameters are matched by
        name. A parameter that is frozen now keeps its state; a parameter that was frozen in the
        checkpoint joins with the next step.

        Data with a wrong digest is read a second time. A checkpoint that is found damaged is
        quarantined: marked on the drive as unusable. If `checkpoint` is None, the previous one is
        then taken, with a warning. If that one is damaged as well, it is not marked, and this
        raises, since bad memory would condemn one checkpoint after another.

        Args:
            checkpoint: Step number or path of a checkpoint, or a `Checkpoint`; None for the newest.
            discard_newer: Withdraw checkpoints that are newer than the chosen one. Without it,
                choosing a checkpoint that is not the newest is refused.
            verify: True reads all optimizer state in this call, before any training with it: 12
                bytes per parameter with Adam, which takes as long as the drive needs. Damage of the
                state is then treated like damage of parameters. False leaves the check to the first
                step, which fails at damage. None follows `Options.verify`.

        Returns:
            The checkpoint, with ``.step``, ``.train_state`` and ``.path``. None if the store has
            no checkpoint; training then starts from the beginning.

        Raises:
            MismatchError: Model or optimizer differ from those of the checkpoint, or there are
                newer checkpoints. Nothing has been changed.
            PinError: A newer checkpoint is pinned. Nothing has been changed.
            CheckpointNotFoundError: The checkpoint does not exist.
            DamagedError: The damaged checkpoint was asked for, or is the last one left, or is the
                second damaged one in a row.
            CheckpointError: No checkpoint in the store is usable.
        """
        which = _which(checkpoint)
        with self._exclusive("restore") as engine:
            return engine.restore(
                self.param_groups, which, discard_newer=discard_newer, verify=verify
            )

    def synchronize(self) -> None:
        """Wait for all transfers, and any step or seal in flight, and raise their errors."""
        with self._exclusive("synchronize") as engine:
            engine.synchronize()

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that the present state has seen, including a running one."""
        return self._live_engine().num_steps

    def stats(self) -> Stats:
        """Return the totals of transfers and waiting times so far."""
        return self._live_engine().stats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, also in the middle of training.

        Raises:
            MismatchError: A parameter is given twice; nothing has changed.
            UnsupportedParameterError: A parameter is not supported, as in the constructor; nothing
                has changed.
            gds.StorageError: There is no room for the larger state; nothing has changed.
        """
        super().add_param_group(param_group)
        if self._engine is None:
            return  # torch's constructor adds the first groups by this method
        try:
            with neutral():
                check_given_once(self.param_groups, {})
                self._engine.add_parameters(self.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return a small reference to the state, not the state itself: builtins only, by value.

        The reference names the place of the state, and holds the hyper-parameters. This call makes
        nothing durable. If another process will load the reference, call `checkpoint` first. If
        steps have been taken since the last checkpoint, a `RuntimeWarning` says so, once for each
        optimizer. Within `materialized` the result is the state itself; see `full_state_dict`.
        """
        engine = self._live_engine()
        with neutral():
            engine.join()
        torch_dict = super().state_dict()  # calls the user's hooks
        if self._materialized is not None:
            numbers = number_parameters(self.param_groups)
            masters = self._materialized.masters.items()
            torch_dict[MASTERS] = {numbers[p]: m for p, m in masters if p in numbers}
            torch_dict[NUM_STEPS] = engine.num_steps
            return torch_dict
        with neutral():
            return refer(engine, torch_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """Read all state into memory, and return it as the state dict of the wrapped class.

        ``state`` and ``param_groups`` are as torch would have them with FP32 parameters.
        ``master`` has, by the same numbers, the FP32 values of parameters that are live in 16 bits.
        ``num_steps`` is the number of optimizer steps taken. A parameter that is in no group any
        more has no number, so its state is left out. The whole state must fit in host memory;
        ``offload export`` does without.

        Raises:
            gds.StorageError: The state cannot be read.
            DamagedError: The state differs from the data that was written.
        """
        with self.materialized():
            return self.state_dict()

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Hold the whole state in memory in the block, in ``optimizer.state``, as torch has it.

        Within the block, `state` has FP32 tensors, `state_dict` returns them, and `step` is
        refused. Changes to the tensors are lost; use `load_state_dict` to change the state.

        Raises:
            OffloadError: The block is within another one.
            gds.StorageError: The state cannot be read.
            DamagedError: The state differs from the data that was written.
        """
        if self._materialized is not None:
            raise OffloadError("materialized() is active already: leave the one before first")
        try:
            self._materialize()
            yield
        finally:
            self._materialized = None
            self.state.clear()

    @contextmanager
    def gradients_times(self, *factors: float) -> Iterator[None]:
        """Make each `step` in the block multiply gradients by each factor in turn, in FP32.

        Gradients are upcast to FP32 first, and ``p.grad`` does not change. A loss scaler needs
        this; see `GradScaler`.
        """
        engine = self._live_engine()
        engine.strategy.require_unscaled()
        engine.state.gradient_factors = factors
        try:
            yield
        finally:
            engine.state.gradient_factors = ()

    def _materialize(self) -> None:
        with self._exclusive("materialized") as engine:
            engine.join()
            self._materialized = materialize(engine, self.param_groups)
        present = number_parameters(self.param_groups)
        self.state.clear()
        self.state.update({p: s for p, s in self._materialized.state.items() if p in present})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a reference, or a state dict of the wrapped class.

        A reference must name the present state, or the newest checkpoint of this store. The state
        of that checkpoint then becomes the present one, with the reference's hyper-parameters,
        without reading it. Parameters do not change, as in torch; `restore` reads them, too.

        A torch state dict (or a `full_state_dict`) is streamed into the store. FP32 state stays
        FP32, whatever the parameters' dtype. Its tensors may be on any device, or memory-mapped. If
        it has ``master``, the live 16-bit parameters become the rounded masters; otherwise the
        masters begin as the live parameters. The number of steps becomes its ``num_steps``, or else
        the largest ``step`` of a parameter. Checkpoints of the store stay; call `checkpoint`
        afterwards.

        Raises:
            ValueError: The numbers of groups or parameters differ, in torch's own words.
            MismatchError: The reference names another state, or the dict is of another class, or
                has other shapes or names. Nothing has been changed.
            NotRestoredError: The store has checkpoints, and neither `restore` nor ``fresh=True``
                has decided about them.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        with self._exclusive("load_state_dict") as engine:
            engine.join()
            if is_reference(state_dict):
                load_reference(engine, self.param_groups, state_dict)
            else:
                load_tensors(engine, self.param_groups, state_dict)
        if self._materialized is not None:
            self._materialize()
        for loaded in self._optimizer_load_state_dict_post_hooks.values():
            loaded(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Attribute that torch's GradScaler looks for if an optimizer unscales; it must be missing.

        Raises:
            OverlapError: A pass beside backward has applied scaled gradients already.
            AttributeError: In all other cases, so that GradScaler unscales the gradients itself.
        """
        self._live_engine().strategy.require_unscaled()
        raise AttributeError("_step_supports_amp_scaling")

    def close(self) -> None:
        """Wait for all work in flight, and release the store. Idempotent.

        Raises:
            SealError: The last checkpoint could not be sealed.
        """
        if self._engine is not None:
            with self._exclusive("close") as engine:
                engine.close()
            self._finalizer.detach()

    def __repr__(self) -> str:
        """Return one line with the place and size of the state, followed by torch's lines."""
        if self._engine is None:
            return super().__repr__()
        return f"{type(self).__name__} in {self._engine.describe()}\n{super().__repr__()}"

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._engine is not None:
            close_quietly(self._engine)  # the error that is being raised says more

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: its state is a directory that one "
            "process owns. To move a run, copy the directory; to keep a point in time, call "
            "checkpoint()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[Engine]:
        """Yield the engine, within `neutral`, and refuse a call during another call.

        Signal handlers run between two instructions of a step, and a checkpoint made in one would
        be of half a step.

        Args:
            name: Name of the public method.
        """
        if self._running:
            raise OffloadError(
                f"{name}() was called while {self._running}() of the same optimizer is running, "
                "by a signal handler or another thread: the state is half way. Set a flag there, "
                f"look at it after the step, and call {name}() then"
            )
        self._running = name
        try:
            with neutral(keep_denormals=name == "step"):
                yield self._live_engine()
        finally:
            self._running = ""

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the optimizer has not been constructed")
        return self._engine


def _which(checkpoint: CheckpointName | None) -> int | str | None:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.path
    return checkpoint if isinstance(checkpoint, int | None) else os.fspath(checkpoint)


def _strategy_for(
    overlap: Overlap | None, model: torch.nn.Module | None
) -> Callable[[TrainingState], StepStrategy]:
    if overlap is None or model is None:  # the latter with an overlap has been refused before
        return WaitedFor
    # Imported only on demand: both modules import torch's compiler, which takes seconds.
    if overlap == "forward":
        from offload.overlap.forward import BesideForward

        return partial(BesideForward, model=model)
    from offload.overlap.backward import DuringBackward

    return partial(DuringBackward, model=model)
