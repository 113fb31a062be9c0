"""Coordination of torch's compiler with a step that runs beside the model.

Compiled code runs no hooks, and its guards look at the class of every parameter. Compilation holds
a lock that the update of a chunk also takes, since torch's optimizers differ in the last bit while
any thread compiles a graph. So a thread that compiles must not wait for a step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.convert_frame
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import guard_failures

from offload.errors import OverlapError

compile_lock: Any = torch._dynamo.convert_frame.compile_lock
"""Lock that a thread holds while it compiles, or while it updates a chunk beside the model."""


class Follower:
    """Observer of a model that may be compiled, in part or as a whole, at any time."""

    def before_compiled(self, number: int) -> None:
        """Wait for all parameters, since module `number` is about to run in compiled code."""

    @property
    def is_partly_compiled(self) -> bool:
        """Whether part of the model is compiled, so that its calls wait for all parameters."""
        return False

    def compiling_begins(self) -> None:
        """Note that this thread is about to compile code."""

    def compiling_ended(self) -> None:
        """Note that this thread has compiled code, or has failed to."""


class Hook:
    """A hook that calls a method of its owner, which it does not keep alive.

    A copy of the hook, in a copy of the model, does nothing.
    """

    def __init__(self, owner: object, method: Callable[..., None], *args: object) -> None:
        self._owner = weakref.ref(owner)
        self._method = method
        self._args = args

    def __call__(self, *given: Any) -> None:
        """Call the method of the owner, if there still is one."""
        owner = self._owner()
        if owner is not None:
            self._method(owner, *self._args, *given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()


class ModuleHook(Hook):
    """A hook on a module, which does nothing while it is traced for compiled code."""

    def __call__(self, *given: Any) -> None:
        """Call the method of the owner, unless a compiler calls this."""
        if not torch.compiler.is_compiling():
            super().__call__(*given)


class _Inert:
    """Replacement of a hook in a copy of the model."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


_keys = itertools.count(1)
_followers: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()


def follow(follower: Follower) -> int:
    """Return a number by which compiled code finds a follower, as long as the follower exists."""
    key = next(_keys)
    _followers[key] = follower
    return key


def listen() -> None:
    """Notify followers of compilation from now on, until ``torch.compiler.reset()`` is called."""
    if _begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begins)
        callback_handler.register_end_callback(_ended)


def _begins(_: object) -> None:
    for follower in list(_followers.values()):
        follower.compiling_begins()


def _ended(_: object) -> None:
    for follower in list(_followers.values()):
        follower.compiling_ended()


def is_compiling_here() -> bool:
    """Return whether the calling thread is compiling, so that it must not wait for a step."""
    owned: bool = compile_lock._is_owned()
    return owned


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a call of a module runs compiled code."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch._dynamo.OptimizedModule)


def num_recompiled(class_name: str) -> int:
    """Return how often code was recompiled because a tensor had a class of this name."""
    return sum(
        class_name in reason for reasons in list(guard_failures.values()) for reason in reasons
    )


def _wait_amid_compiled(key: int, number: int) -> None:
    follower = _followers.get(key)
    if follower is not None:
        follower.before_compiled(number)


def _ask_while_tracing(key: int) -> bool:
    # This must not wait: the step waits for the end of tracing.
    follower = _followers.get(key)
    return follower is None or follower.is_partly_compiled


_compiler: Any = torch.compiler  # torch.compiler has no types
_before_compiled = _compiler.disable(
    _wait_amid_compiled,
    reason='the model must wait for its parameters here (overlap="forward"). To compile it without '
    "a graph break, construct the optimizer with model=torch.compile(model, fullgraph=True)",
)
_is_known_compiled = _compiler.assume_constant_result(_ask_while_tracing)


def before_traced_module(key: int, number: int) -> None:
    """Make compiled code wait for all parameters before a module, unless the model's call does so.

    A hook on a module calls this while the hook is traced. The model itself (module 0) always
    waits.
    """
    if number == 0 or not _is_known_compiled(key):
        _before_compiled(key, number)


def require_hookable(model: torch.nn.Module) -> None:
    """Refuse a model with scripted modules, which cannot have the hooks of a step that overlaps.

    Raises:
        OverlapError: A module was made by ``torch.jit``. The message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the module {name!r}" if name else "the model"
            raise OverlapError(
                f"{what} was made by torch.jit, which allows no hooks, and overlap= needs them: "
                "leave out overlap=, or train the module that was scripted and script it afterwards"
            )
