"""Decision whether a backward is meant as a step, so that chunks may be stepped while it runs.

A backward is *held* (its gradients stay in ``.grad``, where `step` finds them) if it goes through
the model to something else, gives a parameter several gradients, or needs the values of parameters
whose gradients are final already. This must be known before the first parameter gets its gradient,
so hooks on modules look at the inputs of the model, and put hooks on its outputs.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from offload.errors import OverlapError
from offload.model.replacing import is_describing, is_replacing
from offload.model.watch import tensors_in
from offload.overlap import compiling
from offload.overlap.constant_uses import (
    ConstantUses,
    backward_id,
    is_in_function,
    is_recomputed_later,
)

_keys = itertools.count()

_INPUT = "the model was called with an input that requires a gradient itself"
_RERUN = (
    "reentrant activation checkpointing runs a module whose parameters are used elsewhere in the "
    "same step (use_reentrant=False hides it)"
)
_HOOKED = "a backward hook of a module may read parameters whose gradients are final"
_CONSTANT = (
    "a parameter that is trained was used without a gradient in a forward (p.data, p.detach(), "
    "requires_grad_(False), no_grad() within activation checkpointing, or twice in reentrant "
    "activation checkpointing, where use_reentrant=False hides it), so that backward may need its "
    "value"
)
_LATE = "a parameter was used within an earlier backward() after its gradient was final"

_log = logging.getLogger("offload")


class _Calls(threading.local):
    """The call of the model that a thread is in."""

    def __init__(self) -> None:
        self.step = -1
        """Count of steps when the other attributes were set. At any other count they are stale."""
        self.outermost: int | None = None
        """Number of the module whose call contains all others; None outside of any call."""
        self.has_gradients = False
        """Whether the outermost call records a graph."""
        self.leads_elsewhere = False
        """Whether a backward through the outermost call goes on to a tensor that is not trained by
        this optimizer."""


class HookedStrategy(Protocol):
    """Step strategy as the hooks see it."""

    def settle(self, call: str) -> None:
        """Raise `OverlapError` if the state is half stepped, on behalf of a call of this name."""

    def is_first_backward(self) -> bool:
        """Return whether no backward has opened a pass; raise `OverlapError` if another one has."""

    def is_trained(self, tensor: torch.Tensor) -> bool:
        """Return whether the optimizer steps a tensor."""

    def trained(self) -> Iterable[torch.Tensor]:
        """Return the tensors that the optimizer steps."""


class BackwardHooks:
    """Hooks on modules that tell which backwards are held."""

    def __init__(self, strategy: HookedStrategy, model: torch.nn.Module) -> None:
        self._strategy = weakref.ref(strategy)
        self._model = model
        self._key = f"offload.leads_to_trained_{next(_keys)}"
        """Key in the metadata of graph nodes that lead only to parameters that are trained."""
        self._handles: list[RemovableHandle] = []
        self._calls = _Calls()
        self._num_steps = 0
        self._backward: int | None = None
        """Number of the backward in progress, once it has reached an output of the model."""
        self._is_held = False
        self._is_hooked = False
        """Whether a module that has run since the last step has backward hooks."""
        self._is_needed_later = False
        """Whether backwards need the values of parameters whose gradients are final."""
        self._constant_uses = ConstantUses(compiling.Hook(self, BackwardHooks.needed_in_forward))
        self._watched_kinds: set[tuple[object, ...]] = set()
        """Kinds of calls of modules during which uses of parameters have been watched."""
        self._has_warned = False
        self._used: set[int] = set()
        """Ids of parameters whose modules have run since the last step."""
        self._rerun: set[int] = set()
        """Ids of parameters whose modules will run again in backward."""
        self._is_used_again = False
        """Whether a parameter in `_rerun` is also used elsewhere, so that it gets several
        gradients."""

    def attach(self) -> None:
        """Put hooks on the modules."""
        hook = compiling.ModuleHook
        for number, module in enumerate(self._model.modules()):
            hooked: Any = module  # torch does not type its hooks
            self._handles += [
                hooked.register_forward_pre_hook(
                    hook(self, BackwardHooks.before_module, number), prepend=True, with_kwargs=True
                ),
                hooked.register_forward_hook(
                    hook(self, BackwardHooks.after_module, number), always_call=True
                ),
                hooked.register_state_dict_pre_hook(
                    hook(self, BackwardHooks.before_state_dict, "model.state_dict()")
                ),
                hooked.register_load_state_dict_pre_hook(
                    hook(self, BackwardHooks.before_state_dict, "model.load_state_dict()")
                ),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._constant_uses.end()

    @property
    def holds(self) -> bool:
        """Whether the gradients of the backward in progress must stay in ``.grad``."""
        return self._is_held or self._is_hooked or self._is_needed_later

    @property
    def backward_ids(self) -> set[int]:
        """Numbers of the backward that runs the caller, and of the backward around it, if any."""
        return {backward_id(), *([] if self._backward is None else [self._backward])}

    def step_ended(self) -> None:
        """Forget all calls of modules, since they belong to the step that has ended."""
        self._num_steps += 1
        self._used.clear()
        self._rerun.clear()
        self._is_used_again = self._is_hooked = False
        self._backward, self._is_held = None, False

    def gradients_begin(self) -> None:
        """Stop watching uses of parameters, since the first gradient ends the forward."""
        self._constant_uses.end()

    def watch_again(self) -> None:
        """Watch uses of parameters in the next forward, as if it were the first."""
        self._watched_kinds.clear()

    def needed_in_forward(self) -> None:
        """Hold every backward from now on: a forward uses a parameter as a constant."""
        self._is_needed_later = True
        self._warn_once(_CONSTANT)

    def needed_in_backward(self) -> None:
        """Hold every backward from now on: a backward used a parameter that had been stepped."""
        self._is_needed_later = True
        self._warn_once(_LATE)

    def require_at_rest(self, what: str) -> None:
        """Raise `OverlapError` if the state is half stepped."""
        strategy = self._strategy()
        # Within backward, activation checkpointing calls modules again.
        if strategy is not None and backward_id() == -1:
            strategy.settle(what)

    def before_state_dict(self, what: str, *_: object) -> None:
        """Refuse a call of the user that reads or loads a state dict amid a step."""
        if not (is_replacing() or is_describing()):
            self.require_at_rest(what)

    def before_module(self, number: int, module: torch.nn.Module, *inputs: object) -> None:
        """Note that a module is about to run, with these inputs."""
        self.require_at_rest("the model's forward()")
        strategy = self._strategy()
        if strategy is None or backward_id() != -1:
            return
        calls = self._calls
        if calls.step != self._num_steps:
            calls.step, calls.outermost = self._num_steps, None
        if calls.outermost in (None, number):
            calls.outermost, calls.has_gradients = number, torch.is_grad_enabled()
            calls.leads_elsewhere = calls.has_gradients and any(
                self._leads_elsewhere(tensor, strategy) for tensor in tensors_in(inputs)
            )
            require_no_active_ddp(strategy.is_trained)
        if calls.has_gradients:
            self._watch_new_kind(number, module, strategy)
            self._note_uses(module)
            if not self._is_hooked and _has_backward_hooks(module):
                self._is_hooked = True
                self._warn_once(_HOOKED)

    def after_module(
        self, number: int, _module: torch.nn.Module, _inputs: object, output: object
    ) -> None:
        """Put hooks on a module's output, if a backward through it must be noticed."""
        calls = self._calls
        if backward_id() != -1 or calls.outermost is None or not calls.has_gradients:
            return
        is_outermost = number == calls.outermost
        if is_outermost:
            calls.outermost = None
        # Inner modules matter as well: a loss may be computed from their outputs.
        if (is_outermost or calls.leads_elsewhere) and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    begins = BackwardHooks.backward_begins
                    hook = compiling.Hook(self, begins, calls.leads_elsewhere)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                    node: Any = tensor.grad_fn
                    if is_outermost and not calls.leads_elsewhere:
                        node.metadata[self._key] = True

    def backward_begins(self, leads_elsewhere: bool, _gradient: torch.Tensor) -> None:
        """Note that a backward has reached an output of the model, and hold it if necessary."""
        if self._backward != backward_id():  # a failed backward did not reset `_backward`
            self._backward, self._is_held = backward_id(), False
            autograd: Any = torch.autograd.Variable
            autograd._execution_engine.queue_callback(partial(self._backward_ended, self._backward))
        strategy = self._strategy()
        if strategy is None or not strategy.is_first_backward():
            return
        if not self._is_held and (leads_elsewhere or self._is_used_again):
            self._is_held = True
            self._warn_once(_INPUT if leads_elsewhere else _RERUN)

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a backward() is not applied while it runs, but at step(), which waits for it "
                '(overlap="backward"): %s. This is logged only once',
                reason,
            )

    def _backward_ended(self, backward: int) -> None:
        if self._backward == backward:
            self._backward, self._is_held = None, False

    def _leads_elsewhere(self, tensor: torch.Tensor, strategy: HookedStrategy) -> bool:
        """Return whether a backward continues from an input to a tensor that is not trained."""
        if not tensor.requires_grad:
            return False
        if tensor.grad_fn is None:
            return not strategy.is_trained(tensor)
        found: list[Any] = [tensor.grad_fn]
        seen: set[Any] = set()  # keeps nodes alive, so that no new node gets the id of an old one
        while found:
            node = found.pop()
            if node in seen or self._key in node.metadata:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor) and not strategy.is_trained(leaf):
                return True
            found += [following for following, _ in node.next_functions if following is not None]
        return False

    def _watch_new_kind(
        self, number: int, module: torch.nn.Module, strategy: HookedStrategy
    ) -> None:
        """Watch uses of parameters until the first gradient, if this kind of call is new."""
        kind = (number, module.training, torch.is_grad_enabled(), is_recomputed_later())
        if kind not in self._watched_kinds and not self._is_needed_later:
            self._watched_kinds.add(kind)
            self._constant_uses.begin(self._model.modules(), strategy.trained())

    def _note_uses(self, module: torch.nn.Module) -> None:
        """Note a use of a module's parameters."""
        is_rerun = not torch.is_grad_enabled()
        if is_rerun and not is_in_function():
            return  # this use is under no_grad, and gives the parameters no gradient
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                key = id(parameter)
                self._is_used_again |= key in (self._used if is_rerun else self._rerun)
                self._used.add(key)
                if is_rerun:
                    self._rerun.add(key)


def _has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module or torch itself has backward hooks, which run code of the user."""
    of_all: Any = torch.nn.modules.module
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
    )


_DDP = (
    'overlap="backward" steps each parameter with the gradient of this process alone, before '
    "DistributedDataParallel has averaged it with those of the others, and {of}: use "
    'Options(overlap="forward"), or None'
)


def require_no_ddp(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse parameters that belong to a DistributedDataParallel of this process.

    Raises:
        OverlapError: A parameter belongs to one. The message names the parameter.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # there can be no DistributedDataParallel
    trained = set(map(id, tensors))
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.nn.parallel.DistributedDataParallel):
            for name, parameter in candidate.named_parameters():
                if id(parameter) in trained:
                    raise OverlapError(
                        _DDP.format(of=f"a DistributedDataParallel holds the parameter {name!r}")
                    )


def require_no_active_ddp(is_trained: Callable[[torch.Tensor], bool]) -> None:
    """Refuse a forward that a DistributedDataParallel calls.

    This finds a DistributedDataParallel that was made after the optimizer.
    """
    kind: Any = torch.nn.parallel.DistributedDataParallel
    active = getattr(kind, "_active_ddp_module", None)
    if active is not None and any(map(is_trained, active.parameters())):
        raise OverlapError(_DDP.format(of="a DistributedDataParallel calls the model"))
