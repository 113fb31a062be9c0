"""Small JSON documents that carry their own digest: manifests, part files and pins.

A document is ``{"format": 1, "digest": <of the body>, "body": {...}}``. It is padded with spaces to
a reserved size and ends in a newline. While a document is being rewritten, its file holds
``{"format": 1, "invalid": <why>}`` instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from offload.format.strict_json import parse_json, short

_VERSION: Final = 1
"""Version of the format of all documents, the only one that is read."""


class DocumentError(ValueError):
    """The data is damaged, has another version, or is no document at all.

    The message does not name the file.
    """


class InvalidDocumentError(DocumentError):
    """The described object is being rewritten; the message is the reason in the document."""


def digest_of(body: Mapping[str, Any]) -> str:
    """Return the BLAKE2b digest of a body, in 32 hexadecimal digits."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def signed(body: Mapping[str, Any], *, compact: bool = False) -> bytes:
    """Return a document without its padding.

    Args:
        body: Content of the document.
        compact: Whether to leave out the spaces after commas and colons. This suits a document that
            may be long.

    Raises:
        ValueError: A number in the body is not finite.
    """
    document = {"format": _VERSION, "digest": digest_of(body), "body": body}
    separators = (",", ":") if compact else None
    return json.dumps(document, separators=separators, allow_nan=False).encode()


def invalid(reason: str, size_bytes: int) -> bytes:
    """Return an invalid document that gives the reason, padded to its reserved size."""
    return padded(json.dumps({"format": _VERSION, "invalid": reason}).encode(), size_bytes)


def padded(text: bytes, size_bytes: int) -> bytes:
    """Return a document padded to its reserved size; the caller ensures that it fits."""
    return text.ljust(size_bytes - 1) + b"\n"


def read(data: bytes, kind: str) -> dict[str, Any]:
    """Return the body of a document. The data is not trusted.

    Args:
        data: Content of the file.
        kind: Kind of document that is expected, for messages: "a manifest".

    Raises:
        InvalidDocumentError: The document says that it is invalid.
        DocumentError: The data is no such document, is damaged, or has another version.
    """
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DocumentError(f"not {kind}: not a JSON document ({error})") from error
    if not isinstance(document, dict) or "format" not in document:
        raise DocumentError(f"not {kind}: it has no 'format'")
    version, body = document["format"], document.get("body")
    if type(version) is not int or version != _VERSION:
        raise DocumentError(
            f"format version {short(version)}, expected {_VERSION}; it was written by another "
            "version of this package"
        )
    if "invalid" in document:
        raise InvalidDocumentError(short(document["invalid"]))
    if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):
        raise DocumentError("damaged: its content does not match its digest")
    return body


def _digest_or_none(body: Mapping[str, Any]) -> str | None:
    try:
        return digest_of(body)
    except (ValueError, RecursionError):  # nested too deeply to be written
        return None
