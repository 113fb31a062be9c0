"""``table.json``: the description of an owner's part of a checkpoint that several ranks have made.

It says which boxes are in the part, and has the digest of each chunk. It is written when the part
is sealed, overwritten before the part is rewritten, and no more trusted than a manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gds import ALIGNMENT
from offload.errors import CheckpointError, OffloadError
from offload.format import _manifest_fields as fields
from offload.format import document
from offload.format._layout_fields import Digests, Scalars, decode_state, encode_state
from offload.format.boxes import Box
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout, ModelTensor, array_file_name
from offload.format.names import TABLE_NAME
from offload.format.shares.owners import (
    MAX_OWNERS,
    ModelBox,
    decode_model_boxes,
    encode_model_boxes,
    model_box_bytes,
    parameter_boxes,
)
from offload.format.strict_json import short

MAX_TABLE_BYTES = 128 << 20
"""Largest size of a table in bytes, padding included. A larger file is refused unread, and none is
written."""

_KIND = f"an owner's {TABLE_NAME}"

_RESERVE_BYTES = 2048
"""Bytes reserved for the fields that occur only once."""


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What a table says of its part without the manifest of the checkpoint."""

    store_id: str

    generation: int

    owner: int

    digest: str
    """Digest of the table, as 32 hexadecimal digits; `OwnerReference.digest` is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTable:
    """Description of one owner's part of a checkpoint."""

    store_id: str

    generation: int

    owner: int

    layout: Layout
    """Position of every element in the part. Its `Layout.model` is the whole model."""

    scalars: Scalars
    digests: Digests

    model_boxes: tuple[ModelBox, ...] = ()
    """Boxes of the model's tensors that the owner has written."""

    @property
    def header(self) -> TableHeader:
        """Identity of the table."""
        digest = document.digest_of(self._body())
        return TableHeader(self.store_id, self.generation, self.owner, digest)

    def encode(self, size_bytes: int) -> bytes:
        """Return the content of ``table.json``, padded to `size_bytes`.

        Raises:
            OffloadError: The content is larger than `size_bytes`, or than readers accept.
        """
        return document.encode(
            self._body(),
            size_bytes,
            f"the table of owner {self.owner}",
            or_do="use more ranks",
            why=": the scalar state of its parameters has grown",
        )

    def _body(self) -> dict[str, Any]:
        named = {} if self.layout.shard is None else {"model_file": self.layout.model_name}
        return {
            "store_id": self.store_id,
            "generation": self.generation,
            "owner": self.owner,
            **encode_state(self.layout, self.scalars, self.digests),
            "model_boxes": encode_model_boxes(self.model_boxes),
            **named,
        }


def table_bytes(layout: Layout, written: Iterable[tuple[str, Box]] | None = None) -> int:
    """Return the size to reserve for the table of a layout, in bytes; a multiple of 4096."""
    total = _RESERVE_BYTES
    for p in layout.parameters:
        arrays = sum(len(name) + 3 for name in p.arrays)
        total += len(json.dumps(p.name)) + 70 * (len(p.shape) + 1) + arrays + 4 * 64
    total += 20 * (layout.num_chunks + 8) * max(1, len(layout.array_names))
    dtypes = {tensor.name: tensor.dtype for tensor in layout.model}
    boxes = parameter_boxes(layout) if written is None else written
    total += model_box_bytes((name, box, DTYPE_BYTES[dtypes[name]]) for name, box in boxes)
    if total > MAX_TABLE_BYTES:
        raise OffloadError(
            f"the table of {len(layout.parameters)} parameters in {layout.num_chunks} chunks could "
            f"take {total} bytes, at most {MAX_TABLE_BYTES} are read: raise Options(chunk_bytes=)"
        )
    return -(-total // ALIGNMENT) * ALIGNMENT


def invalid_table(size_bytes: int) -> bytes:
    """Return the content of ``table.json`` while the part is being rewritten."""
    return document.invalid("this part is being rewritten", size_bytes)


def decode_table_header(data: bytes, path: str) -> TableHeader:
    """Return the identity of a table. The data is not trusted.

    Args:
        data: Content of the file; its padding is optional.
        path: Path of the file, for messages.

    Raises:
        CheckpointError: The part is not sealed, or the file is damaged or of another version.
    """
    with document.decoding(path, CheckpointError):
        return _header(document.read_long(data, _KIND))


def decode_table(
    data: bytes, path: str, model: tuple[ModelTensor, ...], *, num_groups: int, state_dtype: str
) -> OwnerTable:
    """Decode a table, given the manifest of its checkpoint. The data is not trusted.

    Args:
        data: Content of the file; its padding is optional.
        path: Path of the file, for messages.
        model: Tensors of the model.
        num_groups: Number of parameter groups.
        state_dtype: Form of the checkpoint's state; see `Layout.state_dtype`.

    Raises:
        CheckpointError: The part is not sealed, or the file is damaged, of another version, or
            contradicts itself or the manifest.
    """
    with document.decoding(path, CheckpointError):
        body = document.read_long(data, _KIND)
        header = _header(body)
        if body["state_dtype"] != state_dtype:
            raise ValueError(
                f"state_dtype is {short(body['state_dtype'])}, expected {state_dtype!r}"
            )
        layout, scalars, digests = decode_state(body, model, (1,), num_groups)
        layout, boxes = decode_model_boxes(body, layout, header.owner)
        return OwnerTable(
            store_id=header.store_id,
            generation=header.generation,
            owner=header.owner,
            layout=layout,
            scalars=scalars,
            digests=digests,
            model_boxes=boxes,
        )


def _header(body: Mapping[str, Any]) -> TableHeader:
    owner = fields.count(body["owner"])
    if not 1 <= owner < MAX_OWNERS:
        raise ValueError(f"owner {owner}, expected 1 to {MAX_OWNERS - 1}")
    return TableHeader(
        fields.store_id(body["store_id"]),
        fields.count(body["generation"]),
        owner,
        document.digest_of(body),
    )


def owner_sizes(layout: Layout, written: Iterable[tuple[str, Box]] | None = None) -> dict[str, int]:
    """Return the size in bytes of every file of an owner's part, by name; see `table_bytes`."""
    headers = layout.array_headers[0].items()
    sizes = {array_file_name(name): header.file_bytes for name, header in headers}
    if layout.shard is not None:
        sizes[layout.model_name] = layout.model_file_header.file_bytes
    return {**sizes, TABLE_NAME: table_bytes(layout, written)}
