"""Single files of a checkpoint, read and checked: headers, the train state, and the mark of damage.

The mark is a file. Only its presence counts; its text is for people. `offload.store.quarantine`
writes and removes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

from gds import ALIGNMENT, Backend, File
from gds.contract import Stat
from offload.checkpoint.second_read import read_document
from offload.errors import (
    CheckpointError,
    DamagedError,
    TrainStateDigestError,
    TrainStateFormatError,
)
from offload.format.header import Header, TensorFileError, header_length, parse_header
from offload.format.manifest import Manifest
from offload.format.names import QUARANTINE_NAME
from offload.format.train_state import (
    MAX_CAPACITY_BYTES,
    EncodedState,
    unpack_encoded,
)
from offload.units import seen_from

PartDirectories: TypeAlias = Sequence[str | os.PathLike[str]] | None
"""Directories of a store on all drives but the first, in the store's order; None for the
directories that the manifest names."""


def kind_of(stat: Stat) -> str:
    """Return the kind of file that a name refers to, in words for a message."""
    other = "something else (a symbolic link, a pipe or a device)"
    return other if stat.kind == "other" else f"a {stat.kind}"


def check_header(backend: Backend, path: str, expected: Header) -> None:
    """Check that a tensor file has the size and the header that a layout asks for."""
    stat = backend.stat(path)
    if stat is None:
        raise CheckpointError(f"{path}: missing")
    if stat.kind != "file" or stat.size_bytes != expected.file_bytes:
        raise CheckpointError(
            f"{path}: {kind_of(stat)} of {stat.size_bytes} bytes, expected a file of "
            f"{expected.file_bytes}"
        )
    with backend.open(path) as file:
        read_document(
            file,
            expected.data_start,
            lambda found: _compare_header(found, file.size_bytes, expected, path),
            CheckpointError,
        )


def _compare_header(found: bytes, file_bytes: int, expected: Header, path: str) -> None:
    """Raise a `CheckpointError` that says what differs, unless a header is the expected one."""
    if found == expected.encoded:
        return
    try:
        length = header_length(found, file_bytes, path)
        if length > expected.data_start:  # a small manifest must not cause a long parse
            raise CheckpointError(
                f"{path}: its header takes {length} bytes, the manifest says {expected.data_start}"
            )
        header = parse_header(found, file_bytes, path)
    except TensorFileError as error:
        reason = seen_from(path, str(error))
        raise CheckpointError(f"{path}: damaged header: {reason}") from error
    if (dict(header.entries), dict(header.metadata)) != (
        dict(expected.entries),
        dict(expected.metadata),
    ):
        raise CheckpointError(f"{path}: its header lists other tensors than the manifest")
    raise CheckpointError(f"{path}: its header is not laid out as the manifest says")


MAX_REASON_BYTES = 4000
"""Largest size of the reason in bytes."""


def is_quarantined(backend: Backend, path: str) -> bool:
    """Return whether a checkpoint is marked as damaged."""
    return backend.stat(f"{path}/{QUARANTINE_NAME}") is not None


def read_quarantine(backend: Backend, path: str) -> str | None:
    """Return the reason why a checkpoint is marked as damaged; None if it is not marked."""
    mark = f"{path}/{QUARANTINE_NAME}"
    stat = backend.stat(mark)
    if stat is None:
        return None
    if stat.kind != "file":
        return f"{mark} is a {stat.kind}"
    with backend.open(mark) as file:
        data = file.read_bytes(0, min(file.size_bytes, MAX_REASON_BYTES))
    text = data.decode(errors="replace").strip("\0 \n")
    # The text is not trusted, and is shown on terminals.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def read_train_state_file(backend: Backend, path: str, manifest: Manifest) -> EncodedState:
    """Read a train state without building its values. Wrong content is read a second time."""
    with backend.open(path) as file:
        size_bytes = file.size_bytes
        if size_bytes > MAX_CAPACITY_BYTES:
            raise DamagedError(f"{path}: {size_bytes} bytes, expected at most {MAX_CAPACITY_BYTES}")
        first_bytes = min(ALIGNMENT, size_bytes)
        read_document(file, first_bytes, lambda first: _refuse_hole(first, file), DamagedError)
        return read_document(
            file, size_bytes, lambda data: _unpack(data, path, manifest), DamagedError
        )


def train_state_header(manifest: Manifest) -> dict[str, str]:
    """Return the metadata that ties a train state to its checkpoint."""
    return {
        "store_id": manifest.store_id,
        "generation": str(manifest.generation),
        "step": str(manifest.step),
    }


def _refuse_hole(first: bytes, file: File) -> None:
    """Refuse zero bytes in the header, before memory is allocated for the whole file."""
    try:
        header_bytes = header_length(first, file.size_bytes, file.path)
    except TensorFileError as error:
        raise DamagedError(_damaged(file.path, error)) from error
    if b"\0" in first[8 : max(header_bytes, 9)]:
        raise DamagedError(f"{file.path}: damaged: zero bytes in its header")


def _damaged(path: str, error: Exception) -> str:
    return f"{path}: damaged: {seen_from(path, str(error))}"


def _unpack(data: bytes, path: str, manifest: Manifest) -> EncodedState:
    try:
        state, header = unpack_encoded(data, path)
    except (TensorFileError, TrainStateFormatError, TrainStateDigestError) as error:
        raise DamagedError(_damaged(path, error)) from error
    if dict(header) != train_state_header(manifest):
        raise DamagedError(f"{path}: belongs to another checkpoint")
    return state
