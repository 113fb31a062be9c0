"""Format 4: what is written comes back, and nothing else is read."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offload.errors import CheckpointError, ManifestError, OffloadError
from offload.format import document
from offload.format.boxes import Box, Cut
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import MAX_MANIFEST_BYTES, decode, reserved_bytes
from offload.format.shares.owners import (
    MAX_OWNERS,
    MODEL_PIECE_BYTES,
    ModelBox,
    decode_model_boxes,
    encode_model_boxes,
    parameter_boxes,
    require_exact_cover,
)
from offload.format.shares.part_table import (
    decode_table,
    decode_table_header,
    invalid_table,
    owner_sizes,
    table_bytes,
)
from tests.ranks_store.synthetic import (
    DIRECTORY,
    GENERATION,
    MODEL,
    OTHER,
    OWN,
    STORE_ID,
    layout_of,
    manifest_of,
    reference_to,
    rows,
    table_of,
    whole,
)

Body = dict[str, Any]
GOOD = manifest_of([reference_to(1), reference_to(3)])


def decoded(data: bytes) -> Any:
    return decode_table(data, "table.json", MODEL, num_groups=1, state_dtype="float32")


def test_a_manifest_with_owners_comes_back() -> None:
    encoded = GOOD.encode(reserved_bytes(OWN, 1, [DIRECTORY] * 2))
    assert encoded.startswith(b'{"format":4,')
    assert decode(encoded, "manifest.json") == GOOD


def test_a_table_comes_back_and_says_what_it_is() -> None:
    table = table_of()
    encoded = table.encode(table_bytes(OTHER))
    assert len(encoded) % 4096 == 0
    assert decoded(encoded) == table
    header = decode_table_header(encoded, "table.json")
    assert (header.store_id, header.generation, header.owner) == (STORE_ID, GENERATION, 1)
    assert header == table.header


def test_an_owner_may_hold_nothing() -> None:
    table = table_of(7, layout_of())
    assert decoded(table.encode(table_bytes(table.layout))) == table
    assert owner_sizes(table.layout) == {"table.json": 4096}


def test_boxes_of_one_parameter_are_tensors_of_their_own() -> None:
    names = list(OTHER.array_headers[0]["master"].entries)
    assert names == ["embed[6:12, 0:5]", "scale", "head[0:2, 0:12]", "head[2:5, 0:12]"]


def test_an_invalid_table_is_refused_with_its_reason() -> None:
    for read in (decoded, lambda data: decode_table_header(data, "table.json")):
        with pytest.raises(CheckpointError, match=r"not sealed: .*being rewritten"):
            read(invalid_table(4096))


def test_a_table_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OffloadError, match=r"needs .* bytes, but 100 were reserved"):
        table_of().encode(100)


@pytest.mark.parametrize("dims", [1, 2, 8])
def test_reserved_sizes_suffice_for_large_numbers(dims: int) -> None:
    huge = 1 << 40
    name = '"\N{SNOWMAN}\\' * 20
    shape = (huge, *(1 for _ in range(dims - 1)))
    box = Box((huge - 4, *(0 for _ in shape[1:])), (4, *shape[1:]))
    model = (ModelTensor(name, "BF16", shape),)
    spec = ParameterSpec(name, "BF16", box.sizes, 0, ("master", "exp_avg"), Cut(shape, box))
    layout = Layout((spec,), model, 1024)
    pieces = -(-2 * 4 // MODEL_PIECE_BYTES)
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


def test_neither_manifest_nor_table_grows_with_ranks_times_parameters() -> None:
    """Twice as many ranks: a few bytes for each in the manifest, and tables of half the size."""
    model = tuple(ModelTensor(f"layers.{i}.weight", "BF16", (4096, 64)) for i in range(200))

    def sizes(num: int) -> tuple[int, int]:
        each = -(-len(model) // num)
        specs = [ParameterSpec(t.name, t.dtype, t.shape, 0, ("master",)) for t in model[:each]]
        layout = Layout(tuple(specs), model, 1 << 20)
        return reserved_bytes(layout, 1, [DIRECTORY] * (num - 1)), table_bytes(layout)

    few, many = sizes(10), sizes(20)
    assert many[1] < 0.7 * few[1]
    assert many[0] - few[0] < 10 * 400


def spoilt(change: Callable[[Body], object], body: Body) -> bytes:
    body = copy.deepcopy(body)
    change(body)
    version = 4 if "model" in body else 1
    return json.dumps(
        {"format": version, "digest": document.digest_of(body), "body": body}
    ).encode()


def put(*path: str | int, value: object) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


HUGE = 1 << 62
PARAMETERS = {
    "box-of-one-list": (put("parameters", 0, 5, value=[[0, 0]]), "not enough values"),
    "box-of-three-lists": (put("parameters", 0, 5, value=[[0], [1], [1]]), "too many values"),
    "box-null": (put("parameters", 0, 5, value=None), "expected a list"),
    "box-text": (put("parameters", 0, 5, value=["00", "11"]), "expected a list"),
    "box-negative": (put("parameters", 0, 5, 0, 0, value=-1), "expected a count"),
    "box-bool": (put("parameters", 0, 5, 0, 0, value=True), "expected a count"),
    "box-float": (put("parameters", 0, 5, 1, 0, value=1.0), "expected a count"),
    "box-of-other-dimensions": (put("parameters", 0, 5, value=[[0], [1]]), "not within"),
    "box-of-unequal-lists": (put("parameters", 0, 5, value=[[0, 0], [1]]), "are no box"),
    "box-outside": (put("parameters", 0, 5, 0, 0, value=7), "not within the shape"),
    "box-huge": (put("parameters", 0, 5, 1, value=[HUGE, HUGE]), "not within the shape"),
    "whole-shape-of-another": (put("parameters", 0, 2, value=[HUGE, 5]), "differs from"),
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
    "parameter-of-4": (drop("parameters", 1, 4), "described by 4 values"),
    "parameter-unknown": (put("parameters", 0, 0, value="other"), "differs from"),
    "group-unknown": (put("parameters", 0, 3, value=9), "group that does not exist"),
    "counts-from-chunk": (put("counts_from", value="chunk"), "counts_from is 'chunk'"),
    "chunk-zero": (put("chunk_elements", value=0), "not a positive multiple"),
    "chunk-odd": (put("chunk_elements", value=1023), "not a positive multiple"),
    "digests-of-no-array": (put("digests", value={}), "not one digest for each chunk"),
    "scalars-missing": (put("scalars", value=[]), "0 scalar states"),
    "array-called-table": (put("arrays", 0, 0, value="../x"), "arrays are"),
    "model-boxes-missing": (drop("model_boxes"), "'model_boxes' is missing"),
    "model-boxes-null": (put("model_boxes", value=None), "expected a list"),
    "model-box-short": (put("model_boxes", 0, value=["norm", [0], [7]]), "not enough values"),
    "model-box-unknown": (put("model_boxes", 0, 0, value="x"), "not a tensor of the model"),
    "model-box-outside": (put("model_boxes", 0, 1, 0, value=99), "not one contiguous range"),
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
    "model-box-digest-more": (put("model_boxes", 0, 3, value=["0" * 16] * 2), "2 digests for"),
    "model-box-digest-bad": (put("model_boxes", 0, 3, value=["0"]), "16 hexadecimal digits"),
}
MANIFEST_ONLY = {
    "owners-missing": (drop("owners"), "'owners' is missing"),
    "owners-none": (put("owners", value=[]), "0 owners besides the first"),
    "owners-null": (put("owners", value=None), "expected a list"),
    "owner-a-list": (put("owners", 0, value=[1]), "expected an object"),
    "owner-0": (put("owners", 0, "owner", value=0), "expected rising numbers"),
    "owner-negative": (put("owners", 0, "owner", value=-1), "expected a count"),
    "owner-bool": (put("owners", 0, "owner", value=True), "expected a count"),
    "owner-too-high": (put("owners", 1, "owner", value=4096), "expected rising numbers"),
    "owner-twice": (put("owners", 1, "owner", value=1), "expected rising numbers"),
    "owners-in-disorder": (lambda body: body["owners"].reverse(), "expected rising numbers"),
    "owner-of-another-generation": (put("owners", 0, "generation", value=4), "generation 4"),
    "owner-part-a-path": (put("owners", 0, "name", value="../part-1"), "not the path of a part"),
    "owner-part-zero": (put("owners", 0, "name", value="part-0"), "not the path of a part"),
    "owner-directory-relative": (put("owners", 0, "directory", value="run"), "not the path"),
    "owner-directory-zero": (put("owners", 0, "directory", value="/a\0b"), "not the path"),
    "owner-directory-surrogate": (put("owners", 0, "directory", value="/\ud800"), "not the path"),
    "owner-digest-short": (put("owners", 0, "digest", value="a" * 16), "the digest of a part"),
    "owner-field-missing": (drop("owners", 0, "digest"), "'digest' is missing"),
    "several-drives": (put("shares", value=[1, 1]), "an owner has one directory"),
    "drives-without-parts": (put("parts", value=[{}]), "missing|parts for"),
}
TABLE_ONLY = {
    "store-id": (put("store_id", value="x"), "not 32 hexadecimal digits"),
    "generation": (put("generation", value=-1), "expected a count"),
    "owner-0": (put("owner", value=0), "owner 0, expected 1 to"),
    "owner-too-high": (put("owner", value=4096), "owner 4096, expected 1 to"),
    "owner-text": (put("owner", value="1"), "expected a count"),
    "owner-missing": (drop("owner"), "'owner' is missing"),
    "state-dtype": (put("state_dtype", value="int8"), "state_dtype is 'int8'"),
    "state-dtype-list": (put("state_dtype", value=["float32"]), "state_dtype is"),
}


@pytest.mark.parametrize("name", [*PARAMETERS, *MANIFEST_ONLY])
def test_a_manifest_that_lies_is_refused(name: str) -> None:
    change, reason = {**PARAMETERS, **MANIFEST_ONLY}[name]
    with pytest.raises(ManifestError, match=reason):
        decode(spoilt(change, GOOD._body()), "manifest.json")


@pytest.mark.parametrize("name", [*PARAMETERS, *TABLE_ONLY])
def test_a_table_that_lies_is_refused(name: str) -> None:
    change, reason = {**PARAMETERS, **TABLE_ONLY}[name]
    body = table_of()._body()
    body["parameters"][1:2] = [["norm", "BF16", [7], 0, list(body["parameters"][0][4])]]
    with pytest.raises(CheckpointError, match=reason):
        decoded(spoilt(change, body))


def test_what_they_spoil_is_good() -> None:
    decode(spoilt(lambda _: None, GOOD._body()), "manifest.json")
    decoded(spoilt(lambda _: None, table_of()._body()))


@pytest.mark.parametrize("version", [2, 3])
def test_a_flipped_bit_of_the_version_does_not_hide_owners(version: int) -> None:
    text = json.loads(GOOD.encode(1 << 16))
    text["format"] = version
    if version == 3:  # what version 3 asks for besides
        text["body"]["model_digests"] = ["0" * 16]
        text["body"]["state_dtype"] = "bfloat16"
        for array in text["body"]["arrays"][1:]:
            array[1] = "BF16"
        text["body"]["parameters"] = [p[:5] for p in text["body"]["parameters"]]
        text["body"]["parameters"][0][2] = [12, 5]
        text["digest"] = document.digest_of(text["body"])
    with pytest.raises(ManifestError, match=r"counts_from is|owners, which format version 3"):
        decode(json.dumps(text).encode(), "manifest.json")


def test_a_manifest_of_one_process_is_no_manifest_of_owners() -> None:
    text = json.loads(GOOD.encode(1 << 16))
    text["format"] = 4
    del text["body"]["owners"]
    text["digest"] = document.digest_of(text["body"])
    with pytest.raises(ManifestError, match="'owners' is missing"):
        decode(json.dumps(text).encode(), "manifest.json")


def test_a_box_of_many_pieces_has_a_digest_for_each() -> None:
    tensor = ModelTensor("w", "F32", (3, MODEL_PIECE_BYTES // 4 + 1))
    box = Box((1, 0), (2, tensor.shape[1]))
    good = ModelBox("w", box, ("1" * 16,) * 3)
    assert decode_model_boxes(encode_model_boxes([good]), {"w": tensor}) == (good,)
    assert good.byte_range(tensor) == (MODEL_PIECE_BYTES + 4, 3 * (MODEL_PIECE_BYTES + 4))
    assert good.digest_array == f"model/w[1:3, 0:{tensor.shape[1]}]"


def test_owners_that_hold_each_element_once_are_accepted() -> None:
    require_exact_cover(MODEL, [parameter_boxes(OWN), parameter_boxes(OTHER)])


@pytest.mark.parametrize(
    ("owned", "reason"),
    [
        ([layout_of(rows("embed", 0, 6))], "30 elements of 60"),
        ([layout_of(rows("embed", 0, 6)), layout_of(rows("embed", 5, 12))], "65 elements of 60"),
        ([layout_of(whole("norm")), layout_of(whole("norm"))], "14 elements of 7"),
        (
            [layout_of(rows("embed", 0, 8)), layout_of(rows("embed", 6, 10))],
            r"\[0:8, 0:5\] and \[6:10, 0:5\] overlap",
        ),
    ],
)
def test_owners_that_overlap_or_leave_a_gap_are_refused(owned: list[Layout], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        require_exact_cover(MODEL, [parameter_boxes(layout) for layout in owned])


def test_cover_is_found_by_brute_force_too() -> None:
    """Random cuts of a small tensor, against a set of all elements."""
    rng = random.Random(3)
    shape = (3, 4)
    model = [ModelTensor("w", "BF16", shape)]
    counts = {True: 0, False: 0}
    for _ in range(3000):
        boxes = []
        for _ in range(rng.randrange(1, 4)):
            offsets = tuple(rng.randrange(n) for n in shape)
            sizes = tuple(rng.randrange(1, n - o + 1) for n, o in zip(shape, offsets, strict=True))
            boxes.append(Box(offsets, sizes))
        elements = [
            e for b in boxes for e in itertools.product(*(range(s.start, s.stop) for s in b.slices))
        ]
        exact = len(elements) == len(set(elements)) == math.prod(shape)
        counts[exact] += 1
        try:
            require_exact_cover(model, [[("w", b)] for b in boxes])
        except ValueError:
            assert not exact
        else:
            assert exact
    assert min(counts.values()) > 5


HOSTILE = (
    None, True, -1, HUGE, 1.5, "", "x", "../..", "\ud800", "a" * 5000, [], {}, [[]], [None],
    {"a": 1}, [[HUGE]], [HUGE] * 65, "0" * 16, "0" * 32, ["f" * 16] * 3,
)  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the path of everything in a document."""
    inside: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [path, *(found for key, one in inside for found in places(one, (*path, key)))]


@pytest.mark.parametrize("kind", ["manifest", "table"])
def test_whatever_stands_in_any_place_is_refused_or_read(kind: str) -> None:
    """Each value is put in the place of each other value; the digest is right."""
    body = GOOD._body() if kind == "manifest" else table_of()._body()
    num_refused = 0
    for path in places(body)[1:]:
        for value in HOSTILE:
            data = spoilt(put(*path, value=value), body)
            try:
                found = decode(data, "m") if kind == "manifest" else decoded(data)
                _ = (found.layout.plans, found.digests)  # what a reader computes next
            except CheckpointError:
                num_refused += 1
    assert num_refused > 2000


@pytest.mark.parametrize("kind", ["manifest", "table"])
def test_any_flipped_bit_is_found(kind: str) -> None:
    data = GOOD.encode(1 << 13) if kind == "manifest" else table_of().encode(1 << 13)
    content = len(data.rstrip(b" \n"))
    rng = random.Random(7)
    for _ in range(1500):
        flipped = bytearray(data)
        flipped[rng.randrange(content)] ^= 1 << rng.randrange(8)
        with pytest.raises(CheckpointError):
            decode(bytes(flipped), "m") if kind == "manifest" else decoded(bytes(flipped))
