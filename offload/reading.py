"""Finding and checking checkpoints without writing anything, and without torch."""

from __future__ import annotations

import errno
import os
import re

from gds import Backend, StorageError
from offload.errors import CheckpointError, CheckpointNotFoundError, ManifestError
from offload.layout import Layout, array_file_name
from offload.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode
from offload.slot import MODEL_NAME, TRAIN_STATE_NAME
from offload.tensorfile import Header, TensorFileError, read_header

_CHECKPOINT = re.compile(r"step-([0-9]{1,19})")


def read_manifest(backend: Backend, path: str) -> Manifest:
    """Read and check the manifest of a checkpoint directory, and the files that it describes.

    Checked: the manifest itself, and that every tensor file is there, is a regular file of the
    right size, and has exactly the header that the layout asks for. Of the train state: that it is
    a regular file. Not checked: tensor data and what the train state holds.

    Args:
        backend: Where the directory is.
        path: The checkpoint directory.

    Raises:
        CheckpointError: Something is missing, damaged or contradictory; says what.
        gds.StorageError: It cannot be read.
    """
    manifest_path = f"{path}/{MANIFEST_NAME}"
    stat = backend.stat(manifest_path)
    if stat is None:
        raise ManifestError(f"{path}: no {MANIFEST_NAME}: not a complete checkpoint")
    if stat.kind != "file" or stat.size_bytes > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"{manifest_path}: a {stat.kind} of {stat.size_bytes} bytes, expected a file of at "
            f"most {MAX_MANIFEST_BYTES}"
        )
    file = backend.open(manifest_path)
    try:
        manifest = decode(file.read_bytes(0, stat.size_bytes), manifest_path)
    finally:
        file.close()
    layout = manifest.layout
    check_header(backend, f"{path}/{MODEL_NAME}", layout.model_header)
    for name, header in layout.array_headers[0].items():
        check_header(backend, f"{path}/{array_file_name(name)}", header)
    train_state = backend.stat(f"{path}/{TRAIN_STATE_NAME}")
    if train_state is None or train_state.kind != "file":
        found = "missing" if train_state is None else f"a {train_state.kind}, expected a file"
        raise CheckpointError(f"{path}/{TRAIN_STATE_NAME}: {found}")
    return manifest


def check_header(backend: Backend, path: str, expected: Header) -> None:
    """Check that a tensor file has the size and the header that a layout asks for.

    Raises:
        CheckpointError: It is missing, is not a regular file, or differs; says how.
    """
    stat = backend.stat(path)
    if stat is None:
        raise CheckpointError(f"{path}: missing")
    if stat.kind != "file" or stat.size_bytes != expected.file_bytes:
        raise CheckpointError(
            f"{path}: a {stat.kind} of {stat.size_bytes} bytes, expected a file of "
            f"{expected.file_bytes}"
        )
    file = backend.open(path)
    try:
        found = file.read_bytes(0, expected.data_start)
        if found == expected.encoded:
            return
        header = read_header(file.read_bytes, file.size_bytes, path)
    except TensorFileError as error:
        raise CheckpointError(f"{path}: damaged header: {error}") from error
    finally:
        file.close()
    if (dict(header.entries), dict(header.metadata)) != (
        dict(expected.entries),
        dict(expected.metadata),
    ):
        raise CheckpointError(f"{path}: its header lists other tensors than the manifest")
    raise CheckpointError(f"{path}: its header is not laid out as the manifest says")


def find_checkpoint(backend: Backend, path: str) -> str:
    """Return the checkpoint directory that a path means: itself, or the newest in a store.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        CheckpointError: It is neither a checkpoint nor a store that has a usable one.
    """
    path = os.path.abspath(path)
    stat = backend.stat(path)
    if stat is None:
        raise CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint or store here", path)
    if stat.kind != "directory":
        raise CheckpointError(f"{path}: a {stat.kind}, expected a checkpoint or store directory")
    if backend.stat(f"{path}/{MANIFEST_NAME}") is not None:
        return path
    newest: tuple[int, str] | None = None
    reasons = []
    for checkpoint in checkpoint_paths(backend, path):
        try:
            manifest = read_manifest(backend, checkpoint)
        except (CheckpointError, StorageError) as error:
            reasons.append(str(error))
        else:
            newest = max(newest or (-1, ""), (manifest.generation, checkpoint))
    if newest is None:
        why = "; ".join(reasons) or "it has no step-<N> directory"
        raise CheckpointError(f"{path}: no usable checkpoint here: {why}")
    return newest[1]


def checkpoint_paths(backend: Backend, store: str) -> list[str]:
    """Return the directories in a store that are named like checkpoints, oldest step first."""
    names = [n for n in backend.list_dir(store) if _CHECKPOINT.fullmatch(n)]
    return [f"{store}/{name}" for name in sorted(names, key=lambda n: int(n[5:]))]


def layout_bytes(layout: Layout) -> int:
    """Return the bytes of all tensor files of a checkpoint."""
    return sum(layout.file_sizes().values())
