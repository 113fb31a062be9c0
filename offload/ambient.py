"""torch's modes: those of the caller, and the neutral ones that this library computes in.

A mode of torch holds for a thread (inference mode, gradients, autocast, default device, flushing of
denormal numbers, modes that see every function called), and a caller may be in any of them. A
buffer that is made in inference mode can never be written outside of it, one that is made without
a device is on the default one. So every public function computes within `neutral`, and what
belongs to the user is called within `as_user`, in the modes that the caller is in.

The default dtype, deterministic algorithms and anomaly mode are settings of the process, which
other threads may rely on: they are left alone, and code here names the dtype of what it makes.
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
    """What a thread was in when it called."""

    sees_functions: bool
    """Whether tensor subclasses and modes are asked about functions that are called."""

    sees_modes: bool
    """Whether at least modes are."""

    inference: bool
    grad: bool
    autocast: tuple[bool, ...]
    """By `_AUTOCAST_DEVICES`."""

    flushes: bool


class _OfThread(threading.local):
    users: _Modes | None = None
    """Of the caller; None outside of `neutral`."""


_of_thread = _OfThread()


@contextmanager
def neutral(*, keep_denormals: bool = False) -> Iterator[None]:
    """Compute as on a thread on which no mode has been set; a block within another changes nothing.

    Tensors that are made within the block are ordinary ones, on the CPU unless told otherwise,
    without a graph. A user's `TorchFunctionMode` does not see what is called.

    Args:
        keep_denormals: Leave it to the caller whether denormal numbers are flushed to zero: true
            for what the user asks to be computed (a step), false for what is only moved.
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
    """Be in the modes of the caller again, within `neutral`: for the user's own hooks."""
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
    """Have a function that calls no code of the user run within `neutral`."""

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with neutral():
            return function(*args, **kwargs)

    return wrapped


def for_thread(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return what a thread of this library calls: within `neutral`, with denormals as here.

    Args:
        function: What it is to do.
    """
    flushes = flushes_denormals()

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with on_thread(flushes=flushes):
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def on_thread(*, flushes: bool) -> Iterator[None]:
    """Let what a thread of this library does run within `neutral`.

    Args:
        flushes: What `flushes_denormals` returned on the thread that asked for it.
    """
    # A thread begins with what the one had that started it, and that may have been long ago.
    torch.set_flush_denormal(flushes)
    with neutral(keep_denormals=True):
        yield


def flushes_denormals() -> bool:
    """Return whether arithmetic of this thread takes denormal numbers for zero.

    torch has a function that sets it, for the calling thread alone, and none that returns it.
    """
    return _DENORMAL * _ONE == 0.0


def called_as_user(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function of the user that may be called within `neutral`."""

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with as_user():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def _set(modes: _Modes, *, instead_of: _Modes) -> Iterator[None]:
    """Be in other modes, but for those that concern functions; nothing that is set stays set."""
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
