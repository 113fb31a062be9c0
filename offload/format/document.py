"""A small JSON document that carries its own digest: manifest, part file and pin.

It is ``{"format": <version>, "digest": <of the body>, "body": {...}}``, padded with spaces to a
size that was reserved, and ends in a newline. In the place of one that is being rewritten stands
``{"format": <version>, "invalid": <why>}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from offload.format.strict_json import parse_json, short


class DocumentError(ValueError):
    """A document is damaged, of another version, or none. The message does not name the file."""


class InvalidDocumentError(DocumentError):
    """What the document described is being rewritten; the message is the reason it gives."""


def digest_of(body: Mapping[str, Any]) -> str:
    """Return the BLAKE2b digest of a body, in 32 hexadecimal digits."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def signed(version: int, body: Mapping[str, Any], *, compact: bool = False) -> bytes:
    """Return a document without its padding.

    Args:
        version: Of its format.
        body: What it says.
        compact: Leave out the spaces after commas and colons: for a document that may be long.

    Raises:
        ValueError: A number in it is not finite.
    """
    document = {"format": version, "digest": digest_of(body), "body": body}
    separators = (",", ":") if compact else None
    return json.dumps(document, separators=separators, allow_nan=False).encode()


def invalid(version: int, reason: str) -> bytes:
    """Return a document, without its padding, that says why there is none."""
    return json.dumps({"format": version, "invalid": reason}).encode()


def padded(text: bytes, size_bytes: int) -> bytes:
    """Return a document in its reserved size, which the caller knows to suffice."""
    return text.ljust(size_bytes - 1) + b"\n"


def read(data: bytes, kind: str, versions: Collection[int]) -> tuple[int, dict[str, Any]]:
    """Return the version and the body of a document, of which nothing is trusted.

    Args:
        data: The content of the file.
        kind: What it should be, for messages: "a manifest".
        versions: Those that are read.

    Raises:
        InvalidDocumentError: It says that it is none.
        DocumentError: It is no such document, is damaged, or is of another version.
    """
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DocumentError(f"not {kind}: not a JSON document ({error})") from error
    if not isinstance(document, dict) or "format" not in document:
        raise DocumentError(f"not {kind}: it has no 'format'")
    version, body = document["format"], document.get("body")
    if type(version) is not int or version not in versions:
        expected = " or ".join(map(str, versions))
        raise DocumentError(
            f"format version {short(version)}, expected {expected}; it was written by another "
            "version of this package"
        )
    if "invalid" in document:
        raise InvalidDocumentError(short(document["invalid"]))
    if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):
        raise DocumentError("damaged: its content does not match its digest")
    return version, body


def _digest_or_none(body: Mapping[str, Any]) -> str | None:
    try:
        return digest_of(body)
    except (ValueError, RecursionError):  # lone surrogates, or nested too deeply to be written
        return None
