"""Watches of tensors, which announce each use of a tensor through torch's Python API.

torch looks at the class of each tensor argument of a function, and calls ``__torch_function__`` of
a class that has one. A watched tensor therefore gets another class for a while: a subclass of its
own class. The subclass's ``__torch_function__`` announces the use, restores the tensor's own class,
and runs the function. This catches every use on every thread: operators, functions, methods,
attributes such as ``.data``, edits in place, and tensors in lists. torch itself changes the class
of parameters in this way, when it materialises lazy ones.

A watch does not catch code that reads the memory without calling torch: NumPy and DLPack, and other
tensors that share the memory or obtain it by ``q.data = p`` or ``q.set_(p)``. Nor does it catch the
few functions that never call ``__torch_function__``: ``torch.tensor(p)``,
``torch.func.grad(f)(p)``, scripted functions, and extensions that are bound without torch's
dispatcher. Methods of the tensor for which torch does not call ``__torch_function__`` are announced
by this module; a test calls all of them.

Nor does it catch code under ``torch._C.DisableTorchFunctionSubclass``. The optimizer's own threads
use this deliberately.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch._compile import _disable_dynamo

_T: Any = torch.Tensor  # type checkers see no __get__ on property objects

_ATTRIBUTES = (
    "dtype",
    "device",
    "shape",
    "ndim",
    "layout",
    "itemsize",
    "nbytes",
    "is_leaf",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_sparse",
    "is_nested",
    "is_quantized",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "grad",
    "grad_fn",
    "grad_dtype",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "get_device",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
)
_NOT_READING = {
    *(getattr(_T, name).__get__ for name in _ATTRIBUTES),
    *(getattr(_T, name).__set__ for name in ("grad", "requires_grad", "grad_dtype")),
    _T.grad.__delete__,
    *(getattr(_T, name) for name in _METHODS),
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    *(getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "rand", "randn")),
    *(getattr(_T, f"new_{name}") for name in ("empty", "zeros", "ones")),
}
"""Uses that neither read nor change values, nor lead to memory, and so are not announced.

``dim()`` is not among them, because `torch.vmap` calls nothing else before it reads.
"""

_OF_LAYOUT = {
    *(getattr(_T, name) for name in ("stride", "storage_offset", "is_contiguous")),
    *(getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "rand", "randn")),
}
"""Those of `_NOT_READING` whose results depend on the strides of a tensor."""

_set_class: Callable[[object, type], None] = object.__dict__["__class__"].__set__
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_WATCH, _ORIGINAL = "_offload_watch", "_offload_original"


_LOCAL = "_local_tensor"
"""Attribute of a DTensor with the memory of this rank. FSDP2 reads it without
``__torch_function__`` when it gathers a parameter; so do ``to_local``, ``full_tensor`` and
``redistribute``."""

_OWN_FRAMES = ("torch_function", "_fn", "inner", "wrapper")
"""Names of functions between a use and `_call`: this module's, and those of the compiler."""


class Watch:
    """Announces each use of a set of tensors.

    Args:
        before_use: Function that is called with a watched tensor before it is used, on the thread
            of the use. The argument is None if at least one watched tensor is used and it is not
            known which. The use raises the errors of this function. If the function returns True,
            the tensor gets its own class back, for good unless `after_use` is given. Otherwise the
            tensor is used as it is and stays watched.
        label: Part of the names of the subclasses.
        after_use: If given, a tensor that got its own class back for a call of a function is
            watched again after the call; `after_use` is then called with the tensor, the function
            and its result.
        knows_layout: Whether a watched tensor has its true strides. If not, asking for them is a
            use that is announced.
    """

    def __init__(
        self,
        before_use: Callable[[torch.Tensor | None], bool],
        label: str = "watched",
        after_use: Callable[[torch.Tensor, Callable[..., Any], Any], None] | None = None,
        *,
        knows_layout: bool = True,
    ) -> None:
        self._before_use = before_use
        self.label = label
        self.after_use = after_use
        self._not_reading = _NOT_READING if knows_layout else _NOT_READING - _OF_LAYOUT
        _watches.add(self)
        self._watched: dict[int, torch.Tensor] = {}
        self._classes: dict[type, type | None] = {}
        """Subclass by the tensors' own class; None if there can be no subclass."""

    def __len__(self) -> int:
        """Return the number of watched tensors."""
        return len(self._watched)

    def add(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Watch tensors, and return those that cannot be watched because their class is fixed.

        If another watch has a tensor, this call is a use of it, and the other watch announces it.
        """
        stuck = []
        classes, watched = self._classes, self._watched
        for tensor in tensors:
            if type(tensor) not in classes:
                if _watch_of(tensor) is self:
                    watched[id(tensor)] = tensor
                    continue
                announce_use(tensor)
            kind = classes.get(type(tensor)) or self._class_for(type(tensor))
            if kind is None:
                stuck.append(tensor)
                continue
            watched[id(tensor)] = tensor  # first, because another thread may use it at once
            try:
                _set_class(tensor, kind)
            except TypeError:
                classes[type(tensor)] = None
                del watched[id(tensor)]
                stuck.append(tensor)
        return stuck

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop watching tensors and give them their own class back. Ignores unwatched tensors."""
        for tensor in tensors:
            _restore_class(tensor)
            self._watched.pop(id(tensor), None)

    def release_all(self) -> None:
        """Stop watching all tensors."""
        if self._watched:
            self.release(list(self._watched.values()))

    def pause(self) -> None:
        """Give all tensors their own class back until `resume`."""
        for tensor in list(self._watched.values()):
            _restore_class(tensor)

    def resume(self) -> None:
        """Watch all tensors again that have not been released since `pause`."""
        self.add(list(self._watched.values()))

    def announce_use(self, tensor: torch.Tensor | None) -> bool:
        """Announce a use."""
        if tensor is None:
            if self._before_use(None):
                self.release_all()
                return True
            return False
        # A tensor that is not in the dict is a copy of a watched one, so its use is not announced.
        if id(tensor) in self._watched and not self._before_use(tensor):
            return False
        self.release([tensor])
        return True

    def _class_for(self, original: type) -> type | None:
        """Return the subclass for watched tensors of a class; None if there can be none."""
        if original in self._classes:
            return self._classes[original]
        watch = weakref.ref(self)
        own = getattr(original, "__torch_function__", None)
        not_reading = self._not_reading
        is_plain = own is torch._C._disabled_torch_function_impl or (
            getattr(own, "__func__", None) is _T.__torch_function__.__func__
        )

        @_disable_dynamo  # this function must not become part of a compiled graph
        def torch_function(
            kind: type,
            func: Callable[..., Any],
            types: Any,  # noqa: ARG001  (required by torch's protocol)
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            """Run a function that takes a watched tensor, after an announcement if needed."""
            if is_plain and func in not_reading:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            return _call(kind, func, args, kwargs or {})

        def new(_kind: type, *args: Any, **kwargs: Any) -> Any:
            """Create a tensor of the original class."""
            return original(*args, **kwargs)

        def set_class(tensor: torch.Tensor, kind: type) -> None:
            """Assign ``__class__`` after an announcement."""
            announce_use(tensor)
            _set_class(tensor, kind)

        def as_subclass(tensor: torch.Tensor, kind: type) -> Any:
            """Call ``Tensor.as_subclass`` after an announcement."""
            announce_use(tensor)
            return _T.as_subclass(tensor, kind)

        def set_(*args: Any, **kwargs: Any) -> Any:
            """Call ``Tensor.set_`` after announcements for all tensors among its arguments."""
            for tensor in tensors_in((args, kwargs)):
                announce_use(tensor)
            return _T.set_(*args, **kwargs)

        def set_real(tensor: torch.Tensor, value: Any) -> None:
            """Assign ``Tensor.real`` after announcements."""
            for used in tensors_in((tensor, value)):
                announce_use(used)
            _T.real.__set__(tensor, value)

        namespace: dict[str, Any] = {
            "__slots__": (),
            "__module__": original.__module__,
            "__qualname__": f"{original.__qualname__}, {self.label}",
            "__doc__": original.__doc__,
            "__torch_function__": classmethod(torch_function),
            "__new__": new,  # type(p)(...) makes an ordinary tensor
            "__class__": property(lambda _: original, set_class),
            # torch does not call `__torch_function__` for these.
            "as_subclass": as_subclass,
            "set_": set_,
            "real": property(_T.real.__get__, set_real),
            _ORIGINAL: original,
            _WATCH: watch,
        }
        local = getattr(original, _LOCAL, None)
        if local is not None:
            namespace[_LOCAL] = _announced(local)
        made: type | None = None
        with suppress(TypeError):  # a metaclass may require other arguments
            made = type(original)(original.__name__, (original,), namespace)
        self._classes[original] = made
        return made


def announce_use(tensor: torch.Tensor) -> None:
    """Announce a use of a tensor on the calling thread, which waits for pending changes of it."""
    watch = _watch_of(tensor)
    if watch is not None:
        watch.announce_use(tensor)
    else:
        _restore_class(tensor)


def announce_uses(tensors: Iterable[torch.Tensor]) -> None:
    """Announce a use of each tensor that any watch has. Fast if nothing is watched."""
    if any(map(len, list(_watches))):
        for tensor in tensors:
            if is_watched(tensor):
                announce_use(tensor)


def is_watched(tensor: torch.Tensor) -> bool:
    """Return whether a use of the tensor has to be announced."""
    return _ORIGINAL in type(tensor).__dict__


def _watch_of(tensor: torch.Tensor) -> Watch | None:
    reference = type(tensor).__dict__.get(_WATCH)
    watch: Watch | None = None if reference is None else reference()
    return watch


def _announced(attribute: Any) -> property:
    """Return a property for an attribute that leads to memory; each use of it is announced."""

    def announce(tensor: torch.Tensor) -> None:
        """Announce a use, unless torch looks at the tensor on behalf of what is not announced."""
        if torch._C._is_torch_function_enabled():
            announce_use(tensor)

    def read(tensor: torch.Tensor) -> Any:
        """Return the attribute after an announcement."""
        announce(tensor)
        return attribute.__get__(tensor)

    def write(tensor: torch.Tensor, value: object) -> None:
        """Set the attribute after an announcement."""
        announce(tensor)
        attribute.__set__(tensor, value)

    return property(read, write)


def _restore_class(tensor: torch.Tensor) -> None:
    original = type(tensor).__dict__.get(_ORIGINAL)
    if original is not None:
        _set_class(tensor, original)


def _call(
    kind: type, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function with a watched argument, of the subclass `kind`."""
    found = [tensor for tensor in tensors_in((args, kwargs)) if is_watched(tensor)]
    is_free = True
    kept: list[tuple[Watch, torch.Tensor]] = []
    for tensor in found:
        watch = _watch_of(tensor)
        if watch is not None:
            is_free &= watch.announce_use(tensor)
            if watch.after_use is not None:
                kept.append((watch, tensor))
        else:
            _restore_class(tensor)
    if not found:  # the tensor is inside an object that is not searched
        watch = kind.__dict__[_WATCH]()
        is_free = watch is not None and watch.announce_use(None)
    if not is_free:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is _T.detach and _is_made_a_parameter(args[0]):
        return _T._make_subclass(type(args[0]), args[0], False)
    result = func(*args, **kwargs)
    for watch, tensor in kept:
        watch.add([tensor])
        if watch.after_use is not None:
            watch.after_use(tensor, func, result)
    return result


def _is_made_a_parameter(tensor: torch.Tensor) -> bool:
    """Return whether ``torch.nn.Parameter(tensor)`` has just called ``detach()`` on the tensor.

    ``Parameter`` looked at the tensor's class while it was the subclass. So ``Parameter`` takes the
    tensor for one of a custom type, and expects ``detach()`` to keep the class.
    """
    new: Any = torch.nn.Parameter.__new__
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _OWN_FRAMES:
        frame = frame.f_back
    if frame is None or frame.f_code is not new.__code__:
        return False
    return frame.f_locals.get("cls") is type(tensor)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples, mappings and dataclasses.

    Other objects are not searched. A tensor that is found twice is yielded twice.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
