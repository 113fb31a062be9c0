"""Files of Hugging Face that describe a model: config, generation config and tokenizer.

``from_pretrained`` needs them beside ``model.safetensors``. They are no part of a checkpoint:
manifests do not list them, readers of checkpoints ignore them, and recycling may remove them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from gds import Backend, StorageError
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import CheckpointError, CheckpointNotFoundError
from offload.format.names import MANIFEST_NAME

CONFIG_NAME = "config.json"
"""Name of the file without which a directory does not describe a model."""

ADAPTER_CONFIG_NAME = "adapter_config.json"
"""Name of the file that describes an adapter of peft. The Trainer writes it alone for such."""

_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken")
"""Ends of the names of files that ``save_pretrained`` of configs and tokenizers writes."""

_NAMES = ("vocab.txt", "merges.txt")
"""Names of further files that tokenizers write."""

_OF_OTHERS = (MANIFEST_NAME, "trainer_state.json", "optimizer.json")
"""Names that end like those of such files, and mean something else."""

_MAX_FILE_BYTES = 64 << 20
"""Size of the largest file that is taken, in bytes; tokenizers have up to some 30 MiB."""


def add_hf_files(checkpoint: Checkpoint, source: str | os.PathLike[str]) -> list[str]:
    """Put the files that describe a model beside a sealed checkpoint, for ``from_pretrained``.

    Files of this kind that an earlier checkpoint has left in the directory are replaced or removed.
    Each file appears complete and durable, or not at all. The checkpoint itself does not change.
    Call this in the process that trains, for a checkpoint that is kept or pinned.

    Args:
        checkpoint: Sealed checkpoint, such as the result of ``checkpoint().result()``.
        source: Directory with the files, such as one that ``save_pretrained`` has written. Symbolic
            links in it are followed, since Hugging Face's cache consists of them.

    Returns:
        The names of the files. If the directory has neither ``config.json`` nor the config of an
        adapter of peft, nothing is done and the list is empty.

    Raises:
        CheckpointError: The checkpoint does not have the model's names.
        gds.StorageError: A file could not be read or written.
    """
    require_model_names(checkpoint)
    backend, directory = checkpoint.backend, checkpoint.path
    files = _read_local(os.path.abspath(os.fsdecode(source)))
    if not files:
        return []
    present = read_hf_files(backend, directory)
    changed = {name: data for name, data in files.items() if present.get(name) != data}
    for name in _names_in(backend, directory):
        if name not in files:
            backend.remove(f"{directory}/{name}")
    for name, data in changed.items():
        partial = f"{directory}/{name}.new"
        if backend.stat(partial) is not None:
            backend.remove(partial)
        try:
            _write(backend, partial, data)
            backend.rename(partial, f"{directory}/{name}")
        except BaseException:
            with suppress(StorageError):  # the next call removes it
                backend.remove(partial)
            raise
    if changed:
        backend.sync_dir(directory)
    return list(files)


def require_model_names(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint without the model's names.

    ``from_pretrained`` would find none of its parameters, and would return random ones with no more
    than a warning.
    """
    if not checkpoint.has_model_names:
        raise CheckpointError(
            f"{checkpoint.path}: its parameters have no names of a model (the first one is called "
            f"{checkpoint.manifest.layout.parameters[0].name}), so from_pretrained would find none "
            "of them: pass model= to the optimizer, and seal another checkpoint"
        )


def read_hf_files(backend: Backend, directory: str) -> dict[str, bytes]:
    """Return the content of the files that describe a model, by name; empty without a config.

    The config of an adapter of peft counts as one.

    Symbolic links are not followed: whoever made the store may have put them there.
    """
    names = _names_in(backend, directory)
    if not {CONFIG_NAME, ADAPTER_CONFIG_NAME} & {*names}:
        return {}
    found = {}
    for name in names:
        with backend.open(f"{directory}/{name}") as file:
            found[name] = file.read_bytes(0, file.size_bytes)
    return found


def required_hf_files(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the content of the files that describe a model, in a directory of the user's."""
    path = os.path.abspath(os.fsdecode(directory))
    if not os.path.isdir(path):
        raise CheckpointNotFoundError(
            errno.ENOENT, "there is no such directory; name one that has a config.json", path
        )
    files = _read_local(path)
    if CONFIG_NAME not in files:
        raise CheckpointError(
            f"{path}: it has no {CONFIG_NAME}, which the Trainer does not write for an adapter of "
            "peft; model.config.save_pretrained(DIR) writes it"
        )
    return files


def write_hf_files(backend: Backend, directory: str, files: Mapping[str, bytes]) -> None:
    """Write files into a new directory. Their content is durable on return, their names are not."""
    for name, data in files.items():
        _write(backend, f"{directory}/{name}", data)


def _read_local(directory: str) -> dict[str, bytes]:
    """Return the same as `read_hf_files` for a directory of the user."""
    found = {}
    for name in sorted(filter(_describes_a_model, os.listdir(directory))):
        path = os.path.join(directory, name)
        if os.path.isfile(path) and os.path.getsize(path) <= _MAX_FILE_BYTES:
            with open(path, "rb") as file:
                found[name] = file.read()
    return found if {CONFIG_NAME, ADAPTER_CONFIG_NAME} & {*found} else {}


def _names_in(backend: Backend, directory: str) -> list[str]:
    found = []
    for name in backend.list_dir(directory):
        if not _describes_a_model(name):
            continue
        stat = backend.stat(f"{directory}/{name}")
        if stat is not None and stat.kind == "file" and stat.size_bytes <= _MAX_FILE_BYTES:
            found.append(name)
    return found


def _describes_a_model(name: str) -> bool:
    if name in _OF_OTHERS or name.endswith(".index.json"):
        return False
    return name in _NAMES or name.endswith(_SUFFIXES)


def _write(backend: Backend, path: str, data: bytes) -> None:
    with backend.create(path, len(data)) as file:
        file.write_bytes(data, 0)
        file.sync()


ADAPTER_FOLDER = "adapter"
ADAPTER_MODEL_NAME = "adapter_model.safetensors"

_MODEL = "base_model.model."
_TOP = re.compile(r"base_model\.(?!model\.)(\w+)\.([^.]+)")
"""Name of a tensor that layers share and that a file of peft has once, beside the model."""

_BASE = ".base_layer."
_TOKENS = ".token_adapter.base_layer."
_SHARED_TOKENS = ".token_adapter.trainable_tokens_delta."
"""Part of the name of a tensor that tied embeddings share and that a file of peft has once."""
_ORIGINAL = ".original_module."
_SAVED = re.compile(r"(.+)\.modules_to_save\.([^.]+)(\..+)")
_ADAPTER = re.compile(r"(.+)\.(?!(?:weight|bias)$)([^.]+)(\.weight|\.bias|)")
_MAGNITUDE = ".lora_magnitude_vector"
"""A vector of DoRA, whose name loses ``.weight`` in a file of peft."""


class PeftNames(NamedTuple):
    """Names in the files of peft, by the name in the model."""

    base: dict[str, str]
    """Tensors of the model without the adapter, as ``from_pretrained`` of the model names them."""

    adapter: dict[str, str]
    """Tensors of the adapter, as ``PeftModel.from_pretrained`` names them."""


def peft_names(tensors: Iterable[tuple[str, Sequence[str]]]) -> PeftNames | None:
    """Return the names that the tensors of a peft model have in files.

    None means that the model has no adapter, or several, or one whose names are not known.
    """
    others = dict(tensors)
    names = list(others)
    if not all(name.startswith(_MODEL) for name in names):
        return None
    adapted = {name.rpartition(_BASE)[0] for name in names if _BASE in name}
    base: dict[str, str] = {}
    adapter: dict[str, str] = {}
    adapters = set()
    for name in names:
        saved = _SAVED.fullmatch(name)
        top = next(filter(None, map(_TOP.fullmatch, others[name])), None)
        if saved:
            adapters.add(saved[2])
            adapter[name] = saved[1] + saved[3]
        elif top:
            adapters.add(top[2])
            adapter[name] = f"base_model.{top[1]}"
        elif _BASE not in name and any(name.startswith(f"{module}.") for module in adapted):
            parts = _ADAPTER.fullmatch(name)
            if parts is None or (others[name] and _SHARED_TOKENS not in name):
                return None  # peft may write a tensor that layers share once for each of them
            adapters.add(parts[2])
            end = "" if parts[1].endswith(_MAGNITUDE) else parts[3]
            adapter[name] = parts[1] + end
        else:
            bare = name.removeprefix(_MODEL)
            for wrapped in (_TOKENS, _BASE, _ORIGINAL):
                bare = bare.replace(wrapped, ".")
            base[name] = bare
    is_one = len(adapters) == 1 and len({*base.values()}) == len(base)
    return PeftNames(base, adapter) if is_one and len({*adapter.values()}) == len(adapter) else None
