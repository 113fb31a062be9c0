"""Documents of several owners: what is written comes back, and nothing else is read.

Some have the model in a common file, and some in shard files of the owners.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offload.errors import CheckpointError, ManifestError
from offload.format import Layout, ModelTensor, ParameterSpec, document
from offload.format.boxes import Box, Cut
from offload.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode, reserved_bytes
from offload.format.shares.owners import (
    MAX_OWNERS,
    MODEL_BLOCK_BYTES,
    ModelBox,
    decode_model_boxes,
    encode_model_boxes,
)
from offload.format.shares.part_table import (
    OwnerTable,
    decode_table,
    decode_table_header,
    invalid_table,
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

Body = dict[str, Any]
Change = Callable[[Body], object]

REFERENCES = [reference_to(1), reference_to(3)]
GOOD = manifest_of(REFERENCES)
IN_SHARDS = layout_of(rows("embed", 6, 12), whole("scale"), whole("head"))
SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"
DOCUMENTS: dict[str, Manifest | OwnerTable] = {
    "manifest": GOOD,
    "table": table_of(),
    "manifest of shards": manifest_of(REFERENCES, sharded(OWN)),
    "table of shards": table_of(1, sharded(IN_SHARDS, 1)),
}
"""Content of a document of each kind."""


def decoded(data: bytes, kind: str = "table") -> Any:
    """Decode a manifest or a table."""
    if "manifest" in kind:
        return decode(data, "manifest.json")
    return decode_table(data, "table.json", MODEL, num_groups=1, state_dtype="float32")


def spoilt(kind: str, change: Change = lambda _: None, version: int = 1) -> bytes:
    """Return a changed document with the right digest."""
    body = copy.deepcopy(DOCUMENTS[kind]._body())
    change(body)
    found = {"format": version, "digest": document.digest_of(body), "body": body}
    return json.dumps(found).encode()


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_what_is_written_comes_back_and_says_what_it_is(kind: str) -> None:
    good = DOCUMENTS[kind]
    if isinstance(good, Manifest):
        encoded = good.encode(reserved_bytes(good.layout, 1, [DIRECTORY] * 2))
    else:
        encoded = good.encode(table_bytes(good.layout))
        assert len(encoded) % 4096 == 0
        assert decode_table_header(encoded, "table.json") == good.header
    assert encoded.startswith(b'{"format":1,')
    found = decoded(encoded, kind)
    assert found == good
    assert found.layout.shard == good.layout.shard
    assert decoded(spoilt(kind), kind) == good


def test_an_owner_may_hold_nothing() -> None:
    table = table_of(7, layout_of())
    assert decoded(table.encode(table_bytes(table.layout))) == table
    assert owner_sizes(table.layout) == {"table.json": 4096}


def test_a_shard_file_may_have_columns() -> None:
    columns = Box((0, 1), (12, 2))
    table = DOCUMENTS["table of shards"]
    assert isinstance(table, OwnerTable)
    assert table.layout.shard is not None
    layout = replace(IN_SHARDS, shard=replace(table.layout.shard, boxes=(("embed", columns),)))
    boxes = (ModelBox("embed", columns, ("0" * 16,)),)
    table = replace(table, layout=layout, model_boxes=boxes)
    found = decoded(table.encode(table_bytes(layout)))
    assert found.layout.shard == layout.shard
    assert found.layout.model_file_header.entries["embed"].shape == (12, 2)


def test_an_invalid_table_is_refused_with_its_reason() -> None:
    for read in (decoded, lambda data: decode_table_header(data, "table.json")):
        with pytest.raises(CheckpointError, match=r"not sealed: .*being rewritten"):
            read(invalid_table(4096))


@pytest.mark.parametrize("dims", [1, 2, 8])
def test_reserved_sizes_suffice_for_large_numbers(dims: int) -> None:
    huge = 1 << 40
    name = '"\N{SNOWMAN}\\' * 20
    shape = (huge, *(1 for _ in range(dims - 1)))
    box = Box((huge - 4, *(0 for _ in shape[1:])), (4, *shape[1:]))
    model = (ModelTensor(name, "BF16", shape),)
    spec = ParameterSpec(name, "BF16", box.sizes, 0, ("master", "exp_avg"), Cut(shape, box))
    layout = Layout((spec,), model, 1024)
    pieces = -(-2 * 4 // MODEL_BLOCK_BYTES)
    boxes = (ModelBox(name, box, ("f" * 16,) * pieces),)
    scalars = ((("step", "f32", 1e30), ("eta", "f64", -1.2345678901234567e-300)),)
    table = replace(table_of(1, layout), model_boxes=boxes, scalars=scalars)
    table.encode(table_bytes(layout))
    directory = "/" + "\N{SNOWMAN}" * 1000
    manifest = replace(
        manifest_of([reference_to(MAX_OWNERS - 1, directory=directory)], layout),
        model_boxes=boxes,
    )
    manifest.encode(reserved_bytes(layout, 1, [directory]))


def test_as_many_owners_as_are_allowed_are_written_and_read() -> None:
    """The largest store that is promised: a manifest that is far from every limit."""
    references = [
        reference_to(owner, f"{owner:032x}", f"/nodes/{owner:04}/run")
        for owner in range(1, MAX_OWNERS)
    ]
    manifest = manifest_of(references)
    size_bytes = reserved_bytes(OWN, 1, [r.directory for r in references])
    assert size_bytes < MAX_MANIFEST_BYTES / 50
    assert decode(manifest.encode(size_bytes), "manifest.json") == manifest
    too_many = [*references, reference_to(MAX_OWNERS)]
    with pytest.raises(ManifestError, match=f"{MAX_OWNERS} owners besides the first"):
        decode(manifest_of(too_many).encode(size_bytes + 4096), "manifest.json")


def put(*path: str | int, value: object) -> Change:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


HUGE = 1 << 62
PARAMETERS = {
    "box-of-one-list": (put("parameters", 0, 5, value=[[0, 0]]), "not enough values"),
    "box-negative": (put("parameters", 0, 5, 0, 0, value=-1), "expected a count"),
    "box-bool": (put("parameters", 0, 5, 0, 0, value=True), "expected a count"),
    "box-of-other-dimensions": (put("parameters", 0, 5, value=[[0], [1]]), "not within"),
    "box-of-unequal-lists": (put("parameters", 0, 5, value=[[0, 0], [1]]), "are no box"),
    "box-outside": (put("parameters", 0, 5, 0, 0, value=7), "not within the shape"),
    "box-huge": (put("parameters", 0, 5, 1, value=[HUGE, HUGE]), "not within the shape"),
    "parameter-twice": (
        lambda body: body["parameters"].__setitem__(1, body["parameters"][0]),
        "occurs twice",
    ),
    "boxes-overlap": (
        lambda body: body["parameters"].__setitem__(
            1, [*body["parameters"][0][:5], [[0, 0], [12, 5]]]
        ),
        "overlap",
    ),
    "parameter-of-7": (
        lambda body: body["parameters"][0].append(0),
        "described by 7 values",
    ),
    "parameter-unknown": (put("parameters", 0, 0, value="other"), "differs from"),
    "group-unknown": (put("parameters", 0, 3, value=9), "group that does not exist"),
    "chunk-zero": (put("chunk_elements", value=0), "not a positive multiple"),
    "digests-of-no-array": (put("digests", value={}), "not one digest for each chunk"),
    "scalars-missing": (put("scalars", value=[]), "0 scalar states"),
    "array-called-table": (put("arrays", 0, 0, value="../x"), "arrays are"),
    "model-boxes-missing": (drop("model_boxes"), "'model_boxes' is missing"),
    "model-box-short": (put("model_boxes", 0, value=["norm", [0], [7]]), "not enough values"),
    "model-box-unknown": (put("model_boxes", 0, 0, value="x"), "not a tensor of the model"),
    "model-box-huge": (put("model_boxes", 0, 2, value=[HUGE, HUGE]), "not one contiguous range"),
    "model-box-of-columns": (
        put("model_boxes", 0, value=["embed", [0, 1], [12, 2], ["0" * 16]]),
        "not one contiguous range",
    ),
    "model-box-twice": (
        lambda body: body["model_boxes"].append(body["model_boxes"][0]),
        "occurs twice",
    ),
    "model-box-digest-missing": (put("model_boxes", 0, 3, value=[]), "0 digests for"),
    "model-box-digest-bad": (put("model_boxes", 0, 3, value=["0"]), "16 hexadecimal digits"),
}
MANIFEST_ONLY = {
    "owners-missing": (drop("owners"), "'owners' is missing"),
    "owners-none": (put("owners", value=[]), "0 owners besides the first"),
    "owner-0": (put("owners", 0, "owner", value=0), "expected rising numbers"),
    "owner-twice": (put("owners", 1, "owner", value=1), "expected rising numbers"),
    "owners-in-disorder": (lambda body: body["owners"].reverse(), "expected rising numbers"),
    "owner-of-another-generation": (put("owners", 0, "generation", value=4), "generation 4"),
    "owner-part-a-path": (put("owners", 0, "name", value="../part-1"), "not the path of a part"),
    "owner-directory-relative": (put("owners", 0, "directory", value="run"), "not the path"),
    "owner-directory-zero": (put("owners", 0, "directory", value="/a\0b"), "not the path"),
    "owner-digest-short": (put("owners", 0, "digest", value="a" * 16), "the digest of a part"),
    "several-drives": (put("shares", value=[1, 1]), "an owner has one directory"),
    "drives-without-parts": (put("parts", value=[{}]), "missing|parts for"),
}
TABLE_ONLY = {
    "store-id": (put("store_id", value="x"), "not 32 hexadecimal digits"),
    "generation": (put("generation", value=-1), "expected a count"),
    "owner-0": (put("owner", value=0), "owner 0, expected 1 to"),
    "state-dtype": (put("state_dtype", value="int8"), "state_dtype is 'int8'"),
}


SHARDS_ONLY = {
    "the-common-file": (put("model_file", value="model.safetensors"), "expected 'model/shard-"),
    "a-file-outside": (put("model_file", value="../shard-00001"), "expected 'model/shard-"),
    "the-file-of-another": (put("model_file", value=SHARD.format(9)), "expected 'model/shard-"),
    "an-empty-box": (put("model_boxes", 0, value=["embed", [0, 0], [0, 5], []]), "an empty box"),
    "a-box-outside": (put("model_boxes", 0, 1, 0, value=99), "is outside"),
    "two-boxes-of-a-tensor": (
        lambda body: body["model_boxes"].append(["embed", [0, 0], [1, 1], ["0" * 16]]),
        "two boxes of one tensor",
    ),
}
LIES = {
    "manifest": {**PARAMETERS, **MANIFEST_ONLY},
    "table": {**PARAMETERS, **TABLE_ONLY},
    "manifest of shards": SHARDS_ONLY,
    "table of shards": SHARDS_ONLY,
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_lies_are_refused(kind: str) -> None:
    for name, (change, reason) in LIES[kind].items():

        def spoil(body: Body, change: Change = change) -> None:
            if kind == "table":  # which has a parameter without a box, like the manifest
                norm = ["norm", "BF16", [7], 0, list(body["parameters"][0][4])]
                body["parameters"][1:2] = [norm]
            change(body)

        with pytest.raises(CheckpointError) as found:
            decoded(spoilt(kind, spoil), kind)
        assert re.search(reason, str(found.value)), (name, str(found.value))


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_another_version_is_refused(kind: str, version: int) -> None:
    """Also one that a flipped bit makes of the version, which the digest does not cover."""
    with pytest.raises(CheckpointError, match=f"format version {version}, expected 1; it was"):
        decoded(spoilt(kind, version=version), kind)


def test_a_box_of_many_pieces_has_a_digest_for_each() -> None:
    tensor = ModelTensor("w", "F32", (3, MODEL_BLOCK_BYTES // 4 + 1))
    box = Box((1, 0), (2, tensor.shape[1]))
    good = ModelBox("w", box, ("1" * 16,) * 3)
    layout, body = Layout((), (tensor,), 1024), {"model_boxes": encode_model_boxes([good])}
    assert decode_model_boxes(body, layout, 0) == (layout, (good,))
    assert good.byte_range(tensor) == (MODEL_BLOCK_BYTES + 4, 3 * (MODEL_BLOCK_BYTES + 4))
    assert good.digest_array == f"model/w[1:3, 0:{tensor.shape[1]}]"


HOSTILE = (
    None, True, -1, HUGE, 1.5, "\ud800", [], {}, [[HUGE]], "0" * 16,
)  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths in a document; of equal elements of a list, that of the first."""
    inside: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = [(n, one) for n, one in enumerate(value) if one not in value[:n]]
    return [path, *(found for key, one in inside for found in places(one, (*path, key)))]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_whatever_stands_in_any_place_is_refused_or_read(kind: str) -> None:
    """Each value is put in the place of each other value; the digest is right."""
    found = places(DOCUMENTS[kind]._body())[1:]
    if "shards" in kind:
        found = [one for one in found if one[0] in ("model_boxes", "model_file", "model")]
    num_refused = 0
    for path, value in itertools.product(found, HOSTILE):
        try:
            read = decoded(spoilt(kind, put(*path, value=value)), kind)
            _ = (read.layout.plans, read.layout.model_file_header)  # what a reader computes next
        except CheckpointError:
            num_refused += 1
    assert num_refused > 3 * len(found)


@pytest.mark.parametrize("kind", ["manifest", "table"])
def test_any_flipped_bit_is_found(kind: str) -> None:
    data = DOCUMENTS[kind].encode(1 << 13)
    content = len(data.rstrip(b" \n"))
    rng = random.Random(7)
    for _ in range(300):
        flipped = bytearray(data)
        flipped[rng.randrange(content)] ^= 1 << rng.randrange(8)
        with pytest.raises(CheckpointError):
            decoded(bytes(flipped), kind)
