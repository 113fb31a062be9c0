"""The small files of a library's folder, which its checkpoint carries in the train state.

A checkpoint that comes back from a tier, or whose folder is gone, has no scheduler, random states
or position in the data beside it: a library writes those into its folder, after the state has been
sealed. So they are added to the train state as soon as the folder is finished. The model's weights
are left out, since ``model.safetensors`` of the checkpoint has them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offload import (
    Checkpoint,
    CheckpointInfo,
    StoreError,
    open_checkpoint,
    verify_before_resume,
)
from offload.integrations.places import make_durable

_log = logging.getLogger("offload")

_WEIGHTS = re.compile(r".*\.safetensors|.*\.index\.json|pytorch_model.*")
"""Names of files with weights."""

_FURTHER_MODEL = re.compile(r"(model|pytorch_model)_[0-9]+\..*")
"""Names of the files of a second model."""

_DESCRIBING = re.compile(r".*\.(json|jinja|model|tiktoken|py|txt|md)")
"""Names of files that describe a model. Resuming does not need them, with one exception."""

_NEEDED = "trainer_state.json"

_MODEL = "model.safetensors"
_TRAIN_STATE = "train_state.safetensors"
_MARGIN_BYTES = 16 << 10
_MOST_BYTES = 64 << 20
"""Size of the largest file that is taken out of a train state, in bytes."""


def pack(checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    """Return the small files of a finished folder, compressed, for the train state.

    Files that a library needs for resuming come first. If these do not fit into the room that the
    train state has, a warning in the log says so, and the result is empty.
    """
    names = os.listdir(folder)
    if not _has_the_same_weights(checkpoint, folder, names):
        return {}
    stored = checkpoint.read_train_state()
    used = len(stored.json) * 5 // 4 + stored.tensor_bytes + _MARGIN_BYTES
    room = checkpoint.files[_TRAIN_STATE] - used
    names = [name for name in names if not _WEIGHTS.fullmatch(name)]
    files: dict[str, Any] = {}
    for is_describing in (False, True):
        for name in sorted(names):
            path = os.path.join(folder, name)
            if is_describing is not _is_describing(name) or not os.path.isfile(path):
                continue
            if is_describing and os.path.getsize(path) > room:
                continue
            with open(path, "rb") as file:
                data = np.frombuffer(zlib.compress(file.read()), np.uint8)
            if is_describing and data.nbytes > room:
                continue
            files[name] = data
            room -= data.nbytes + 256
        if room < 0:
            needed = -(-(checkpoint.files[_TRAIN_STATE] - room) // 4096) * 4096
            _log.warning(
                "%s: a tier gets %s without the files of this folder, which are too large: keep "
                "it, or raise Options(train_state_bytes=%d)",
                folder, os.path.basename(checkpoint.path), needed,
            )  # fmt: skip
            return {}
    return files


def _has_the_same_weights(checkpoint: Checkpoint, folder: str, names: Sequence[str]) -> bool:
    """Return whether ``model.safetensors`` of the checkpoint can stand for the folder's weights.

    It cannot if the library writes shards, several models, or names with a prefix.
    """
    if (
        not checkpoint.has_model_names
        or not os.path.isfile(os.path.join(checkpoint.path, _MODEL))
        or any(os.path.isdir(os.path.join(folder, name)) for name in names)
        or any(_FURTHER_MODEL.fullmatch(name) for name in names)
    ):
        return False
    if _MODEL not in names:
        return True
    with open(os.path.join(folder, _MODEL), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    model = checkpoint.manifest.layout.model
    held = {name for tensor in model for name in (tensor.name, *tensor.aliases)}
    return {*header} - {"__metadata__"} <= held


def _is_describing(name: str) -> bool:
    return name != _NEEDED and _DESCRIBING.fullmatch(name) is not None


def write_newest(
    library: str,
    parent: str | os.PathLike[str],
    infos: Sequence[CheckpointInfo],
    parts: Sequence[str],
    name: re.Pattern[str],
) -> tuple[str | None, str]:
    """Write the newest folder anew that a checkpoint carries the files of.

    The folder appears complete, and is durable. Returned are its path, or None; and why the newest
    checkpoint was skipped, or an empty text.

    Args:
        library: Key of the library in train states.
        parent: Directory of the folder.
        infos: Usable checkpoints of the store, the newest first.
        parts: Directories of the store on the other drives.
        name: Names that the folder may have.
    """
    why = ""
    for info in infos:
        with open_checkpoint(info.path, parts=parts or None) as opened:
            state = opened.train_state
            own = state.get(library) if isinstance(state, dict) else None
            if not isinstance(own, dict):
                continue  # the library has not made it
            base = str(own.get("folder", ""))
            folder = os.path.join(parent, base)
            if not name.fullmatch(base):
                listed = " or ".join(own.get("folders", ())) or "its folder"
                found = f"it has no files of {listed}: copy that folder to {os.fspath(parent)}"
            elif os.path.lexists(folder):
                found = f"{folder} is in the way, and cannot be resumed from: move it"
            else:
                found = damage_of(info.path, parts)
            if not found:
                _write_folder(opened, own["files"], folder)
                return folder, why
        why = why or f"skipping {info.path}: {found}"
    return None, why


def damage_of(path: str, parts: Sequence[str]) -> str:
    """Return the damage of a checkpoint, which is then quarantined; empty if it is whole.

    Raises:
        DamagedError: The checkpoint is damaged, and a newer one is quarantined already.
        StoreError: The checkpoint cannot be read.
    """
    with open_checkpoint(path, parts=parts or None) as opened:
        report = verify_before_resume(opened)
    if report.unreadable:
        raise StoreError(errno.EIO, "; ".join(report.unreadable), path)
    return report.problems[0] if report.problems else ""


def _write_folder(checkpoint: Checkpoint, files: Mapping[str, Any], folder: str) -> None:
    parent, base = os.path.split(os.path.abspath(folder))
    partial = os.path.join(parent, f".{base}.new")
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    for name, packed in files.items():
        if os.path.basename(name) != name or name in (_MODEL, ".", ".."):
            continue  # whoever made the store may have put it there
        content = zlib.decompressobj().decompress(packed.tobytes(), _MOST_BYTES)
        with open(os.path.join(partial, name), "wb") as file:
            file.write(content)
    shutil.copyfile(os.path.join(checkpoint.path, _MODEL), os.path.join(partial, _MODEL))
    make_durable(partial)
    os.rename(partial, folder)
    make_durable(folder)
    _log.info("%s: written anew from %s, since it was missing", folder, checkpoint.path)
