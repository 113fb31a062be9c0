"""Loading of a checkpoint's parameters into a model, in a process without an optimizer."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from gds import Backend
from offload.ambient import as_user, in_neutral
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.opening import open_for_parameters
from offload.device.filed import FiledTensor
from offload.errors import MismatchError, UnsupportedParameterError
from offload.format.layout import ModelTensor
from offload.format.unreadable import reading
from offload.model.buffer_watch import digest_of
from offload.model.homes import home_of, written
from offload.model.load_path import (
    ENCODED,
    as_tensor,
    as_value,
    has_load_hooks,
    is_extra,
    is_taken,
    load_state,
    owner_of,
)
from offload.model.model_reading import LiveBox, read_model
from offload.model.outside import require_values
from offload.model.parameters import names_of
from offload.model.replacing import replacing
from offload.model.shards import Shards
from offload.model.stored import Stored, describe_model, stored_copy
from offload.update.dtypes import DTYPE_CODES

_NUMBERED = re.compile(r"group\d+\.param\d+")
"""Names that the library gives to parameters without a name."""

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@in_neutral
def load_parameters(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> int:
    """Load a checkpoint's parameters and buffers into a model, and check their digests.

    Only ``model.safetensors`` is read, block by block: 2 bytes per bf16 parameter. Parts on drives
    other than the first are not needed, unless several ranks made the checkpoint: their parts have
    the digests, or the model itself in shard files.

    Args:
        model: Model, changed in place. It is not changed if names, shapes or dtypes differ, unless
            a buffer has another shape and the model's own loading code then fails to resize it.
        checkpoint: A checkpoint directory; or a store, for its newest checkpoint. If the newest
            checkpoint is damaged, the previous one is used, with a warning.
        parts: Directories that have the parts of other ranks; None for those in which they were
            written.
        backend: Backend of the checkpoint; the local file system by default.

    Returns:
        The number of optimizer steps that the parameters had seen.

    Raises:
        MismatchError: The model's state dict differs from the checkpoint's; lists the differences.
        CheckpointError: The checkpoint is damaged.
        UnreadableError: The checkpoint could not be read, which says nothing about its content.
            Part of the content may already be in the model.
    """
    require_values(
        ((name, one) for name, one in model.named_parameters() if home_of(one) is None),
        instead='give it memory first, with model.to_empty(device="cpu"), or train it on the drive',
    )
    with open_for_parameters(checkpoint, backend=backend) as opened:
        manifest = opened.manifest
        stored = in_checkpoint(
            model, describe_model(model, [], []), manifest.layout.model, opened.path
        )
        wanted = {t.name: (t.dtype, t.shape) for t in manifest.layout.model}
        if filed := [one.spec.name for one in stored if isinstance(one.tensor, FiledTensor)]:
            raise UnsupportedParameterError(
                f"load_parameters(): {filed[0]!r} is in the directory of an optimizer with "
                'parameters="drive": call its restore(), or pass a dict to model.load_state_dict()'
            )
        named = names_in_checkpoint(stored, manifest.layout.model)
        tensors = {
            name: (entry.tensor, (entry.spec.dtype, entry.spec.shape))
            for name, entry in zip(named, stored, strict=True)
        }
        live = {n: what for n, (_, what) in tensors.items()}
        instead = "or name a checkpoint of this model"
        check_same(wanted, live, opened.path, call="load_parameters()", instead=instead)
        with reading(opened.path), written():
            whole = [LiveBox.whole(n, tensor) for n, (tensor, _) in tensors.items()]
            read_model(opened.backend, opened.path, manifest, whole, parts=parts)
        give_back(model, stored, opened.path)
        return manifest.step


def in_checkpoint(
    model: torch.nn.Module | None,
    stored: Sequence[Stored],
    held: Sequence[ModelTensor],
    path: str,
    shards: Shards | None = None,
) -> list[Stored]:
    """Return what the tensors of a checkpoint are read into.

    Entries of the state dict that are copies get new memory, with dtype and shape of the
    checkpoint: only `give_back` compares them with the model. So do buffers of another size, if
    code of the model may resize them when it loads.

    Args:
        model: Model that is loaded into.
        stored: Its tensors now.
        held: Tensors of the checkpoint.
        path: Path of the checkpoint.
        shards: As for `describe_model`.
    """
    resized = _resized(model, stored, held)
    copies = {item.key: item for item in stored if item.is_copy or item.spec.name in resized}
    found = [item for item in stored if not (item.is_copy or item.spec.name in resized)]
    names = {name for item in found for name in (item.spec.name, *item.spec.aliases)}
    if model is None:
        return found
    for tensor in held:
        key = tensor.name.removesuffix(ENCODED)
        item = copies.pop(key, None)
        for alias in tensor.aliases:
            copies.pop(alias, None)
        if not names.isdisjoint((tensor.name, *tensor.aliases)):
            continue
        if item is None and not is_taken(model, key, tensor.shape):
            continue
        device = item.tensor.device if item is not None else torch.device("cpu")
        memory = torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype], device=device)
        found.append(stored_copy(tensor, memory, shards))
    for key, item in copies.items():
        if item.spec.name != key:
            warnings.warn(
                f"{path} has no {key!r}, because the model did not have it then: it stays as it is",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            found.append(item)  # the caller names it among the differences
    return found


def _resized(
    model: torch.nn.Module | None, stored: Sequence[Stored], held: Sequence[ModelTensor]
) -> set[str]:
    """Return the names of tensors whose shape a load of the model may make the checkpoint's."""
    sizes = {name: (t.dtype, t.shape) for t in held for name in (t.name, *t.aliases)}
    found = set()
    for item in stored:
        dtype, shape = sizes.get(item.spec.name, (item.spec.dtype, item.spec.shape))
        if (
            model is not None
            and not (item.is_copy or item.parameter.requires_grad)
            and not item.spec.name.endswith(ENCODED)
            and (shape != item.spec.shape and dtype == item.spec.dtype)
            and is_taken(model, item.spec.name, shape)
        ):
            found.add(item.spec.name)
    return found


def give_back(
    model: torch.nn.Module | None, stored: Sequence[Stored], path: str, shards: Shards | None = None
) -> None:
    """Let torch's ``load_state_dict`` give a model what was read, and run its hooks.

    Own memory has its values already, and stands for itself: torch copies it to itself. Nothing is
    done unless `must_give_back`.

    Args:
        model: Model that has been loaded into.
        stored: Its tensors, and copies that were read; see `in_checkpoint`.
        path: Path of the checkpoint.
        shards: As for `describe_model`.

    Raises:
        MismatchError: The model does not take an entry, and has another value of it.
    """
    if model is None or not must_give_back(model, stored):
        return
    copies = {name: s for s in stored if s.is_copy for name in (s.key, *s.spec.aliases)}
    own = {name for s in stored if not s.is_copy for name in (s.spec.name, *s.spec.aliases)}
    named = names_of(model, shards)
    with as_user(), replacing():
        state = model.state_dict(keep_vars=True)
        given: list[str] = []
        for key, value in list(state.items()):
            item = copies.pop(named(key), None)
            if item is None:
                if named(key) not in own:
                    del state[key]
            elif is_taken(model, key, item.spec.shape):
                given.append(key)
                state[key] = _value(item, path)
            elif digest_of(item.parameter) == digest_of(as_tensor(key, value)):
                del state[key]
            else:
                raise _untaken(path, key, "it has another value in the model")
        for name, item in copies.items():
            owner = owner_of(model, name)
            given.append(f"{owner.path}{owner.rest}")
            state[given[-1]] = _value(item, path)
        try:
            in_inference = any(s.tensor.is_inference() for s in stored)
            with torch.inference_mode() if in_inference else nullcontext():
                result = load_state(model, state)
        except RuntimeError as error:
            raise _untaken(path, ", ".join(given[:3]), str(error).rstrip(".")) from error
    for key in getattr(result, "unexpected_keys", ()):
        if key in given:
            raise _untaken(path, key, "it is an unexpected key")


def must_give_back(model: torch.nn.Module | None, stored: Sequence[Stored]) -> bool:
    """Return whether not all of a model is own memory, or somebody hooks its load."""
    return model is not None and (any(s.is_copy for s in stored) or has_load_hooks(model))


def _value(item: Stored, path: str) -> object:
    return as_value(item.parameter, path) if item.spec.name != item.key else item.parameter


def _untaken(path: str, key: str, why: str) -> MismatchError:
    return MismatchError(
        f"{path}: the model's load_state_dict() does not take {key!r}: {why}. Build the model as "
        "it was when the checkpoint was made"
    )


def names_in_checkpoint(live: Sequence[Stored], held: Sequence[ModelTensor]) -> list[str]:
    """Return each live tensor's name in a checkpoint, or its own name if the checkpoint lacks it.

    A checkpoint may hold a tied tensor under another of the tensor's names. It may also hold a
    parameter under a name that the state dict does not have. The name in the state dict is then an
    alias in the checkpoint.
    """
    own = [(item.spec.name, *item.spec.aliases) for item in live]
    wanted = {tensor.name for tensor in held}
    found = [next((name for name in names if name in wanted), None) for names in own]
    by_alias = {alias: tensor.name for tensor in held for alias in tensor.aliases}
    taken = set(found)
    for number, names in enumerate(own):
        name = next((by_alias[n] for n in names if n in by_alias), None)
        if found[number] is None and name not in taken:  # taken: tied only in the checkpoint
            found[number] = name
            taken.add(name)
    return [name or names[0] for name, names in zip(found, own, strict=True)]


def check_same(
    stored: Mapping[str, tuple[str, tuple[int, ...]]],
    live: Mapping[str, tuple[str, tuple[int, ...]]],
    path: str,
    *,
    call: str,
    instead: str,
) -> None:
    """Compare dtype and shape of every tensor by name.

    Args:
        stored: Dtype and shape of the checkpoint's tensors, by name.
        live: Dtype and shape of the model's tensors, by name.
        path: Path of the checkpoint.
        call: Call of the user, for the message.
        instead: Advice for a checkpoint of another model, as the end of a sentence.

    Raises:
        MismatchError: The tensors differ; lists the first few differences.
    """
    gone = [n for n in stored if n not in live]
    keys = {n: key for n in gone if is_extra(key := n.removesuffix(ENCODED))}
    differences = [f"{keys.get(n, n)!r} is only in the checkpoint" for n in gone]
    differences += [f"{n!r} is only in the model" for n in live if n not in stored]
    changed = [n for n in stored if n in live and stored[n] != live[n]]
    differences += [
        f"{n!r} is {_what(stored[n])} in the checkpoint and {_what(live[n])} in the model"
        for n in changed
    ]
    if not differences:
        return
    more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
    advice = "Build the model as it was then, with the same configuration"
    if any(stored[n][0] != live[n][0] for n in changed):
        advice += f" and dtype, and convert it to another dtype after {call}"
    advice += f"; {instead}."
    if all(_NUMBERED.fullmatch(n) for n in stored):
        advice += (
            " It was made without model=, so it does not have the model's names: an optimizer that "
            "is made without model= can restore it."
        )
    elif not stored.keys() & live.keys():
        advice += (
            " No name is the same on both sides: pass model= as it was passed when the "
            "checkpoint was made, and the module itself rather than a wrapper of it "
            "(torch.compile and DistributedDataParallel put a prefix before every name)."
        )
    raise MismatchError(
        f"{path}: the model differs from the one that was saved: "
        f"{'; '.join(differences[:5])}{more}. {advice}"
    )


def _what(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"
