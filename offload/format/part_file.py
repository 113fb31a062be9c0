"""``part.json``: what the part of a slot on another drive says of itself.

A store on several drives keeps most of a slot in its first directory and a *part* of the state
arrays in each of the others. The manifest names every part; ``part.json``, written when the part is
sealed and overwritten before it is rewritten, is what the manifest's word is compared with.
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
"""Its size: what it says is short, and never grows."""

_PART_FORMAT = 1
_KINDS = {"store_id": "id", "generation": "count", "drive": "count", "content": "id"}
"""What the fields of a sealed part are."""

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PartReference:
    """What a manifest says of the part of its checkpoint on one of the other drives."""

    directory: str
    """Where it was when it was sealed: the absolute path of the drive's directory."""

    name: str
    """Of the part within that directory: ``part-<k>``."""

    generation: int
    digest: str
    """`SealedPart.digest` of what its ``part.json`` says."""


@dataclass(frozen=True, slots=True)
class SealedPart:
    """What a sealed part says of itself."""

    store_id: str
    generation: int
    drive: int
    """Position of its directory in the store's list; the first directory, 0, has no part."""

    content: str
    """`content_digest` of what it holds."""

    @property
    def digest(self) -> str:
        """BLAKE2b of everything above, 32 hexadecimal digits."""
        return document.digest_of(asdict(self))

    def encode(self) -> bytes:
        """Return the content of ``part.json``, padded to its size."""
        return document.padded(document.signed(_PART_FORMAT, asdict(self)), PART_FILE_BYTES)


def content_digest(layout: Layout, digests: Mapping[str, Sequence[str | None]], drive: int) -> str:
    """Return a digest of what a drive holds, computed from the digests of its chunks."""
    chunks = [chunk for chunk, owner in enumerate(layout.drives) if owner == drive]
    return document.digest_of(
        {name: [values[chunk] for chunk in chunks] for name, values in digests.items()}
    )


def invalid_part() -> bytes:
    """Return content that nobody takes for that of a sealed part."""
    text = document.invalid(_PART_FORMAT, "this part is being rewritten")
    return document.padded(text, PART_FILE_BYTES)


def decode_part(data: bytes, path: str) -> SealedPart:
    """Read ``part.json``, trusting nothing in it.

    Raises:
        CheckpointError: The part is not sealed, or is damaged or of another version.
    """
    try:
        _, body = document.read(data, "a part's file", (_PART_FORMAT,))
    except document.InvalidDocumentError as error:
        raise CheckpointError(f"{path}: not sealed: {error}") from error
    except document.DocumentError as error:
        raise CheckpointError(f"{path}: {error}") from error
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
