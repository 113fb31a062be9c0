"""torch's modes: those of the caller, and the neutral ones that this library computes in.

torch keeps inference mode, gradients, autocast, default device, flushing of denormal numbers, and
modes that see every function called, for each thread. So every public function computes within
`neutral`, and calls the user's code within `as_user`. Settings of the process (default dtype,
deterministic algorithms, anomaly mode) are left alone; every tensor that is made has its dtype
named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

_AUTOCAST_DEVICES = ("cpu", "cuda")
"""Types of devices on which this library computes."""

_DENORMAL, _ONE = 2.0**-1074, 1.0


@dataclass(frozen=True, slots=True)
class _Modes:
    """Modes of a thread at a moment."""

    sees_functions: bool
    """Whether tensor subclasses and function modes see functions that are called."""

    sees_modes: bool
    """Whether at least function modes see functions that are called."""

    inference: bool
    grad: bool
    autocast: tuple[bool, ...]
    """Whether autocast is enabled, for each of `_AUTOCAST_DEVICES`."""

    flushes: bool
    """Whether arithmetic flushes denormal numbers to zero."""


class _OfThread(threading.local):
    users: _Modes | None = None
    """Modes of the caller; None outside of `neutral`."""


_of_thread = _OfThread()


@contextmanager
def neutral(*, keep_denormals: bool = False) -> Iterator[None]:
    """Run the block as on a thread without any mode set. A nested block changes nothing.

    Tensors made within the block are ordinary ones without a graph, on the CPU unless another
    device is named. A user's `TorchFunctionMode` does not see the functions called in it.

    Args:
        keep_denormals: Whether the caller's setting for flushing denormal numbers stays in effect.
            True for arithmetic that the user asked for (a step), false for data that is only moved.
    """
    if _of_thread.users is not None:
        yield
        return
    sees_functions = torch._C._is_torch_function_enabled()
    sees_modes = not torch._C._is_torch_function_all_disabled()
    with torch._C.DisableTorchFunction():
        users = _Modes(
            sees_functions,
            sees_modes,
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            tuple(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES)),
            flushes_denormals(),
        )
        flushes = users.flushes and keep_denormals
        modes = _Modes(False, False, False, False, (False,) * len(_AUTOCAST_DEVICES), flushes)
        with _set(modes, instead_of=users):
            try:
                _of_thread.users = users
                yield
            finally:
                _of_thread.users = None


@contextmanager
def as_user() -> Iterator[None]:
    """Run a block inside `neutral` in the caller's modes again; used for the user's hooks."""
    users = _of_thread.users
    if users is None:
        yield
        return
    flushes = flushes_denormals()
    now = _Modes(False, False, False, False, (False,) * len(_AUTOCAST_DEVICES), flushes)
    with _set(users, instead_of=now):
        try:
            _of_thread.users = None
            if users.sees_functions:
                with torch._C._EnableTorchFunction():
                    yield
            elif users.sees_modes:
                with torch._C._EnableTorchFunction(), torch._C.DisableTorchFunctionSubclass():
                    yield
            else:
                yield
        finally:
            _of_thread.users = users


def in_neutral(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that runs within `neutral`, for a function that calls no user code."""

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run the function within `neutral`."""
        with neutral():
            return function(*args, **kwargs)

    return wrapped


def for_thread(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that a thread of this library can run, and that computes within `neutral`.

    The function flushes denormal numbers if the thread that calls `for_thread` does.

    Args:
        function: Function to run on the thread.
    """
    flushes = flushes_denormals()

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run the function within `on_thread`."""
        with on_thread(flushes=flushes):
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def on_thread(*, flushes: bool) -> Iterator[None]:
    """Run the block, on a thread of this library, within `neutral`.

    Args:
        flushes: Result of `flushes_denormals` on the thread that requested the work.
    """
    # A thread inherits the setting of the thread that started it, perhaps long ago.
    torch.set_flush_denormal(flushes)
    with neutral(keep_denormals=True):
        yield


def flushes_denormals() -> bool:
    """Return whether arithmetic of this thread flushes denormal numbers to zero.

    torch has a function that sets this for the calling thread, but none that returns it.
    """
    return _DENORMAL * _ONE == 0.0


def called_as_user(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that calls the user's function in the caller's modes, from `neutral`."""

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run the function within `as_user`."""
        with as_user():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def _set(modes: _Modes, *, instead_of: _Modes) -> Iterator[None]:
    """Run the block in `modes`, and then set `instead_of` again; function modes do not change."""
    with torch.inference_mode(modes.inference), torch.set_grad_enabled(modes.grad):
        try:
            _set_of_thread(modes, instead_of)
            yield
        finally:
            _set_of_thread(instead_of, modes)


def _set_of_thread(modes: _Modes, before: _Modes) -> None:
    if modes.autocast != before.autocast:
        for device, enabled in zip(_AUTOCAST_DEVICES, modes.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
    if modes.flushes != before.flushes:
        torch.set_flush_denormal(modes.flushes)
