"""A gradient whose values are elsewhere, and on which torch's own code works all the same.

Autograd adds the next micro-batch to it, `torch.nn.utils.clip_grad_norm_` takes its norm and
multiplies it, a GradScaler unscales it, ``zero_grad`` clears it. Each of these operations reaches
``__torch_dispatch__``, which runs it where the values are: in their *home*. So clipping and
accumulation are torch's, to the bit. If ``p.grad`` were None instead, they would silently do
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from offload.device.boundary import HOST, is_on_device, to_host
from offload.errors import OverlapError, UnsupportedParameterError

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)


class Home(Protocol):
    """Where the values of one gradient are."""

    allows_views: bool
    """Whether the values stay at one place in memory, so that a view of them is an alias."""

    def opened(self, *, changes: bool) -> AbstractContextManager[torch.Tensor]:
        """Return a block with the values in host memory; changes in it are kept if announced."""
        ...

    def norm(self) -> torch.Tensor | None:
        """Return the 2-norm as torch computes it; None if it is not known without the values."""
        ...

    def add(self, other: torch.Tensor) -> bool:
        """Add a tensor of the same shape and dtype; return False if that is not possible here."""
        ...

    def multiply(self, factor: torch.Tensor | float) -> bool:
        """Multiply all values by a number; return False if that is not possible here."""
        ...

    def clear(self) -> bool:
        """Set all values to zero; return False if that is not possible here."""
        ...

    def for_step(self) -> torch.Tensor | None:
        """Return the values for a step if they are in host memory, otherwise None."""
        ...


class OutsideGradient(torch.Tensor):
    """A tensor without memory that has a gradient's shape, dtype and device.

    Args:
        like: Tensor whose shape, strides and dtype it claims.
        home: Where the values are.
        device: Device that it claims; None for that of `like`.
    """

    home: Home
    is_taken: bool
    """Whether a step that runs beside the model has taken the values, so that none are here."""

    @staticmethod
    def __new__(
        cls: type[OutsideGradient],
        like: torch.Tensor,
        home: Home,
        device: torch.device | None = None,
    ) -> OutsideGradient:
        """Make a tensor without memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        with torch.inference_mode(False):
            made: OutsideGradient = make(
                cls, like.shape, like.stride(), dtype=like.dtype, device=device or like.device
            )
        torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise data_ptr() is 0
        made.home, made.is_taken = home, False
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {list(self.shape)} outside of {self.device}>"

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the values."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.clone().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation where the values are."""
        given = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, (list, tuple)):
            return _one_by_one(func, args, given)
        if not isinstance(first, cls):
            return _run_at_home(func, args, given)
        if func in _ALIASES:
            alias = cls(first, first.home)
            alias.is_taken = first.is_taken
            return alias
        if not first.is_taken and (found := _quickly(func, first, args, given)) is not None:
            return found
        return _run_at_home(func, args, given)


def values_for_step(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return what a step reads: the values if they are in memory, else the gradient itself."""
    if not isinstance(gradient, OutsideGradient):
        return gradient
    found = gradient.home.for_step()
    return gradient if found is None else found


def _quickly(func: Any, gradient: OutsideGradient, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Do what a home can do without bringing its values to memory; None if it is not that."""
    home, others = gradient.home, args[1:]
    if func is _aten.linalg_vector_norm.default and not kwargs and others in ((), (2,), (2.0,)):
        norm = home.norm()
        if norm is None or norm.device == gradient.device:
            return norm
        return norm.to(gradient.device)
    done = False
    if func is _aten.mul_.Tensor and not kwargs and getattr(others[0], "ndim", 0) == 0:
        done = home.multiply(others[0])
    elif func is _aten.zero_.default:
        done = home.clear()
    elif func is _aten.add_.Tensor and not kwargs and len(others) == 1:
        other = others[0]
        is_same = isinstance(other, torch.Tensor) and not isinstance(other, OutsideGradient)
        if is_same and (other.shape, other.dtype) == (gradient.shape, gradient.dtype):
            done = home.add(other)
    return gradient if done else None


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists one tensor at a time, so that one gradient is in memory at once."""
    num = len(args[0])
    if func is _aten._foreach_zero_.default:
        for tensor in args[0]:
            tensor.zero_()
        return None
    if num == 1 or not func._schema.name.startswith(("aten::_foreach", "aten::_amp_foreach")):
        return _run_at_home(func, args, kwargs)

    def item(value: Any, number: int) -> Any:
        """Return the part of an argument that belongs to one tensor."""
        is_list = isinstance(value, (list, tuple)) and len(value) == num
        return [value[number]] if is_list else value

    found = []
    for number in range(num):
        each = [item(value, number) for value in args]
        rest = {name: item(value, number) for name, value in kwargs.items()}
        found.append(func(*each, **rest))
    return None if found[0] is None else [value for values in found for value in values]


def _run_at_home(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation in host memory; new tensors go to the device that the gradient claims."""
    arguments = func._schema.arguments
    written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    is_view = any(a.alias_info and not a.alias_info.is_write for a in arguments)
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    with ExitStack() as opened:
        work = _AtHome(func, opened, is_view=is_view)
        moved = {
            name: tree_map(lambda leaf, name=name: work.bring(leaf, name in written), value)
            for name, value in given.items()
        }
        positional = [moved[a.name] for a in arguments if a.name in moved and not a.kwarg_only]
        rest = {a.name: moved[a.name] for a in arguments if a.name in moved and a.kwarg_only}
        if "device" in rest and rest["device"] is None:
            del rest["device"]
        result = func(*positional, **rest)
        claim: Callable[[Any], Any] = work.claim if kwargs.get("device") is None else work.original
        return tree_map(claim, result)


class _AtHome:
    """One operation on tensors some of which are outside gradients."""

    def __init__(self, func: Any, opened: ExitStack, *, is_view: bool) -> None:
        self._func = func
        self._opened = opened
        self._is_view = is_view
        self._originals: dict[int, Any] = {}
        """What stands for each tensor that was brought, by the identity of that tensor."""
        self._held: list[torch.Tensor] = []
        self._claimed = HOST

    def bring(self, value: Any, changes: bool) -> Any:
        """Return a tensor in host memory for an argument."""
        if isinstance(value, OutsideGradient):
            if value.is_taken:
                raise OverlapError(
                    "step() has taken this gradient and runs beside the model: read p.grad before "
                    "step(), or keep p.grad.clone()"
                )
            if self._is_view and not value.home.allows_views:
                raise UnsupportedParameterError(
                    f"{self._func} makes a view of a gradient on the drive, whose changes would be "
                    "lost: change the gradient as a whole, or read p.grad.clone()"
                )
            self._claimed = value.device
            here = self._opened.enter_context(value.home.opened(changes=changes))
        elif isinstance(value, torch.Tensor) and is_on_device(value):
            here = to_host(value)
            if changes:  # such as found_inf of a scaler
                self._opened.callback(value.copy_, here)
        else:
            return value
        self._originals[id(here)] = value
        self._held.append(here)
        return here

    def original(self, value: Any) -> Any:
        """Return the argument that a result stands for, or the result."""
        return self._originals.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def claim(self, value: Any) -> Any:
        """Return a result as a tensor of the device that the gradient claims."""
        found = self.original(value)
        if found is not value or not isinstance(value, torch.Tensor):
            return found
        if self._claimed == HOST:
            return value
        if self._is_view:
            from offload.gradients.homes import MemoryHome

            return OutsideGradient(value, MemoryHome(value), self._claimed)
        return value.to(self._claimed)
