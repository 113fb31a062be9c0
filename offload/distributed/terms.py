"""Terms of a training by several ranks: arguments of the optimizer that all ranks must share.

They are compared before anything is exchanged whose form depends on them. The first message has the
versions, and a digest of all other terms. Only if the digests differ, the terms themselves follow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

import offload.errors  # binds the package, whose version is compared
from offload.distributed.agreement.peers import Json
from offload.errors import RanksError
from offload.format._manifest_fields import NOT_HYPERPARAMETERS, encode_group
from offload.format.strict_json import short
from offload.model.parameters import unwrapped_names
from offload.options import Options
from offload.retention.policy import Retention

_SAME_OPTIONS: Final = (
    "master",
    "state_dtype",
    "chunk_bytes",
    "overlap",
    "placement",
    "rounding_seed",
    "verify",
    "train_state_bytes",
)
"""Options that belong to the state or to the order of calls. The others may differ, because hosts
do; or they are compared where they are used (`reencode`, `tier`)."""

_NOTHING: Final = "nothing"


def terms_of(
    optimizer: str,
    param_groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    keep: Retention,
    options: Options,
) -> dict[str, Json]:
    """Return what all ranks must share besides their parameters, by its name in messages."""
    terms: dict[str, Json] = {
        "the optimizer's class": optimizer,
        "model=": "no module" if model is None else "a module",
        "the number of parameter groups": len(param_groups),
    }
    for index, group in enumerate(param_groups):
        terms[f"the number of parameters of param_groups[{index}]"] = len(group["params"])
        for key, value in group.items():
            if key not in NOT_HYPERPARAMETERS:
                terms[f"param_groups[{index}][{key!r}]"] = _told(index, key, value)
    for name in _SAME_OPTIONS:
        terms[f"Options({name}=...)"] = getattr(options, name)
    terms["keep="] = [_policy(part) for part in keep.parts]
    if model is not None:
        for name, buffer in _buffers(model):
            terms[f"the buffer {name!r}"] = buffer
    return terms


def require_same_terms(
    terms: Mapping[str, Json], exchange: Callable[[Json], Sequence[Any]]
) -> None:
    """Check that all ranks have the same versions and the same terms. Collective."""
    text = json.dumps([*terms.items()])
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    said = exchange([offload.__version__, str(torch.__version__), digest])
    for number, package in enumerate(("offload", "torch")):
        versions = [_version(one, number) for one in said]
        for rank, version in enumerate(versions):
            if version != versions[0]:
                raise RanksError(
                    f"rank 0 has {package} {versions[0]} and rank {rank} has {package} {version}: "
                    f"install the same version of {package} for all ranks"
                )
    if all(one == said[0] for one in said):
        return
    everywhere = [dict(pairs) for pairs in exchange([[*pair] for pair in terms.items()])]
    first = everywhere[0]
    for rank, theirs in enumerate(everywhere):
        for name in dict.fromkeys([*first, *theirs]):
            mine, other = first.get(name, _NOTHING), theirs.get(name, _NOTHING)
            if mine != other or type(mine) is not type(other):
                raise RanksError(
                    f"rank 0 and rank {rank} differ in {name}: {short(mine)} and {short(other)}. "
                    "Make the same model and the same optimizer on every rank"
                )


def _version(said: object, number: int) -> str:
    """Return a version that a rank has told; ranks of another version may tell something else."""
    if isinstance(said, list) and number < len(said):
        return str(said[number])
    return "of another version"


def _told(index: int, key: str, value: object) -> Json:
    """Return a hyper-parameter as JSON; only its type if a checkpoint could not store it."""
    try:
        return encode_group(index, {key: value}).get(key)
    except TypeError:  # the first checkpoint refuses it by name
        return type(value).__name__


def _policy(part: Retention) -> str:
    """Return a part of a policy in words; a class without any is named."""
    is_told = type(part).__repr__ is not object.__repr__
    return repr(part) if is_told else type(part).__name__


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, Json]]:
    """Yield the buffers that checkpoints have: name, dtype and shape."""
    unwrapped = unwrapped_names(model)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if torch.nn.parameter.is_lazy(buffer):
                continue  # it has no shape yet
            full = unwrapped(f"{prefix}.{name}" if prefix else name)
            with torch._C.DisableTorchFunctionSubclass():
                yield full, f"{buffer.dtype} of shape {list(buffer.shape)}"
