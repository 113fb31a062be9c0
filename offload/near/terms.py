"""Documents of the connection, as strict JSON: what a client trains, and how its chunks are laid.

Nothing is imported by name, and nothing is unpickled: an optimizer is one of the classes that this
module lists, and hyper-parameters are encoded as in a manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from offload.errors import NearError, UnsupportedOptimizerError
from offload.format._manifest_fields import (
    count,
    decode_group,
    dtype,
    each,
    encode_group,
    items,
    label,
    mapping,
    names,
    shape,
    text,
)
from offload.format.layout import Layout, ParameterSpec
from offload.format.strict_json import short
from offload.near.place import run_name
from offload.options import DriveTuning, Options
from offload.retention.policy import (
    BestBy,
    EverySeconds,
    EverySteps,
    LastK,
    ParametersOnly,
    Retention,
)

CLASSES: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    one.__name__: one
    for one in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}
"""Classes that a server knows. Whether a class can be stepped chunk by chunk is found out there."""

_POLICIES: Final[tuple[type[Retention], ...]] = (LastK, EverySteps, EverySeconds, BestBy)

_SENT_OPTIONS: Final = (
    *("chunk_bytes", "ring_chunks", "host_memory", "master", "state_dtype", "rounding_seed"),
    *("reencode", "verify", "train_state_bytes", "reader_timeout_s", "record"),
    *("allow_volatile", "allow_remote"),
)
"""Options that say how the server treats state. The others are of the training process."""

_SENT_DRIVES: Final = ("threads", "request_bytes", "shares", "direct", "calibrate")

_MAX_SECONDS = 1e6
_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 50


@dataclass(frozen=True, slots=True)
class TensorTerms:
    """One tensor of the model."""

    dtype: str
    """Code of the dtype in safetensors files."""

    shape: tuple[int, ...]
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """All that a server is told of a training."""

    run: str
    optimizer: str
    """Name of a class in `CLASSES`."""

    hyper: Mapping[str, Any]
    """Keyword arguments of the class."""

    tensors: Sequence[TensorTerms]
    entries: Sequence[tuple[str, int]] | None
    """Names and tensors of the model's state dict, in its order; None without a model."""

    groups: Sequence[tuple[Mapping[str, Any], Sequence[int], Sequence[str] | None]]
    """Hyper-parameters, tensors, and names of the parameters of each group, if they have any."""

    keep: Retention
    fresh: bool
    replaces: int | None
    """Generation of the newest checkpoint that a fresh run has found; None in the first hello."""

    options: Options
    timeout_s: float
    """Seconds without a byte after which the client is lost to the server, and vice versa."""


def encode_terms(terms: Terms) -> dict[str, Any]:
    """Return terms as a document.

    Raises:
        UnsupportedOptimizerError: The server does not know the class.
        NearError: A policy or an option is none that can be sent.
        TypeError: A hyper-parameter cannot be stored.
    """
    if terms.optimizer not in CLASSES:
        raise UnsupportedOptimizerError(
            f"{terms.optimizer} cannot be updated by a server, which knows "
            f"{', '.join(sorted(CLASSES))}: use one of them, or a directory of this machine"
        )
    return {
        "run": terms.run,
        "optimizer": terms.optimizer,
        "hyper": encode_group(0, terms.hyper),
        "tensors": [
            [t.dtype, list(t.shape), t.is_parameter, t.requires_grad] for t in terms.tensors
        ],
        "entries": None if terms.entries is None else [list(entry) for entry in terms.entries],
        "groups": [
            [encode_group(n, hyper), list(members), None if called is None else list(called)]
            for n, (hyper, members, called) in enumerate(terms.groups)
        ],
        "keep": _encode_policies(terms.keep),
        "fresh": terms.fresh,
        "replaces": terms.replaces,
        "options": _encode_options(terms.options),
        "timeout_s": terms.timeout_s,
    }


def decode_terms(document: Mapping[str, Any]) -> Terms:
    """Return the terms in a document.

    Raises:
        ValueError, TypeError, KeyError: The document is none that `encode_terms` returns.
    """
    found = tuple(_tensor(one) for one in items(document["tensors"]))

    def number(value: object) -> int:
        """Return the value if it is the number of a tensor."""
        if count(value) >= len(found):
            raise ValueError(f"there is no tensor {value}")
        return count(value)

    entries = document["entries"]
    if entries is not None:
        pairs = [(text(name), number(index)) for name, index in each(items, entries)]
        names([name for name, _ in pairs])
        entries = pairs
    if document["optimizer"] not in CLASSES:
        raise ValueError(f"no server knows the optimizer {label(document['optimizer'])}")
    timeout_s = document["timeout_s"]
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_SECONDS:
        raise ValueError(f"{timeout_s!r} is not a number of seconds")
    return Terms(
        run=run_name(document["run"]),
        optimizer=document["optimizer"],
        hyper=decode_group(mapping(document["hyper"])),
        tensors=found,
        entries=entries,
        groups=[_group(one, number) for one in items(document["groups"])],
        keep=_policies(document["keep"]),
        fresh=_boolean(document["fresh"]),
        replaces=None if document["replaces"] is None else count(document["replaces"]),
        options=_options(mapping(document["options"])),
        timeout_s=float(timeout_s),
    )


def encode_layout(layout: Layout, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return what a client needs to know of a layout, as a document.

    Args:
        layout: Layout of the server's store.
        numbers: Number of each parameter's tensor in the terms, by its name.
    """
    return {
        "parameters": [
            [numbers[p.name], p.dtype, list(p.shape), list(p.arrays)] for p in layout.parameters
        ],
        "chunk_elements": layout.chunk_elements,
        "state_dtype": layout.state_dtype,
    }


def decode_layout(
    document: Mapping[str, Any], tensors: Sequence[TensorTerms]
) -> tuple[Layout, list[int]]:
    """Return a layout with the same chunks, and the number of each of its parameters' tensors.

    Args:
        document: What `encode_layout` returns.
        tensors: Tensors of the client's terms, some of which the layout has.

    Raises:
        ValueError, TypeError, LookupError: The document is none of these tensors.
    """
    numbers, specs = [], []
    for number, code, sizes, arrays in each(items, document["parameters"]):
        numbers.append(count(number))
        if (dtype(code), shape(sizes)) != (tensors[number].dtype, tensors[number].shape):
            raise ValueError(f"tensor {number} in another shape")
        specs.append(ParameterSpec(str(number), dtype(code), shape(sizes), 0, names(arrays)))
    chunk_elements = count(document["chunk_elements"])
    if len({*numbers}) != len(numbers) or chunk_elements < 1024 or chunk_elements % 1024:
        raise ValueError("chunks that no store has")
    return Layout(tuple(specs), (), chunk_elements, text(document["state_dtype"])), numbers


def encode_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of all groups as JSON values."""
    return [encode_group(n, group) for n, group in enumerate(groups)]


def decode_groups(value: object, expected: int) -> list[dict[str, Any]]:
    """Invert `encode_groups`, for a number of groups; raise ValueError for anything else."""
    found = [decode_group(mapping(group)) for group in items(value)]
    if len(found) != expected:
        raise ValueError(f"{len(found)} groups, expected {expected}")
    return found


def _tensor(value: object) -> TensorTerms:
    code, sizes, is_parameter, requires_grad = items(value)
    if len(shape(sizes)) > _MAX_DIMS or math.prod(sizes) > _MAX_ELEMENTS:
        raise ValueError(f"no tensor has the shape {short(sizes)}")
    return TensorTerms(dtype(code), shape(sizes), _boolean(is_parameter), _boolean(requires_grad))


def _group(
    value: object, number: Callable[[object], int]
) -> tuple[dict[str, Any], tuple[int, ...], tuple[str, ...] | None]:
    hyper, members, called = items(value)
    found = each(number, members)
    return decode_group(mapping(hyper)), found, None if called is None else names(called)


def _encode_policies(policy: Retention) -> list[Any]:
    return [_encode_policy(part) for part in policy.parts]


def _encode_policy(part: Retention) -> list[Any]:
    if type(part) is ParametersOnly:
        return [ParametersOnly.__name__, {"rule": _encode_policies(part.rule)}]
    if type(part) not in _POLICIES:
        known = ", ".join([*(one.__name__ for one in _POLICIES), ParametersOnly.__name__])
        raise NearError(f"keep={part!r:.60} cannot be sent to a server: combine {known}")
    return [type(part).__name__, {f.name: getattr(part, f.name) for f in fields(part)}]  # type: ignore[arg-type]


def _policies(value: object) -> Retention:
    (found, *more) = [_policy(one) for one in items(value)]
    for part in more:
        found = found | part
    return found


def _policy(value: object) -> Retention:
    name, arguments = items(value)
    if name == ParametersOnly.__name__:
        return ParametersOnly(_policies(mapping(arguments)["rule"]))
    known = {one.__name__: one for one in _POLICIES}
    return known[name](**mapping(arguments))


def _encode_options(options: Options) -> dict[str, Any]:
    host_memory = options.host_memory
    if not isinstance(host_memory, int | str) or "/" in str(host_memory):
        raise NearError(
            f"host_memory={host_memory!r:.60} is memory of this machine: give a server a number "
            'of bytes, such as "8GiB"'
        )
    sent: dict[str, Any] = {name: getattr(options, name) for name in _SENT_OPTIONS}
    sent["drives"] = {name: getattr(options.drives, name) for name in _SENT_DRIVES}
    return sent


def _options(sent: Mapping[str, Any]) -> Options:
    values = {name: sent[name] for name in _SENT_OPTIONS}
    drives = {name: mapping(sent["drives"])[name] for name in _SENT_DRIVES}
    if isinstance(drives["shares"], list):
        drives["shares"] = tuple(drives["shares"])
    if not isinstance(values["host_memory"], int | str) or "/" in str(values["host_memory"]):
        raise ValueError("host_memory is not a number of bytes")
    return Options(**values, drives=DriveTuning(**drives))


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.60} is not true or false")
    return value
