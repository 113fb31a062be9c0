"""Recognition of other programs' checkpoints, which are opened without reading their tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.ambient import in_neutral
from offload.errors import CheckpointError, MismatchError
from offload.exchange.stored_tensor import StoredTensor, read_json, require_file
from offload.exchange.torch_dicts import MASTERS, NUM_STEPS
from offload.exchange.torch_files import read_structure
from offload.exchange.weights import find_tied
from offload.format.header import MAX_HEADER_BYTES, TensorFileError, read_header
from offload.format.strict_json import is_text, short
from offload.units import seen_from
from offload.update.coding.filler import TensorSource
from offload.update.dtypes import DTYPES

_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_SNIFFED_BYTES = 512


@dataclass(slots=True)
class ForeignCheckpoint:
    """A checkpoint of another program; its tensors are read when they are needed."""

    path: str

    model: Mapping[str, TensorSource]
    """Every tensor of the model's state dict, by name. Tied tensors are listed once."""

    optimizer: Mapping[str, Any]
    """torch's state dict of the optimizer, keyed by numbers or names of parameters; empty if the
    source has weights alone."""

    masters: Mapping[Any, TensorSource] = field(default_factory=dict)
    """FP32 values of parameters, keyed like the state in `optimizer`."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied tensors, each with its name in `model`."""

    step: Any = None
    """Number of optimizer steps taken, as the checkpoint states it, unchecked; None if it does
    not."""

    step_from: str = ""
    """Origin of `step` (key and file), for messages."""

    is_ordered: bool = False
    """Whether `model` is in the order of the model's own state dict."""


@in_neutral
def open_foreign(path: str, model: str | None = None) -> ForeignCheckpoint:
    """Recognize the format of another program's checkpoint, and open it."""
    if os.path.isdir(path):
        if os.path.exists(f"{path}/.metadata"):
            from offload.exchange.dcp_reader import read_dcp

            return _from_structure(path, read_dcp(path), model)
        if os.path.exists(f"{path}/optimizer.pt"):
            return _open_hf(path, model)
        return _open_weights(path, _weights_in(path), model)
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such file or directory")
    if path.endswith((".safetensors", ".safetensors.index.json")):
        return _open_weights(path, path, model)
    _require_torch_file(
        path,
        "a file of torch.save, a .safetensors file, a directory of a Hugging Face model or of its "
        "Trainer (checkpoint-<N>), or one of torch.distributed.checkpoint",
    )
    return _from_structure(path, read_structure(path), model)


def _from_structure(path: str, found: Any, model: str | None) -> ForeignCheckpoint:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected state dicts")
    optimizer: Any = found
    if not {"state", "param_groups"} <= found.keys():
        optimizer = next((found[k] for k in _OPTIMIZER_KEYS if k in found), None)
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        raise CheckpointError(
            f"{path}: no optimizer's state dict in it: it has {sorted(map(str, found))[:8]}, "
            f"expected 'state' and 'param_groups', or one of {', '.join(_OPTIMIZER_KEYS)}"
        )
    masters = optimizer.get(MASTERS) or found.get(MASTERS) or {}
    _check_optimizer(path, optimizer, masters)
    out = ForeignCheckpoint(path, {}, optimizer, masters)
    for holder, key in ((found, "step"), (optimizer, NUM_STEPS)):
        if key in holder:
            out.step, out.step_from = holder[key], f"{key!r} in {path}"
            break
    if model is not None:
        return _with_model(out, model)
    tensors = next((found[k] for k in _MODEL_KEYS if k in found and found is not optimizer), None)
    if not isinstance(tensors, Mapping):
        raise CheckpointError(
            f"{path}: no model's state dict in it (one of {', '.join(_MODEL_KEYS)}): pass the "
            "file that has it with --model (model= in Python)"
        )
    return _with_tensors(out, tensors)


def _check_optimizer(path: str, optimizer: Mapping[str, Any], masters: Any) -> None:
    """Check that an optimizer's state dict has torch's structure."""
    groups, state = optimizer["param_groups"], optimizer["state"]
    if not isinstance(groups, list | tuple) or not groups:
        raise CheckpointError(f"{path}: 'param_groups' is {short(groups)}, expected a list of some")
    for index, group in enumerate(groups):
        at = f"{path}: param_groups[{index}]"
        if not isinstance(group, Mapping) or not all(is_text(key) for key in group):
            raise CheckpointError(f"{at} is {short(group)}, expected a dict with names for keys")
        params, names = group.get("params"), group.get("param_names", [])
        if not isinstance(params, list | tuple) or not all(map(_is_key, params)):
            raise CheckpointError(
                f"{at}['params'] is {short(params)}, expected a list of numbers or names"
            )
        if not isinstance(names, list | tuple) or not all(map(is_text, names)):
            raise CheckpointError(
                f"{at}['param_names'] is {short(names)}, expected a list of names"
            )
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: 'state' is {short(state)}, expected a dict")
    for key, value in state.items():
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(
                f"{path}: the state of {short(key)} is a {type(value).__name__}, expected a dict "
                "with names for keys"
            )
    if not isinstance(masters, Mapping) or not all(hasattr(m, "read") for m in masters.values()):
        raise CheckpointError(f"{path}: its masters are {short(masters)}, expected tensors")


def _is_key(value: Any) -> bool:
    return is_text(value) or (type(value) is int and 0 <= value < 1 << 63)


def _open_hf(path: str, model: str | None) -> ForeignCheckpoint:
    optimizer = read_structure(f"{path}/optimizer.pt")
    out = _from_structure(path, optimizer, model or _model_file(path))
    if os.path.exists(f"{path}/master.safetensors"):
        masters, _ = open_safetensors(f"{path}/master.safetensors")
        numbers = {
            name: number
            for group in out.optimizer["param_groups"]
            for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        if masters.keys() - numbers.keys():
            raise MismatchError(
                f"{path}: master.safetensors has parameters that optimizer.pt does not name"
            )
        out.masters = {numbers[name]: source for name, source in masters.items()}
    state = f"{path}/trainer_state.json"
    if os.path.lexists(state):
        found = read_json(state)
        if not isinstance(found, dict):
            raise CheckpointError(f"{state}: a {type(found).__name__}, expected an object")
        if found.get("global_step") is not None:
            out.step, out.step_from = found["global_step"], f"'global_step' in {state}"
    return out


def _weights_in(path: str) -> str:
    """Return the file with the weights of a directory in which nothing else is to be imported."""
    names = sorted(os.listdir(path))
    if not {*_MODEL_FILES} & {*names}:
        raise CheckpointError(
            f"{path}: holds neither an optimizer.pt, nor the .metadata of a distributed "
            f"checkpoint, nor weights ({', '.join(_MODEL_FILES)})"
        )
    found = _model_file(path)
    if state := [name for name in names if name.startswith(("optimizer", "global_step"))]:
        raise CheckpointError(
            f"{path}: has optimizer state in {state[0]}, which is not read: to import the weights "
            f"alone, name {found}"
        )
    return found


def _open_weights(path: str, file: str, model: str | None) -> ForeignCheckpoint:
    """Open weights that no optimizer's state belongs to."""
    if model is not None:
        raise CheckpointError(
            f"{path}: weights without an optimizer's state, so there is no other file for the "
            "model: leave out --model (model= in Python)"
        )
    foreign = _with_model(ForeignCheckpoint(path, {}, {}), file)
    if not foreign.model:
        raise CheckpointError(f"{path}: has no tensors")
    if tied := find_tied(os.path.dirname(file), foreign.model):
        alias, name = tied
        foreign.model = {n: tensor for n, tensor in foreign.model.items() if n != alias}
        foreign.aliases = {**foreign.aliases, alias: name}
    return foreign


def _require_torch_file(path: str, accepted: str) -> None:
    """Refuse a file that `torch.save` cannot have written, judged by its first bytes."""
    require_file(path)
    with open(path, "rb") as file:
        start = file.read(_SNIFFED_BYTES)
    looks = _looks_like(start)
    if looks:
        raise CheckpointError(f"{path}: {looks}; expected {accepted}")


def _looks_like(start: bytes) -> str:
    """Return the format of a file, given its first bytes; empty if it may be of `torch.save`."""
    if not start:
        return "is empty"
    if start.startswith(b"GGUF"):
        return "looks like GGUF, which has no optimizer state"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES:
        return "looks like safetensors, which have tensors, but no optimizer's state dict"
    text = start.decode("utf-8", errors="ignore")
    whole = len(text.encode()) > len(start) - 4  # the last character may be cut off
    if text and whole and all(c.isprintable() or c.isspace() for c in text):
        return f"looks like text (it begins with {text.splitlines()[0]!r:.60})"
    return ""


_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def _model_file(path: str) -> str:
    for name in _MODEL_FILES:
        if os.path.exists(f"{path}/{name}"):
            return f"{path}/{name}"
    raise CheckpointError(f"{path}: has none of {', '.join(_MODEL_FILES)}")


def _with_model(foreign: ForeignCheckpoint, path: str) -> ForeignCheckpoint:
    if path.endswith(".index.json"):
        foreign.model, foreign.aliases = _open_sharded(path)
    elif path.endswith(".safetensors"):
        foreign.model, foreign.aliases = open_safetensors(path)
    else:
        _require_torch_file(
            path, "a .safetensors file, the .index.json of several, or a file of torch.save"
        )
        found = read_structure(path)
        if isinstance(found, Mapping):
            found = next((found[k] for k in _MODEL_KEYS if k in found), found)
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a state dict")
        return _with_tensors(foreign, found)
    return foreign


def _open_sharded(path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Open the tensors and aliases of several safetensors files, given their index."""
    found = read_json(path)
    named = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(named, dict) or not all(isinstance(n, str) for n in named.values()):
        raise CheckpointError(f"{path}: has no 'weight_map' from names of tensors to files")
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for shard in sorted({*named.values()}):
        if os.path.basename(shard) != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{path}: names a file outside its directory: {shard!r:.80}")
        file = os.path.join(os.path.dirname(path), shard)
        held, tied = open_safetensors(file)
        for name in held:
            if named.get(name) != shard:
                where = f"in {named[name]}" if name in named else "in none"
                raise CheckpointError(
                    f"{file}: has {name!r:.80}, which is {where} of the files by {path}"
                )
        tensors.update(held)
        aliases.update(tied)
    if missing := [name for name in named if name not in tensors and name not in aliases]:
        raise CheckpointError(f"{path}: {named[missing[0]]} lacks {missing[0]!r:.80}")
    return tensors, aliases


def _with_tensors(foreign: ForeignCheckpoint, found: Mapping[str, Any]) -> ForeignCheckpoint:
    """Add the tensors of a model's state dict to `foreign`, and list tied tensors once."""
    model: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in found.items():
        if not hasattr(tensor, "read"):
            continue  # extra state, which is not a tensor
        if not is_text(name):
            raise CheckpointError(
                f"{foreign.path}: a key of the model's state dict is {name!a:.80}, expected "
                "Unicode text"
            )
        key = getattr(tensor, "tie_key", None)
        if key is not None and key in first:
            aliases[name] = first[key]
            continue
        if key is not None:
            first[key] = name
        model[name] = tensor
    foreign.model, foreign.aliases, foreign.is_ordered = model, aliases, True
    return foreign


def open_safetensors(path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Open a safetensors file without reading its tensors."""
    size = require_file(path)
    try:
        with open(path, "rb") as file:

            def read(offset: int, length: int) -> bytes:
                """Return a range of bytes of the file."""
                file.seek(offset)
                return file.read(length)

            header = read_header(read, size, path)
    except (TensorFileError, OSError) as error:
        reason = seen_from(path, str(error))
        raise CheckpointError(f"{path}: cannot be read as safetensors: {reason}") from error
    tensors = {}
    for entry in header.entries.values():
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {entry.name!r} is {entry.dtype}, which torch lacks")
        offset = header.data_start + entry.start
        tensors[entry.name] = StoredTensor(path, offset, entry.shape, DTYPES[entry.dtype])
    aliases = {
        alias: name
        for alias, name in header.metadata.items()
        if name in tensors and alias not in tensors
    }
    return tensors, aliases
