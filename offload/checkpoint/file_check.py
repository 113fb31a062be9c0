"""Checks of single files of a checkpoint: kind, size and header."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

from gds import Backend
from gds.contract import Stat
from offload.checkpoint.second_read import read_document
from offload.errors import CheckpointError
from offload.format.header import Header, TensorFileError, header_length, parse_header
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
