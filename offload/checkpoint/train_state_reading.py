"""Reading of a checkpoint's train state, with a check that it is whole and of this checkpoint."""

from __future__ import annotations

from gds import ALIGNMENT, Backend, File
from offload.checkpoint.second_read import read_document
from offload.errors import (
    DamagedError,
    TrainStateDigestError,
    TrainStateFormatError,
)
from offload.format.header import TensorFileError, header_length
from offload.format.manifest import Manifest
from offload.format.train_state import (
    MAX_CAPACITY_BYTES,
    EncodedState,
    unpack_encoded,
)
from offload.units import seen_from


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
