"""The torch.optim contract: what a training loop sees."""

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
"""How a user says which checkpoint: by step number, path, or itself."""


class OffloadedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state lives on SSD, where it also is the checkpoint.

    ``step()`` gives the same bits as the wrapped class holding FP32 masters in memory. Memory for
    optimizer state is a fixed ring of buffers: 0 bytes per parameter, instead of 12 for Adam.

    Args:
        optimizer_class: An element-wise torch optimizer class.
        params: As torch takes them: parameters, ``named_parameters()``, or group dictionaries.
        directory: The store: a directory on a local drive, used by one process at a time. Created
            if missing. Nothing is written to it before the first step or checkpoint, but free
            space is checked now. A list of directories on several drives spreads the state over
            them; the first is the store, and holds the parameters.
        model: Gives parameters the names of its state dict, and puts its buffers and frozen
            parameters into checkpoints, so that ``model.safetensors`` is the whole state dict.
        keep: How many checkpoints to keep, at least 1, or a policy such as
            ``LastK(2) | EverySteps(1000) | BestBy("val_loss")``. The newest, and what has been
            pinned, is kept in any case. The disk holds one slot more.
        fresh: Start over in a store that has checkpoints. They are withdrawn once the first new
            one is durable.
        process_group: `offload.SEPARATE` if this is one of several processes that each train a
            model of their own, in a directory of their own. Without it several are refused.
        options: How to stream and store; see `Options`.
        hyper: Keyword arguments of `optimizer_class`.

    Raises:
        ProcessGroupError: There are several ranks, or `model` is wrapped for them.
        UnsupportedOptimizerError: The class or a flag needs more than one element at a time.
        UnsupportedParameterError: A parameter is complex, sparse, FP64, a DTensor, or on a device
            that is neither the CPU nor CUDA's; or shares memory with another one that is trained.
        StoreLockedError: Another process trains in this directory.
        VolatileStoreError: The directory would be lost at power-off.
        RemoteStoreError: Another machine, or a program, serves the files of the directory.
        UnreadableError: Something in the store could not be read, which says nothing about what it
            holds. Nothing has been changed.
        StoreFullError: There is no room for ``keep + 1`` slots, besides those that are pinned.
        PinError: ``fresh=True`` would withdraw a checkpoint that is pinned.
        StoreError: The directory cannot be used, or is not what it was given for; says why.
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
            from offload.overlap.backward_hooks import require_no_ddp  # as in `_strategy_for`

            require_no_ddp(p for group in self.param_groups for p in group["params"])
        for group in self.param_groups:  # refuse what cannot be streamed before making a directory
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
        # A dropped optimizer lets go of its store; whether its last seal succeeded is then unknown.
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

        Returns when parameters are updated; the last writes may still be on their way, which is
        safe, since no resume reads them.

        Args:
            closure: Re-evaluates the model and returns the loss, as in torch.

        Raises:
            NotRestoredError: The store has checkpoints: call `restore` first, or construct with
                ``fresh=True``.
            SealError: The checkpoint before this step could not be sealed. This step was not
                taken; calling it again goes on.
            BrokenOptimizerError: An earlier step failed half way; call `restore`.
            SlotFullError: The disk is full, because of pins or checkpoints that are kept for good.
                This step was not taken; make room as it says, and call it again.
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
        """Make the present state a checkpoint, behind training.

        No optimizer state is read, copied or moved; the parameters are written beside it, and
        the directory is renamed. Returns at once. Parameters must not be edited before the next
        `step` unless ``.result()`` has returned. If the step before has been checkpointed already
        and nothing has changed, that checkpoint is kept, and only its train state is replaced, and
        its metrics if there are new ones.

        Args:
            train_state: Whatever else is needed to continue (schedulers, random states, position
                in the data), captured by value now: JSON-like values, numpy arrays, tensors. It is
                no file name and no step number, so a bare text, path or number is refused.
            metrics: What has been measured, such as ``{"val_loss": 1.2}``: at most 16 numbers, of
                Python or as tensors of one element. `BestBy` decides by them, and ``offload ls``
                shows them. One that is not finite is left out, with a `RuntimeWarning`.

        Returns:
            A handle; its ``result()`` returns when the checkpoint is durable.

        Raises:
            SealError: The checkpoint before this one could not be sealed.
            MetricError: Something in `metrics` is not a number; names it. Nothing has been done.
            PinError: Another checkpoint of this step is pinned, and would be replaced.
            SlotFullError: As for `step`.
            TrainStateTypeError: `train_state` cannot be stored losslessly, or is a bare text, path
                or number; of `offload.format`.
            TrainStateTooLargeError: It is larger than what is reserved; of `offload.format`.
        """
        checked = None if metrics is None else take_metrics(metrics)
        require_state(train_state)
        with self._exclusive("checkpoint") as engine:
            engine.store.keeping.warn_unranked(engine.num_steps, metrics or {})
            if engine.frozen_space.is_due:
                engine.frozen_space.warn(engine.lay_out(self.param_groups))
            return engine.checkpoint(self.param_groups, train_state, checked)

    def pin(self, name: str, checkpoint: CheckpointName | None = None) -> None:
        """Keep a checkpoint, whatever `keep` says, until `unpin`; durable on return.

        A name that is in use is moved: the checkpoint that had it is subject to `keep` again. From
        the next step on the disk holds one slot more.

        Args:
            name: Letters, digits, ``.``, ``_`` and ``-``, such as ``"best"``.
            checkpoint: A step number, a path, or a `Checkpoint`; None for the newest. One that is
                being sealed is waited for.

        Raises:
            SealError: The last checkpoint could not be sealed; nothing has been pinned.
            CheckpointNotFoundError: There is no such checkpoint any more.
            PinError: A pin cannot be called that.
            gds.StorageError: It could not be written durably.
        """
        with self._exclusive("pin") as engine:
            engine.pin(name, _which(checkpoint))

    def unpin(self, name: str) -> None:
        """Remove a pin, durably. What is not kept otherwise is recycled later.

        Raises:
            CheckpointNotFoundError: There is no pin of this name; says which there are.
            gds.StorageError: It could not be removed durably.
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

        Reads the parameters and buffers only, into the live tensors, and compares them with their
        digests; the first step does so with the optimizer state, or this call with `verify`.
        Hyper-parameters become the checkpoint's. Parameters are matched by name: one that is frozen
        now keeps its state, and one that was frozen then joins with the next step. What is wrong is
        read a second time. A checkpoint that is found damaged is quarantined: marked on the drive
        as not to be used. If none was asked for, the one before it is taken then, with a warning.
        If that one is damaged as well, it is not marked, and this raises: bad memory would condemn
        one after the other.

        Args:
            checkpoint: A step number, a path, or a `Checkpoint`; None for the newest.
            discard_newer: Withdraw checkpoints that are newer than the chosen one. Without it,
                choosing one that is not the newest is refused.
            verify: True reads all optimizer state now, before anything is trained on it: 12 bytes
                per parameter with Adam, so as long as the drive needs for that. Damage of it is
                then dealt with as damage of parameters; otherwise it ends the first step. False
                leaves it to the first step. None is what `Options.verify` says.

        Returns:
            The checkpoint, with ``.step``, ``.train_state`` and ``.path``; None if the store has
            none, in which case training simply starts.

        Raises:
            MismatchError: Model or optimizer differ from the checkpoint's, or there are newer
                checkpoints. Nothing has been changed.
            PinError: A newer checkpoint is pinned. Nothing has been changed.
            CheckpointNotFoundError: There is no such checkpoint.
            DamagedError: The checkpoint that was asked for is damaged, or the last one left, or a
                second one in a row.
            CheckpointError: None in the store is usable.
        """
        which = _which(checkpoint)
        with self._exclusive("restore") as engine:
            return engine.restore(
                self.param_groups, which, discard_newer=discard_newer, verify=verify
            )

    def synchronize(self) -> None:
        """Wait for all transfers and any seal in flight; raises what went wrong with them."""
        with self._exclusive("synchronize") as engine:
            engine.synchronize()

    @property
    def num_steps(self) -> int:
        """Optimizer steps that the present state has seen; one that still runs counts."""
        return self._live_engine().num_steps

    def stats(self) -> Stats:
        """Return what has been moved and waited for so far."""
        return self._live_engine().stats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, also in the middle of training.

        Raises:
            MismatchError: A parameter is given twice; nothing has changed.
            UnsupportedParameterError: As for the constructor; nothing has changed.
            gds.StorageError: There is no room for the larger state, likewise.
        """
        super().add_param_group(param_group)
        if self._engine is None:
            return  # torch's constructor adds the first groups through here
        try:
            with neutral():
                check_given_once(self.param_groups, {})
                self._engine.add_parameters(self.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return a small reference to the state, not the state itself: builtins only, by value.

        It names where the state is, and holds the hyper-parameters. It makes nothing durable: call
        `checkpoint` first if it is to be loaded by another process. If steps have been taken since
        the last checkpoint, a `RuntimeWarning` says so, once for each optimizer. Within
        `materialized` it is the state itself; see `full_state_dict`.
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
        """Read all state into memory: the state dict of the wrapped class, for other programs.

        ``state`` and ``param_groups`` are as torch would have them with FP32 parameters;
        ``master`` has, by the same numbers, the FP32 values of parameters that are live in 16 bits,
        and ``num_steps`` is the number of optimizer steps taken. A parameter that is in no group
        any more has no number, so that its state is not in it. Takes as many bytes of host memory;
        ``offload export`` does not.

        Raises:
            gds.StorageError: It cannot be read.
            DamagedError: It is not what was written.
        """
        with self.materialized():
            return self.state_dict()

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Hold the whole state in memory, where programs that know torch's optimizers look for it.

        Meanwhile `state` has FP32 tensors, `state_dict` returns them, and `step` is refused.
        Changes made to the tensors are lost; `load_state_dict` is how to change the state.
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
        """Let `step` multiply gradients by each factor in turn, after they are upcast to FP32.

        ``p.grad`` does not change. This is what a scaler of losses needs; see `GradScaler`.
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

        A reference is loaded in no time if it names the present state, or the newest checkpoint of
        this store: its state becomes the present one, with the reference's hyper-parameters.
        Parameters are not touched, as in torch; `restore` reads them too.

        A torch state dict (or a `full_state_dict`) is streamed into the store: FP32 state as it is,
        never in the parameters' dtype. Its tensors may be on any device, or memory-mapped. If it
        has ``master``, the live 16-bit parameters become what those round to; otherwise masters
        begin as the live parameters. The number of steps becomes its ``num_steps``, or without
        that the largest ``step`` of a parameter. Checkpoints of the store stay; call `checkpoint`
        after it.

        Raises:
            ValueError: Numbers of groups or parameters differ, as torch says it.
            MismatchError: The reference names something else, or the dict is of another class,
                other shapes or other names. Nothing has been changed.
            NotRestoredError: The store has checkpoints, and nobody has said what is to become of
                them.
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
        """Where GradScaler asks: it must not find this, and is refused if it comes too late."""
        self._live_engine().strategy.require_unscaled()
        raise AttributeError("_step_supports_amp_scaling")

    def close(self) -> None:
        """Wait for what is in flight and let go of the store. Idempotent.

        Raises:
            SealError: The last checkpoint could not be sealed.
        """
        if self._engine is not None:
            with self._exclusive("close") as engine:
                engine.close()
            self._finalizer.detach()

    def __repr__(self) -> str:
        """Say in one line where the state is and how much there is of it; torch's lines follow."""
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
            close_quietly(self._engine)  # the error that is on its way says more

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
        """Refuse a call from within another one, which would find the state half way.

        Signal handlers run between two instructions of a step, and a checkpoint made there would
        be of half a step.
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
    # Imported when asked for: they follow torch's compiler, which takes seconds to import.
    if overlap == "forward":
        from offload.overlap.forward import BesideForward

        return partial(BesideForward, model=model)
    from offload.overlap.backward import DuringBackward

    return partial(DuringBackward, model=model)
