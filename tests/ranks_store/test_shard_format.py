"""Manifests of version 5, and tables of version 2: the model is in shard files of the owners."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offload.errors import CheckpointError
from offload.format import document
from offload.format.boxes import Box
from offload.format.layout import Layout
from offload.format.manifest import Manifest, decode, reserved_bytes
from offload.format.shares.owners import ModelBox
from offload.format.shares.part_table import (
    OwnerTable,
    decode_table,
    decode_table_header,
    owner_sizes,
    table_bytes,
)
from tests.ranks_store.synthetic import (
    DIRECTORY,
    MODEL,
    OWN,
    layout_of,
    manifest_of,
    reference_to,
    rows,
    sharded,
    table_of,
    whole,
)
from tests.ranks_store.test_owner_format import HOSTILE, drop, places, put

Body = dict[str, Any]
Change = Callable[[Body], object]

OTHER = layout_of(rows("embed", 6, 12), whole("scale"), whole("head"))
MANIFEST = manifest_of([reference_to(1), reference_to(3)], sharded(OWN))
TABLE = table_of(1, sharded(OTHER, 1))
NAME = "model/shard-{:05}-model-00001-of-00001.safetensors"


def decoded(data: bytes, kind: str) -> Manifest | OwnerTable:
    """Decode a manifest or a table."""
    if kind == "manifest":
        return decode(data, "manifest.json")
    return decode_table(data, "table.json", MODEL, num_groups=1, state_dtype="float32")


def document_of(kind: str, change: Change = lambda _: None, *, older: bool = False) -> bytes:
    """Return a changed manifest or table with the right digest.

    Args:
        kind: ``manifest`` or ``table``.
        change: What is changed in the body.
        older: Whether the version is the one before, which has no shard files.
    """
    body = copy.deepcopy(MANIFEST._body() if kind == "manifest" else TABLE._body())
    change(body)
    version = (5 if kind == "manifest" else 2) - older
    digest = document.digest_of(body)
    return json.dumps({"format": version, "digest": digest, "body": body}).encode()


def test_a_manifest_comes_back() -> None:
    encoded = MANIFEST.encode(reserved_bytes(MANIFEST.layout, 1, [DIRECTORY] * 2))
    assert encoded.startswith(b'{"format":5,')
    found = decoded(encoded, "manifest")
    assert found == MANIFEST
    assert found.layout.shard == MANIFEST.layout.shard
    assert found.layout.model_name == NAME.format(1)
    assert "model.safetensors" not in found.layout.file_sizes()


def test_a_table_comes_back() -> None:
    encoded = TABLE.encode(table_bytes(TABLE.layout))
    assert encoded.startswith(b'{"format":2,')
    found = decoded(encoded, "table")
    assert found == TABLE
    assert found.layout.shard == TABLE.layout.shard
    assert decode_table_header(encoded, "table.json") == TABLE.header
    assert {*owner_sizes(TABLE.layout)} - {*owner_sizes(OTHER)} == {NAME.format(2)}


def test_a_shard_file_may_have_columns() -> None:
    columns = Box((0, 1), (12, 2))
    boxes = (ModelBox("embed", columns, ("0" * 16,)),)
    layout = replace(OTHER, shard=replace(TABLE.layout.shard, boxes=(("embed", columns),)))
    table = replace(TABLE, layout=layout, model_boxes=boxes)
    found = decoded(table.encode(table_bytes(layout)), "table")
    assert found.layout.shard == layout.shard
    assert found.layout.model_file_header.entries["embed"].shape == (12, 2)


def test_owner_0_lists_tensors_without_elements() -> None:
    model = (*MODEL, replace(MODEL[0], name="nothing", shape=(0, 3)))
    for owner in (0, 1):
        layout = sharded(Layout(OTHER.parameters, model, 1024), owner)
        names = set(layout.model_file_header.entries)
        assert names == {"embed", "scale", "head", *(["nothing"] if owner == 0 else [])}


LIES: dict[str, tuple[Change, str]] = {
    "no-file": (drop("model_file"), "'model_file' is missing"),
    "the-common-file": (put("model_file", value="model.safetensors"), "expected 'model/shard-"),
    "a-file-outside": (put("model_file", value="../shard-00001"), "expected 'model/shard-"),
    "the-file-of-another": (put("model_file", value=NAME.format(9)), "expected 'model/shard-"),
    "an-empty-box": (put("model_boxes", 0, value=["embed", [0, 0], [0, 5], []]), "an empty box"),
    "a-box-outside": (put("model_boxes", 0, 1, 0, value=99), "is outside"),
    "two-boxes-of-a-tensor": (
        lambda body: body["model_boxes"].append(["embed", [0, 0], [1, 1], ["0" * 16]]),
        "two boxes of one tensor",
    ),
}


@pytest.mark.parametrize("kind", ["manifest", "table"])
@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(kind: str, name: str) -> None:
    change, reason = LIES[name]
    decoded(document_of(kind), kind)
    with pytest.raises(CheckpointError, match=reason):
        decoded(document_of(kind, change), kind)


@pytest.mark.parametrize("kind", ["manifest", "table"])
def test_a_flipped_bit_of_the_version_does_not_hide_shard_files(kind: str) -> None:
    with pytest.raises(CheckpointError, match="names a shard file, which this format version"):
        decoded(document_of(kind, older=True), kind)


@pytest.mark.parametrize("kind", ["manifest", "table"])
def test_whatever_stands_in_any_place_is_refused_or_read(kind: str) -> None:
    """Each value is put in the place of each other value that is about the model."""
    body = MANIFEST._body() if kind == "manifest" else TABLE._body()
    num_refused = 0
    for path in places(body)[1:]:
        if path[0] not in ("model_boxes", "model_file", "owner", "model"):
            continue
        for value in HOSTILE:
            try:
                found = decoded(document_of(kind, put(*path, value=value)), kind)
                _ = (found.layout.model_file_header, found.digests)
            except CheckpointError:
                num_refused += 1
    assert num_refused > 200
