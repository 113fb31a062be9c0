"""The two documents of a copy: who writes it, and that it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from offload.errors import DamagedError
from offload.format import document
from offload.format.manifest import Manifest
from offload.format.names import part_name

MOST_BYTES = 64 << 20
"""Largest size in bytes of a document. One of 16 KiB lists some hundred objects."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a copy: what it is a copy of, and who writes it."""

    store_id: str
    generation: int
    writer: str
    """32 hexadecimal digits that no other upload has."""

    @property
    def folder(self) -> str:
        """Folder of the copy in the tier. Only its writer makes objects there."""
        return f"{self.store_id}/gen-{self.generation:08d}/{self.writer}"


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of ``COMPLETE.json``: every object of a copy, and what the checkpoint is.

    The names and the order of the fields are those of the document.
    """

    identity: Identity
    step: int
    created: str
    manifest_digest: str
    object_bytes: int
    sizes: Mapping[str, int]
    """Size in bytes of each object, by name; without this one and without ``WRITER.json``."""

    digests: Mapping[str, str]
    """BLAKE2b digest of each object that the manifest has no digests for, by name."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    content_digest: str = ""
    """Digest of the manifest's fields without those that say where the checkpoint lay; empty in
    markers of earlier versions. See `content_digest`."""

    parameters_only: bool = False
    """Whether the marker is that of the parameters: the objects of state may be missing."""

    @property
    def content(self) -> str:
        """Digest that is the same for copies of one checkpoint, wherever it lay."""
        return self.content_digest or self.manifest_digest

    @property
    def nbytes(self) -> int:
        """Size of all objects in bytes."""
        return sum(self.sizes.values())

    def encode(self) -> bytes:
        """Return the content of the object."""
        body = asdict(self)
        return document.signed({**body.pop("identity"), **body}) + b"\n"


def decode_marker(data: bytes, place: str) -> Marker:
    """Decode the content of ``COMPLETE.json``. The data is not trusted."""
    try:
        body = document.read(data, "the marker of a copy")
        identity = Identity(
            _hex(body["store_id"]), _count(body["generation"]), _hex(body["writer"])
        )
        return Marker(
            identity,
            _count(body["step"]),
            _text(body["created"]),
            _hex(body["manifest_digest"]),
            _count(body["object_bytes"]),
            {_text(name): _count(size) for name, size in body["sizes"].items()},
            {_text(name): _text(digest) for name, digest in body["digests"].items()},
            {_text(name): float(value) for name, value in body["metrics"].items()},
            _text(body.get("content_digest", "")),
            body.get("parameters_only", False) is not False,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{place}: damaged: {error}") from error


def marker_of(
    identity: Identity,
    manifest: Manifest,
    object_bytes: int,
    sizes: Mapping[str, int],
    digests: Mapping[str, str],
    *,
    parameters_only: bool = False,
) -> Marker:
    """Return the marker of a copy of a checkpoint; the arguments are fields of `Marker`."""
    return Marker(
        identity,
        manifest.step,
        manifest.created,
        manifest.digest,
        object_bytes,
        dict(sizes),
        dict(digests),
        dict(manifest.metrics),
        content_digest(manifest),
        parameters_only,
    )


def content_digest(manifest: Manifest) -> str:
    """Return a digest of a manifest without its directories, drives and names of parts.

    A checkpoint that has come back from a tier may lie elsewhere, and is the same all the same.
    """
    owners = tuple(
        replace(reference, directory="", name=part_name(1)) for reference in manifest.owners
    )
    layout = replace(manifest.layout, shares=(1,))
    return replace(manifest, layout=layout, parts=(), owners=owners).digest


def encode_writer(identity: Identity, manifest: Manifest) -> bytes:
    """Return the content of ``WRITER.json``, which is for people and for the probe of the tier."""
    body = {
        **asdict(identity),
        "step": manifest.step,
        "created": manifest.created,
        "manifest_digest": manifest.digest,
    }
    return document.signed(body) + b"\n"


def _hex(value: object) -> str:
    text = _text(value)
    if len(text) != 32 or not {*text} <= {*"0123456789abcdef"}:
        raise ValueError(f"{text[:40]!r} is no identity")
    return text


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value
