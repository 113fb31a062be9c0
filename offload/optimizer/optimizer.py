"""The public optimizer: constructor, steps and state dicts, as torch defines them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import _global_optimizer_post_hooks

from offload.ambient import neutral
from offload.blocks import has_blocks, require_streamable, streaming_for
from offload.distributed.ranks import Ranks
from offload.engine.engine import Engine
from offload.engine.reference import is_reference
from offload.engine.state_dict import make_reference
from offload.engine.stepping import StepStrategy
from offload.engine.training_state import Groups, TrainingState
from offload.errors import OffloadError
from offload.exchange.carried_reference import carry, uncarried
from offload.exchange.torch_dicts import (
    MASTERS,
    NUM_STEPS,
    MaterializedState,
    StateOnStorage,
    number_parameters,
)
from offload.format._manifest_fields import encode_group, without_numpy
from offload.model.outside import require_unfiled, require_values
from offload.model.parameters import (
    all_parameters,
    check_given_once,
    check_iterable,
    describe_parameters,
)
from offload.model.process_groups import SEPARATE, ProcessGroup, are_several
from offload.near.place import is_remote, place_of
from offload.optimizer.checkpointing import CheckpointingOptimizer, say_resumed
from offload.optimizer.recording import start_recorder
from offload.optimizer.store_owner import close_left_open, close_quietly
from offload.options import Options
from offload.overlap import require_possible, strategy_for
from offload.placement.choose import device_of
from offload.retention.policy import Retention, as_retention, keeps_parameters_only
from offload.store.shared import Serving
from offload.stream.drives import Directory, as_directories
from offload.stream.memory import require_host_memory
from offload.tiers.background import BackgroundUploads
from offload.tiers.rank_uploads import FollowingUploads
from offload.tiers.services.opening import require_place, require_tier
from offload.update.device_step import require_steppable
from offload.update.rules import UpdateRule

_WITH_VALUES = (
    'use Options(parameters="drive") and restore(), or build the model without outside_memory()'
)


class OffloadedOptimizer(CheckpointingOptimizer):
    """A torch optimizer whose state lives on SSD, where it also is the checkpoint.

    ``step()`` gives the same bits as the wrapped class with FP32 masters in memory. The memory for
    optimizer state is a fixed ring of buffers: 0 bytes per parameter, instead of 12 for Adam.

    Args:
        optimizer_class: An element-wise torch optimizer class.
        params: Parameters, ``named_parameters()``, or group dictionaries, as torch takes them.
        directory: Directory of the store, on a local drive, used by one process at a time. It is
            created if missing. Nothing is written to it before the first step or checkpoint, but
            free space is checked in the constructor. A list of directories on several drives
            spreads the state over them; the first is the store, and holds the parameters. With
            several ranks, each rank keeps its share of the state in one of the directories.
        model: Module that gives parameters the names of its state dict. Its buffers and frozen
            parameters are put into checkpoints, so that ``model.safetensors`` is the whole state
            dict. None for parameters only.
        keep: Number of checkpoints to keep, at least 1, or a policy such as
            ``LastK(2) | EverySteps(1000) | BestBy("val_loss")``. The newest checkpoint and pinned
            ones are kept in any case. The disk holds one more slot.
        fresh: Start over in a store that has checkpoints. They are withdrawn once the first new
            checkpoint is durable.
        process_group: Ranks that train the model together, into one store; None for the default
            group of torch.distributed, if there is one. All ranks make the same calls.
            `offload.SEPARATE` if this is one of several processes that each train a model of their
            own, in a directory of their own.
        options: Settings for streaming and storing; see `Options`.
        hyper: Keyword arguments of `optimizer_class`.

    Raises:
        ProcessGroupError: There is no process group although there are several ranks, this process
            is not in the group, or `model` is wrapped in a way that is not supported.
        RanksError: The ranks differ, in their directory for example, or one of them was lost.
        UnsupportedOptimizerError: The class or a flag needs more than one element at a time.
        UnsupportedParameterError: A parameter is complex, sparse, FP64, or on a device that is
            neither the CPU nor a CUDA device; or it is a DTensor and this process trains alone; or
            it shares memory with another trained parameter.
        StoreLockedError: Another process trains in this directory.
        VolatileStoreError: The content of the directory would be lost at power-off.
        RemoteStoreError: Another machine, or a program, serves the files of the directory.
        UnreadableError: A file or directory in the store could not be read. Its content may be
            whole. Nothing has been changed.
        StoreFullError: There is no room for ``keep + 1`` slots in addition to the pinned ones.
        gds.errors.RefusedError: The directory of ``host_memory=`` is no memory, or needs a size.
        PinError: ``fresh=True`` would withdraw a pinned checkpoint.
        StoreError: The directory cannot be used, or is not a store of this kind. The message says
            why.
    """

    warn_unsealed: bool = True
    """Whether `state_dict` warns if the state that it names is not a checkpoint.

    Set this to False if a program calls `checkpoint` each time before it saves a reference, as
    ``offload.integrations.lightning`` does."""

    torch_form: bool = False
    """Whether `state_dict` gives its reference the form of torch's own state dicts.

    ``get_optimizer_state_dict`` of torch takes no other form. The integrations set this to True for
    libraries that save FSDP2 models with it. `load_state_dict` takes both forms in any case."""

    upload_sealed: bool = True
    """Whether `checkpoint` begins the upload to the tier of the options, if they name one.

    The integrations set this to False while they seal a state whose train state is not complete.
    Another `checkpoint` of the same step begins the upload then."""

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
        several = are_several(process_group, model)
        retention = as_retention(keep)
        check_iterable(params)
        if not isinstance(options, Options):
            raise TypeError(
                f"options must be an offload.Options, got {type(options).__name__}: leave it out "
                "for the defaults, or write options=offload.Options(...)"
            )
        if keeps_parameters_only(retention) and (several or options.tier is not None):
            raise ValueError(
                "keep=ParametersOnly(...) does not work with "
                f"{'several ranks' if several else 'a tier'} yet: keep whole checkpoints, for "
                "example with EverySteps(1000)"
            )
        if several and options.gradients is not None:
            raise ValueError(
                f"gradients={options.gradients!r} does not work with several ranks yet: leave it "
                "out, or train separate models with process_group=offload.SEPARATE"
            )
        close_left_open()
        _require_possible(options, model, several=several, is_remote=is_remote(directory))
        self._engine = None
        self._uploads = None
        self._recorder = None
        self._materialized: MaterializedState | None = None
        self._running = ""
        on_device = options.placement == "device"
        rule = UpdateRule(optimizer_class, hyper, allow_fused=on_device)
        super().__init__(params, dict(rule.defaults))
        with neutral():
            if options.parameters != "drive" or not has_blocks(model, options):
                require_values(all_parameters(self.param_groups, model), instead=_WITH_VALUES)
        self.state = StateOnStorage()
        if is_remote(directory):
            whom = process_group if several else SEPARATE
            self._serve_from(directory, rule, hyper, model, retention, options, whom, fresh=fresh)
            return
        self._check_tier(options, as_directories(directory))
        if options.overlap == "backward":
            from offload.overlap.backward_hooks import require_no_ddp  # imports torch's compiler

            require_no_ddp(p for group in self.param_groups for p in group["params"])
        for group in self.param_groups:  # refuse unsupported formats before making a directory
            options.state_format.stored_arrays("F32", rule.rule(group).arrays)
        ranks = Ranks()
        if several:
            from offload.distributed.rank_group import join_ranks  # imports torch.distributed

            ranks = join_ranks(
                process_group,
                self.param_groups,
                model,
                options,
                optimizer=rule.class_name,
                keep=retention,
            )
        with ranks.leaving_on_error():
            with neutral():

                def check() -> None:
                    """Check what this rank was given."""
                    form, shards = options.state_format, ranks.shards
                    describe_parameters(self.param_groups, model, rule, form, shards=shards)
                    require_host_memory(options, ranks.size)

                ranks.together("the constructor", check)
            if on_device:
                split = options.master == "split"
                require_steppable(rule, self.param_groups, options.state_dtype, split=split)
            strategy = _strategy_for(options, model, self.param_groups)
            state = TrainingState(
                rule,
                as_directories(directory),
                model=model,
                keep=retention,
                fresh=fresh,
                options=options,
                device=device_of(self.param_groups),
                ranks=ranks,
            )
            try:
                engine = Engine(state, strategy(state))
                engine.require_space(self.param_groups)
                engine.move_gradients(self.param_groups)
                serving = ranks.serving()
                uploads = self._open_tier(options, retention, engine, serving)
            except BaseException as error:
                ranks.close(error)  # before the state leaves them without a reason
                state.close()
                raise
        self._engine, self._uploads = engine, uploads
        if uploads is not None:
            weakref.finalize(self, uploads.stop)
        # A garbage-collected optimizer releases its store, without reporting on its last seal.
        self._finalizer = weakref.finalize(self, close_quietly, engine)
        self._recorder = start_recorder(options, engine, uploads, serving)
        if self._recorder is not None:
            weakref.finalize(self, self._recorder.stop, wait=False)
        optimizer = weakref.ref(self)
        engine.strategy.attach(lambda: getattr(optimizer(), "param_groups", None))

    def _serve_from(
        self,
        directory: Any,
        rule: UpdateRule,
        hyper: dict[str, Any],
        model: torch.nn.Module | None,
        keep: Retention,
        options: Options,
        process_group: ProcessGroup,
        *,
        fresh: bool,
    ) -> None:
        """Let a server next to the drives hold the state, or that of this rank."""
        from offload.near.engine import NearEngine  # training with local drives does without

        self._finish_s = 0.0
        what = rule, hyper, self.param_groups, place_of(directory)
        engine: NearEngine
        if process_group is SEPARATE:
            engine = NearEngine(*what, model=model, keep=keep, fresh=fresh, options=options)
        else:
            from offload.distributed.rank_group import join_ranks  # imports torch.distributed
            from offload.near.ranks import RankEngine

            ranks = join_ranks(
                process_group,
                self.param_groups,
                model,
                options,
                optimizer=rule.class_name,
                keep=keep,
                whole=True,
                more={"directory=": "a server of each rank", "fresh=": fresh},
            )
            with ranks.leaving_on_error():
                engine = RankEngine(
                    *what, model=model, keep=keep, fresh=fresh, options=options, ranks=ranks
                )
        self._engine = engine
        self._finalizer = weakref.finalize(self, close_quietly, engine)
        optimizer = weakref.ref(self)
        engine.strategy.attach(lambda: getattr(optimizer(), "param_groups", None))

    def _check_tier(self, options: Options, directories: Sequence[str]) -> None:
        """Refuse a tier that cannot be, before anything is opened."""
        tier = options.tier_settings
        self._finish_s = 0.0 if tier is None else tier.finish_s
        if tier is not None:
            require_tier(tier.url, directories)

    def _open_tier(
        self, options: Options, retention: Retention, engine: Engine, serving: Serving | None
    ) -> BackgroundUploads | FollowingUploads | None:
        """Return the uploads to the tier of the options; None if there is no tier."""
        tier = options.tier_settings
        if tier is None:
            return None
        if serving is not None and not serving.is_writer:
            return FollowingUploads(
                tier.url, check=tier.check, backend=options.backend, serving=serving
            )
        require_place(tier.url, engine.store.directory)
        return BackgroundUploads(
            tier.url,
            max_slowdown=tier.max_slowdown,
            max_age_s=tier.max_age_s,
            check=tier.check,
            num_kept=lambda: retention.most,
            backend=options.backend,
            serving=serving,
            leaving=engine.store.keeping.leaving,
        )

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
        if self._uploads is not None:
            self._uploads.measured.step_taken()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, also in the middle of training.

        Raises:
            MismatchError: A parameter is given twice; nothing has changed.
            UnsupportedParameterError: A parameter is not supported, as in the constructor; nothing
                has changed.
            TypeError: No checkpoint can hold a value in the group; nothing has changed.
            gds.StorageError: There is no room for the larger state; nothing has changed.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group.update({k: without_numpy(v) for k, v in group.items() if k != "params"})
            encode_group(len(self.param_groups) - 1, group)
            if self._engine is None:
                return  # torch's constructor adds the first groups by this method
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
        optimizer, unless `warn_unsealed` is False. `offload.reference_of` returns the position that
        a reference names. Within `materialized` the result is the state itself; see
        `full_state_dict`.
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
            reference = make_reference(engine, torch_dict, warn=self.warn_unsealed)
            return carry(reference) if self.torch_form else reference

    def full_state_dict(self) -> dict[str, Any]:
        """Read all state into memory, and return it as the state dict of the wrapped class.

        ``state`` and ``param_groups`` are as torch would have them with FP32 parameters.
        ``master`` has, by the same numbers, the FP32 values of parameters that are live in 16 bits.
        ``num_steps`` is the number of optimizer steps taken. A parameter that is in no group any
        more has no number, so its state is left out. The whole state must fit in host memory;
        ``offload export`` does without. With several ranks, see `materialized`.

        Raises:
            RanksError: A rank was lost, or makes another call.
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

        With several ranks, all of them enter the block. Each rank then has what torch's optimizer
        would have there: of a DTensor, DTensors with its own shard; of a plain parameter, such as
        those of DistributedDataParallel, the whole state.

        Raises:
            OffloadError: The block is within another one.
            RanksError: A rank was lost, or makes another call.
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
            engine.join_all("materialized()")
            self._materialized = engine.materialize(self.param_groups)
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
        afterwards. With several ranks, all of them call this, each with whole tensors or with
        DTensors that are sharded as the parameters are.

        Raises:
            ValueError: The numbers of groups or parameters differ, in torch's own words.
            MismatchError: The reference names another state, or the dict is of another class, or
                has other shapes, names or shards. Nothing has been changed.
            RanksError: The ranks load different things, or one of them was lost.
            NotRestoredError: The store has checkpoints, and neither `restore` nor ``fresh=True``
                has decided about them.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = dict(uncarried(state_dict))
        with self._exclusive("load_state_dict") as engine:
            engine.join_all("load_state_dict()")
            if is_reference(state_dict):
                lifecycle = engine.state.lifecycle
                was_decided = lifecycle.decided
                engine.load_reference(self.param_groups, state_dict)
                newest = engine.store.newest
                # So Trainers resume. A reference to the present state decides nothing.
                if newest is not None and lifecycle.decided and not was_decided:
                    say_resumed(engine, engine.num_steps, newest.path)
            else:
                engine.load_tensors(self.param_groups, state_dict)
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


def _require_possible(
    options: Options, model: torch.nn.Module | None, *, several: bool, is_remote: bool
) -> None:
    """Refuse options that do not work with the model, before anything is opened."""
    require_unfiled(model)
    if options.parameters is not None:
        require_streamable(options, model, several=several, is_remote=is_remote)
    if options.overlap is not None:
        require_possible(options.overlap, model, several=several)


def _strategy_for(
    options: Options, model: torch.nn.Module | None, groups: Groups
) -> Callable[[TrainingState], StepStrategy]:
    """Return what makes the strategy of steps that the options ask for."""
    if model is not None and has_blocks(model, options):
        return partial(streaming_for, model, options, groups)
    if options.parameters is not None:
        logging.getLogger("offload").info(
            "steps write the parameters into the slot, and all of them stay in memory as well: no "
            "block was found in the model (see Options.blocks)"
        )
    return strategy_for(options.overlap, model)
