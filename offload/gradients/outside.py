"""A gradient whose values are elsewhere, and on which torch's own code works all the same.

Autograd adds the next micro-batch to it, `torch.nn.utils.clip_grad_norm_` takes its norm and
multiplies it, a GradScaler unscales it, ``zero_grad`` clears it. Each of these operations reaches
``__torch_dispatch__``, which runs it where the values are: in their *home*. So clipping and
accumulation are torch's, to the bit. If ``p.grad`` were None instead, they would silently do
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from offload.device.boundary import HOST, is_on_device, to_host
from offload.errors import OverlapError, UnsupportedParameterError
from offload.gradients.homes import Home, ViewHome

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)


class OutsideGradient(torch.Tensor):
    """A tensor without memory that has a gradient's shape, dtype and device.

    Args:
        like: Tensor whose shape, strides and dtype it claims.
        home: Where the values are.
        device: Device that it claims; None for that of `like`.
    """

    home: Home

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
        made.home = home
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {list(self.shape)} outside of {self.device}>"

    @property
    def data(self) -> torch.Tensor:
        """Return a tensor that stands for the same values."""
        of_torch: Any = torch.Tensor
        found: torch.Tensor = of_torch.data.__get__(self)
        return found

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Let this gradient stand for the values of another one that is outside."""
        if (other.shape, other.dtype, other.device) != (self.shape, self.dtype, self.device):
            raise UnsupportedParameterError(
                "p.grad.data cannot become a tensor of another shape, dtype or device: assign the "
                "tensor to p.grad"
            )
        if isinstance(other, OutsideGradient):
            self.home = other.home
        else:
            raise UnsupportedParameterError(
                "p.grad.data cannot become a tensor in memory while the gradient is elsewhere: "
                "assign the tensor to p.grad, or use p.grad.copy_(tensor)"
            )

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the values, which cannot be written: changes would be lost."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def share_memory_(self) -> torch.Tensor:
        """Refuse: there is no memory to share."""
        raise UnsupportedParameterError(
            "a gradient that is outside of its device cannot be shared with other processes: share "
            "p.grad.clone(), or leave out gradients="
        )

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
            return cls(first, first.home, first.device)
        if _is_view(func):
            return _viewed(func, first, args[1:], given)
        if _makes_another(func):
            like = torch.empty_strided(
                first.shape, first.stride(), dtype=first.dtype, device=first.device
            )
            return func(like, *args[1:], **given)
        if not first.home.is_taken and (found := _quickly(func, first, args, given)) is not None:
            return found
        return _run_at_home(func, args, given)


def values_for_step(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return what a step reads: the values if they are in memory, else the gradient itself.

    Raises:
        gds.StorageError: The values could not be written, or are gone.
    """
    if not isinstance(gradient, OutsideGradient):
        return gradient
    found = gradient.home.for_step()
    return gradient if found is None else found


def _quickly(func: Any, gradient: OutsideGradient, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Do what a home can do without bringing its values to memory; None if it is not that."""
    home, others = gradient.home, args[1:]
    if func is _aten.linalg_vector_norm.default and not kwargs and others in ((), (2,), (2.0,)):
        norm = home.norm()
        if norm is None:
            return None
        return norm.clone() if norm.device == gradient.device else norm.to(gradient.device)
    done = False
    if func is _aten.mul_.Tensor and not kwargs and getattr(others[0], "ndim", 0) == 0:
        done = not isinstance(others[0], OutsideGradient) and home.multiply(others[0])
    elif func is _aten.zero_.default:
        done = home.clear()
    elif func is _aten.add_.Tensor and not kwargs and len(others) == 1:
        other = others[0]
        is_same = isinstance(other, torch.Tensor) and not isinstance(other, OutsideGradient)
        if is_same and (other.shape, other.dtype) == (gradient.shape, gradient.dtype):
            done = home.add(other)
    return gradient if done else None


def _is_view(func: Any) -> bool:
    """Return whether an operation only makes views of its first argument."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _makes_another(func: Any) -> bool:
    """Return whether an operation reads no value of its first argument, like `zeros_like`."""
    name = func._schema.name.removeprefix("aten::")
    return bool(name.endswith("_like") or name.startswith("new_"))


def _viewed(func: Any, gradient: OutsideGradient, others: Any, kwargs: Any) -> Any:
    """Return tensors that stand for the views that an operation makes of a gradient."""
    form = torch.empty_strided(
        gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta"
    )
    forms, tree = tree_flatten(func(form, *others, **kwargs))

    def view(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that takes one of the views."""
        return lambda values: tree_flatten(func(values, *others, **kwargs))[0][number]

    views = [
        OutsideGradient(each, ViewHome(gradient.home, view(number)), gradient.device)
        for number, each in enumerate(forms)
    ]
    return tree_unflatten(views, tree)


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
    """Run an operation in host memory; new tensors go to the device that the gradient claims.

    Random numbers are those of that device, so what draws them runs there.
    """
    arguments = func._schema.arguments
    written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    with ExitStack() as opened:
        work = _AtHome(opened, on_device=is_random)
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

    def __init__(self, opened: ExitStack, *, on_device: bool) -> None:
        self._opened = opened
        self._on_device = on_device
        self._originals: dict[int, Any] = {}
        """What stands for each tensor that was brought, by the identity of that tensor."""
        self._held: list[torch.Tensor] = []
        self._claimed = HOST

    def bring(self, value: Any, changes: bool) -> Any:
        """Return a tensor in host memory for an argument."""
        if isinstance(value, OutsideGradient):
            if value.home.is_taken:
                raise OverlapError(
                    "step() has taken this gradient and runs beside the model: read p.grad before "
                    "step(), or keep p.grad.clone()"
                )
            self._claimed = value.device
            here = self._opened.enter_context(value.home.opened(changes=changes))
            if self._on_device and self._claimed != HOST:
                host, here = here, here.to(self._claimed)
                if changes:
                    self._opened.callback(host.copy_, here)
        elif isinstance(value, torch.Tensor) and is_on_device(value) and not self._on_device:
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
        return value if self._claimed == HOST else value.to(self._claimed)
