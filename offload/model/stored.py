"""Tensors of ``model.safetensors``, and the live tensors that they are copied from and to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.ambient import as_user
from offload.device.boundary import is_reachable
from offload.device.filed import FiledTensor
from offload.errors import UnsupportedParameterError
from offload.format.layout import ModelTensor
from offload.model.buffer_watch import digest_of
from offload.model.homes import home_of
from offload.model.load_path import ENCODED, as_tensor, is_taken
from offload.model.memory_overlap import Spans, has_memory
from offload.model.parameters import (
    Trainable,
    group_names,
    how_to_move,
    is_stepped,
    memories,
    names_of,
    require_shape,
)
from offload.model.process_groups import require_whole
from offload.model.shards import Shards, is_dtensor
from offload.update.dtypes import DTYPE_CODES


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor of ``model.safetensors``, with the live tensor that it is copied from and to."""

    spec: ModelTensor
    """Description of the whole tensor."""

    parameter: torch.Tensor
    """Tensor of the model's state dict: a parameter or a buffer."""

    tensor: torch.Tensor
    """Memory that is copied from and to: the parameter itself, this rank's part of it, or a
    copy."""

    by_value: bool
    """Whether a checkpoint copies the tensor at once, because a forward or a step may change it."""

    is_alias: bool = False
    """Whether a step changes the tensor, because it shares memory with a trained parameter."""

    is_here: bool = True
    """Whether this rank stores the tensor or a part of it. If not, `tensor` is empty."""

    is_copy: bool = False
    """Whether the tensor was made for the state dict, and is no memory of the model. Only torch's
    ``load_state_dict`` can give it back."""

    memory: torch.Tensor | None = None
    """Memory of the whole `parameter` as of `captured`; None before that."""

    @property
    def key(self) -> str:
        """Name of the entry in the state dict."""
        return self.spec.name.removesuffix(ENCODED) if self.is_copy else self.spec.name

    def called(self, name: str) -> Stored:
        """Return this object for a file that has the tensor under another one of its names."""
        if name == self.spec.name:
            return self
        others = (n for n in (self.spec.name, *self.spec.aliases) if n != name)
        return replace(self, spec=replace(self.spec, name=name, aliases=tuple(others)))

    def captured(self) -> Stored:
        """Return this object with the present memory, or with a copy if it is copied by value.

        A conversion of the model gives its parameters other memory. The memory of now stays what it
        is as long as the result has views of it.
        """
        tensor = self.tensor.detach()
        tensor = tensor.clone() if self.by_value else tensor
        is_whole = self.tensor is self.parameter or self.tensor is home_of(self.parameter)
        memory = tensor if is_whole else self.parameter.detach()
        return Stored(
            self.spec,
            self.parameter,
            tensor,
            self.by_value,
            self.is_alias,
            self.is_here,
            self.is_copy,
            memory,
        )


def describe_model(
    model: torch.nn.Module | None,
    param_groups: Sequence[Mapping[str, Any]],
    trainable: Sequence[Trainable],
    shards: Shards | None = None,
) -> list[Stored]:
    """Return the tensors of ``model.safetensors``: trainable parameters first, then all others.

    With a model, the tensors are its complete state dict; a tied tensor is listed once, with its
    aliases. Without a model, they are the parameters of the groups. With several ranks, the order
    is the same on all of them: first all parameters of the groups that `is_stepped`, then all
    others.

    Args:
        model: Module that is trained; None if it was not given.
        param_groups: Parameter groups of the optimizer.
        trainable: Trainable parameters, in the order of the result.
        shards: Function that returns this rank's part of a tensor; None if this process stores all
            tensors as a whole.

    Raises:
        UnsupportedParameterError: A tensor cannot be part of a checkpoint.
    """
    entries: dict[torch.Tensor, list[str]] = {t.parameter: [t.spec.name] for t in trainable}
    if shards is not None:
        entries = {p: [n] for n, p in group_names(param_groups, model, shards) if is_stepped(p)}
        entries |= {t.parameter: [t.spec.name] for t in trainable if t.parameter not in entries}
    copies: set[int] = set()
    if model is None:
        for name, parameter in group_names(param_groups, None, shards):
            entries.setdefault(parameter, [name])
    else:
        copies = _add_state_dict(model, entries, names_of(model, shards), shards)
    parameters = {p for g in param_groups for p in g["params"]}
    if model is not None:
        parameters.update(model.parameters())
    memory = {t.parameter: tensor for t, tensor in zip(trainable, memories(trainable), strict=True)}
    spans = Spans(memory.values())
    stored = []
    for parameter, (name, *aliases) in entries.items():
        require_shape(name, parameter)
        tensor = memory.get(parameter)
        if tensor is None:
            tensor = _part(name, parameter, shards)
        if shards is None:
            require_whole(name, parameter)
        if tensor is not None:
            _check_stored(name, tensor)
        dtype, shape = DTYPE_CODES[parameter.dtype], tuple(parameter.shape)
        spec = ModelTensor(name, dtype, shape, tuple(aliases))
        if tensor is None:
            stored.append(_elsewhere(spec, parameter, is_copy=id(parameter) in copies))
            continue
        # While a seal is in progress, the next step may change trained memory as soon as the seal
        # has copied the trained tensor. Aliases of that memory are therefore copied at once.
        is_alias = parameter not in memory and spans.touch(tensor)
        by_value = is_alias or parameter not in parameters
        is_copy = id(parameter) in copies
        stored.append(Stored(spec, parameter, tensor, by_value, is_alias, is_copy=is_copy))
    return stored


def stored_copy(spec: ModelTensor, tensor: torch.Tensor, shards: Shards | None) -> Stored:
    """Return a tensor of a checkpoint that is read into memory which is no part of the model."""
    here = _part(spec.name, tensor, shards)
    if here is None:
        return _elsewhere(spec, tensor, is_copy=True)
    return Stored(spec, tensor, here, by_value=True, is_copy=True)


def _elsewhere(spec: ModelTensor, parameter: torch.Tensor, *, is_copy: bool) -> Stored:
    """Return a tensor of which other ranks store everything."""
    nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return Stored(spec, parameter, nothing, by_value=True, is_here=False, is_copy=is_copy)


def _add_state_dict(
    model: torch.nn.Module,
    entries: dict[torch.Tensor, list[str]],
    named: Callable[[str], str],
    shards: Shards | None,
) -> set[int]:
    """Add what is in a model's state dict to names by tensor; return the ids of copies."""
    own = {id(tensor): tensor for tensor in entries}  # a tensor's own hash takes long
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            own.update((id(tensor), tensor) for tensor in kept.values() if tensor is not None)
    places: dict[object, torch.Tensor] = {}
    taken = {name: tensor for tensor, names in entries.items() for name in names}
    copies: set[int] = set()
    # keep_vars returns the tensors themselves, so that tied ones are recognised by identity
    with as_user():  # the model may have the user's hooks
        live = model.state_dict(keep_vars=True)
    for given, value in live.items():
        name, tensor = named(given), value
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            if not isinstance(value, torch.Tensor):
                name += ENCODED
            if not places:
                places = {place: one for one in own.values() if (place := _place(one)) is not None}
            tensor = places.get(_place(value))  # a hook may have called detach()
            if tensor is None:
                if isinstance(value, torch.Tensor) and given.endswith(ENCODED):
                    raise UnsupportedParameterError(
                        f"{given!r} in the model's state dict is a tensor whose name ends as those "
                        f"of entries that are no tensors do: choose another name than {ENCODED!r}"
                    )
                tensor = as_tensor(name.removesuffix(ENCODED), value)
                copies.add(id(tensor))
                if shards is not None and is_dtensor(tensor):
                    raise UnsupportedParameterError(
                        f"{name!r} in the model's state dict is a DTensor that is no parameter or "
                        "buffer: several ranks cannot store it. Keep it in train_state"
                    )
        if taken.setdefault(name, tensor) is not tensor:
            raise UnsupportedParameterError(
                f"{name!r} in the model's state dict is not the parameter of this name, but a copy "
                "of a hook. Return the parameter itself if keep_vars is set, or leave out model="
            )
        if name not in entries.setdefault(tensor, [name]):
            entries[tensor].append(name)
    return copies


def _place(value: object) -> object:
    """Return what is equal only for two tensors that are the same memory; None if there is none."""
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if value.layout != torch.strided or not has_memory(value):
            return None
        return value.data_ptr(), value.dtype, value.device, tuple(value.shape), value.stride()


def digests_of_untaken(model: torch.nn.Module | None, stored: Sequence[Stored]) -> dict[str, str]:
    """Return a digest of each entry that ``load_state_dict`` has no way to take, by name.

    They may be constants of the model, such as sizes of packed weights.
    """
    return {
        item.key: digest_of(item.tensor)
        for item in stored
        if item.is_copy
        and item.is_here
        and model is not None
        and not is_taken(model, item.key, item.spec.shape)
    }


def _part(name: str, tensor: torch.Tensor, shards: Shards | None) -> torch.Tensor | None:
    """Return this rank's part of a tensor that is not stepped; None if other ranks store it all."""
    if shards is None:
        home = home_of(tensor)
        return tensor if home is None else home
    shard = shards(name, tensor)
    return None if shard is None or shard.is_empty else shard.tensor()


def _check_stored(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that a checkpoint could not contain, or could not be restored into."""
    if tensor.dtype not in DTYPE_CODES or tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedParameterError(
            f"{name!r} in the model's state dict is a {kind} tensor of {tensor.dtype}, which "
            "safetensors cannot hold; register it as non-persistent or keep it in train_state"
        )
    if not is_reachable(tensor.device):
        raise UnsupportedParameterError(
            f"{name!r} in the model's state dict is on {tensor.device}; a checkpoint is made of "
            f"tensors in host memory or on a CUDA device. {how_to_move(tensor)} before "
            "constructing the optimizer, or register it as non-persistent"
        )
    if not tensor.numel():
        return
    if any(n > 1 and not stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UnsupportedParameterError(
            f"{name!r} in the model's state dict has several elements at the same place in memory, "
            "so that no checkpoint can be restored into it. expand() makes such tensors (shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}). Give it memory of its own "
            f"with {name.rpartition('.')[2]}.clone(), or register it as non-persistent"
        )
    if not (has_memory(tensor) or isinstance(tensor, FiledTensor)):
        raise UnsupportedParameterError(
            f"{name!r} in the model's state dict is a {type(tensor).__name__} without memory of "
            "its own, whose bytes cannot be read and written in place. Use a plain tensor, or "
            "register it as non-persistent and keep it in train_state"
        )
