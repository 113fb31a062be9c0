"""``part.json``: the file that identifies a part, the share of a slot on another drive.

It is written when the part is sealed, and overwritten before the part is rewritten. Readers compare
it with the manifest's reference to the part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gds import ALIGNMENT
from offload.errors import CheckpointError
from offload.format import document
from offload.format.layout import Layout
from offload.format.names import PART_FILE_NAME
from offload.format.strict_json import short

PART_FILE_BYTES = ALIGNMENT
"""Size of ``part.json`` in bytes. Its content is short and never grows."""

_KINDS = {"store_id": "id", "generation": "count", "drive": "count", "content": "id"}
"""Kind of value that each field of a sealed part has."""

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PartReference:
    """A manifest's reference to the part of its checkpoint on one of the other drives."""

    directory: str
    """Absolute path of the drive's directory at the time when the part was sealed."""

    name: str
    """Name of the part within that directory: ``part-<k>``."""

    generation: int

    digest: str
    """`SealedPart.digest` of the content of ``part.json``."""


@dataclass(frozen=True, slots=True)
class SealedPart:
    """Content of the ``part.json`` of a sealed part."""

    store_id: str
    """Identifier of the store, 32 hexadecimal digits."""
    generation: int

    drive: int
    """Position of the part's directory in the store's list. The first directory, 0, has no part."""

    content: str
    """`content_digest` of the chunks in the part."""

    @property
    def digest(self) -> str:
        """BLAKE2b digest of all fields, in 32 hexadecimal digits."""
        return document.digest_of(asdict(self))

    def encode(self) -> bytes:
        """Return the content of ``part.json``, padded to `PART_FILE_BYTES`."""
        return document.padded(document.signed(asdict(self)), PART_FILE_BYTES)


def content_digest(layout: Layout, digests: Mapping[str, Sequence[str | None]], drive: int) -> str:
    """Return the digest of the content of a drive, computed from the digests of its chunks."""
    chunks = [chunk for chunk, owner in enumerate(layout.drives) if owner == drive]
    return document.digest_of(
        {name: [values[chunk] for chunk in chunks] for name, values in digests.items()}
    )


def invalid_part() -> bytes:
    """Return the content of ``part.json`` while the part is being rewritten; readers refuse it."""
    return document.invalid("this part is being rewritten", PART_FILE_BYTES)


def decode_part(data: bytes, path: str) -> SealedPart:
    """Decode the content of ``part.json``. The data is not trusted.

    Args:
        data: Content of the file.
        path: Path of the file, for messages.

    Raises:
        CheckpointError: The part is not sealed, or the file is damaged or of another version.
    """
    with document.decoding(path, CheckpointError):
        body = document.read(data, "a part's file")
    if {key: _kind(value) for key, value in body.items()} != _KINDS:
        raise CheckpointError(f"{path}: not a part's file: its body is {short(body)}")
    return SealedPart(**body)


def _kind(value: object) -> str:
    if isinstance(value, str) and _ID.fullmatch(value):
        return "id"
    return "count" if type(value) is int and 0 <= value < 1 << 63 else "other"


def part_sizes(layout: Layout, drive: int) -> dict[str, int]:
    """Return the size in bytes of every file of a part, by name."""
    return {**layout.file_sizes(drive), PART_FILE_NAME: PART_FILE_BYTES}
