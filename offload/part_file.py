"""``part.json``: what the part of a slot on another drive says of itself.

A store on several drives keeps most of a slot in its first directory and a *part* of the state
arrays in each of the others. The manifest names every part; ``part.json``, written when the part is
sealed and overwritten before it is rewritten, is what the manifest's word is compared with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gds import ALIGNMENT
from offload._strict_json import parse_json, short
from offload.errors import CheckpointError
from offload.layout import Layout

PART_FILE_NAME = "part.json"
PART_FILE_BYTES = ALIGNMENT
"""Its size: what it says is short, and never grows."""

_PART_FORMAT = 1
_KINDS = {"store_id": "id", "generation": "count", "drive": "count", "content": "id"}
"""What the fields of a sealed part are."""

_ID = re.compile(r"[0-9a-f]{32}")
_PART_NAME = re.compile(r"part-([1-9][0-9]{0,17})")


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
        return _digest(asdict(self))

    def encode(self) -> bytes:
        """Return the content of ``part.json``, padded to its size."""
        return _padded({"format": _PART_FORMAT, "digest": self.digest, "body": asdict(self)})


def content_digest(layout: Layout, digests: Mapping[str, Sequence[str | None]], drive: int) -> str:
    """Return a digest of what a drive holds, computed from the digests of its chunks."""
    chunks = [chunk for chunk, owner in enumerate(layout.drives) if owner == drive]
    return _digest({name: [values[chunk] for chunk in chunks] for name, values in digests.items()})


def invalid_part() -> bytes:
    """Return content that nobody takes for that of a sealed part."""
    return _padded({"format": _PART_FORMAT, "invalid": "this part is being rewritten"})


def decode_part(data: bytes, path: str) -> SealedPart:
    """Read ``part.json``, trusting nothing in it.

    Raises:
        CheckpointError: The part is not sealed, or is damaged or of another version.
    """
    try:
        document = parse_json(data)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not a part's file: not a JSON document ({error})"
        ) from error
    if not isinstance(document, dict) or "format" not in document:
        raise CheckpointError(f"{path}: not a part's file: it has no 'format'")
    version, body = document["format"], document.get("body")
    if type(version) is not int or version != _PART_FORMAT:
        raise CheckpointError(
            f"{path}: format version {short(version)}, expected {_PART_FORMAT}; it "
            "was written by another version of this package"
        )
    if "invalid" in document:
        raise CheckpointError(f"{path}: not sealed: {short(document['invalid'])}")
    if not isinstance(body, dict) or {key: _kind(value) for key, value in body.items()} != _KINDS:
        raise CheckpointError(f"{path}: not a part's file: its body is {short(body)}")
    part = SealedPart(**body)
    if part.digest != document.get("digest"):
        raise CheckpointError(f"{path}: damaged: its content does not match its digest")
    return part


def part_name(number: int) -> str:
    """Return the name of a part within its directory."""
    return f"part-{number}"


def part_number(name: str) -> int | None:
    """Invert `part_name`; None for a name of anything else."""
    match = _PART_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _padded(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode().ljust(PART_FILE_BYTES - 1) + b"\n"


def _digest(value: Mapping[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _kind(value: object) -> str:
    if isinstance(value, str) and _ID.fullmatch(value):
        return "id"
    return "count" if type(value) is int and 0 <= value < 1 << 63 else "other"
