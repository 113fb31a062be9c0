"""How a model takes a state dict back: through torch's ``load_state_dict``, with all its hooks.

Entries of a state dict that are the model's own memory are copied in place, and need no such path.
Others are made for the state dict: ``get_extra_state``, a cast or packed form of a tensor.
"""

from __future__ import annotations

import ctypes
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from offload.errors import (
    DamagedError,
    TrainStateTooLargeError,
    TrainStateTypeError,
    UnsupportedParameterError,
)
from offload.format.train_state import (
    encode,
    pack_encoded,
    packed_bytes,
    unpack,
)

ENCODED = ".encoded"
"""End of the name of a tensor that stands for an entry that is no tensor."""

_EXTRA = "_extra_state"
_LEAST_BYTES = 4096
_WRAPPED = ("_checkpoint_wrapped_module", "module", "_orig_mod")
"""Attributes of wrappers that may be left out of the names of a wrapped model's tensors."""

_OF_TORCH = ("torch.nn.", "torch.distributed.", "offload.")
"""Beginnings of the names of modules whose hooks and methods do nothing for own memory."""


class Owner(NamedTuple):
    """Where an entry of a state dict belongs."""

    modules: list[torch.nn.Module]
    """The modules around the entry, the model first and the one that has it last."""

    path: str
    """Path of the last module, with a dot at its end if it is not the model."""

    rest: str
    """Name of the entry in the last module."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """Parameter or buffer of this name; None if there is none."""
        module = self.modules[-1]
        found = module._parameters.get(self.rest)
        return module._buffers.get(self.rest) if found is None else found


def owner_of(model: torch.nn.Module, name: str) -> Owner:
    """Return where an entry belongs."""
    modules, path, parts = [model], "", name.split(".")
    while len(parts) > 1 or (parts and not _has(modules[-1], parts[0])):
        children = modules[-1]._modules
        child = children.get(parts[0]) if len(parts) > 1 else None
        if child is not None:
            path += f"{parts.pop(0)}."
        else:
            inner = next((attribute for attribute in _WRAPPED if children.get(attribute)), None)
            if inner is None:
                break
            child = children[inner]
            path += "" if inner == _WRAPPED[0] else f"{inner}."
        if child is None:
            break
        modules.append(child)
    return Owner(modules, path, ".".join(parts))


def is_extra(name: str) -> bool:
    """Return whether an entry is what ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == _EXTRA


def _has(module: torch.nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers or name == _EXTRA


def is_taken(model: torch.nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether ``load_state_dict`` has a way to take an entry that is not own memory."""
    owner = owner_of(model, name)
    if any(map(_loads_itself, owner.modules)):
        return True
    if owner.rest == _EXTRA:
        return type(owner.modules[-1]).set_extra_state is not torch.nn.Module.set_extra_state
    return owner.tensor is not None and tuple(owner.tensor.shape) == shape


def load_state(model: torch.nn.Module, state: dict[str, Any]) -> object:
    """Call ``load_state_dict`` as the model defines it, and let it leave entries out if it can."""
    try:
        parameters = inspect.signature(model.load_state_dict).parameters
    except (TypeError, ValueError):  # no Python function
        return model.load_state_dict(state)
    kinds = {parameter.kind for parameter in parameters.values()}
    if "strict" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return model.load_state_dict(state, strict=False)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return model.load_state_dict(state, False)
    return model.load_state_dict(state)


def has_load_hooks(model: torch.nn.Module) -> bool:
    """Return whether a load of a state dict does more than copy values into own memory."""
    return any(map(_loads_itself, model.modules()))


def _loads_itself(module: torch.nn.Module) -> bool:
    hooks: Iterator[Any] = iter(
        (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    )
    kind = type(module)
    methods: list[Callable[..., Any]] = [kind._load_from_state_dict, kind.load_state_dict]
    own = ("_load_from_state_dict", "load_state_dict")
    methods += [value for name, value in vars(module).items() if name in own]
    methods += [getattr(hook, "hook", hook) for hook in hooks]
    return not all(
        (getattr(method, "__module__", None) or type(method).__module__ or "").startswith(_OF_TORCH)
        for method in methods
    )


def as_tensor(name: str, value: object) -> torch.Tensor:
    """Return a tensor as it is, and any other entry of a state dict as a tensor of bytes.

    The bytes are a file as `offload.format.train_state` describes, of a power of two, so that
    values of nearly the same length take the same space.

    Raises:
        UnsupportedParameterError: The entry could not be given back unchanged; names it.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous()
    is_file = type(value) is io.BytesIO
    try:
        encoded = encode([is_file, value.getvalue() if isinstance(value, io.BytesIO) else value])
        nbytes = _LEAST_BYTES
        while nbytes < packed_bytes(encoded, {}):
            nbytes *= 2
        data = bytearray(pack_encoded(encoded, capacity_bytes=nbytes, header={}))
    except (TrainStateTypeError, TrainStateTooLargeError, ValueError) as error:
        allowed = "dense tensors, bytes or plain values"
        how = f"save {allowed} under names of their own"
        if is_extra(name):
            how = f"let get_extra_state() return {allowed}"
        why = str(error).replace("train_state[1]", "the entry", 1)
        raise UnsupportedParameterError(
            f"{name!r} in the model's state dict is a {type(value).__name__} that cannot be stored "
            f"without loss: {how}, or leave out model= ({why})"
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8)


def as_value(tensor: torch.Tensor, path: str) -> object:
    """Return the entry that `as_tensor` made a tensor of bytes of."""
    here = tensor.cpu()
    found: Any = unpack(ctypes.string_at(here.data_ptr(), here.numel()), path)[0]
    if not isinstance(found, list) or len(found) != 2:
        raise DamagedError(f"{path}: an entry of the state dict was not written by this library")
    return io.BytesIO(bytes(found[1])) if found[0] is True else found[1]
