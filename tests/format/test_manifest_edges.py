"""Documents and manifests at the edges of what is allowed, and the room that they are given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offload.errors import ManifestError, OffloadError
from offload.format import document, manifest
from offload.format.boxes import Box, Cut
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.manifest import (
    MAX_MANIFEST_BYTES,
    MODEL_BLOCK_BYTES,
    Manifest,
    decode,
    invalid_manifest,
    num_model_blocks,
    reserved_bytes,
)
from offload.format.shares.owners import ModelBox, encode_model_boxes
from offload.format.strict_json import MAX_VALUES, num_marks
from tests.attacks import good
from tests.attacks.manifests import put
from tests.ranks_store import synthetic, test_same_bytes

PATH = "run/step-00000002/manifest.json"
MAX_COUNT = 2**63 - 1
RESERVED = 1 << 16

Body = dict[str, Any]


def a_manifest(**changes: Any) -> Manifest:
    return replace(decode(good.manifest(), PATH), **changes)


class TestDocuments:
    @pytest.mark.parametrize("data", [b"null", b"7", b'"format"', b'["format"]'])
    def test_what_is_no_object_has_no_format(self, data: bytes) -> None:
        with pytest.raises(document.DocumentError, match="not a pin: it has no 'format'"):
            document.read(data, "a pin", [1])

    @pytest.mark.parametrize("version", [True, 1.0])
    def test_a_version_is_an_integer(self, version: object) -> None:
        text = {**json.loads(document.signed(1, {"a": 1})), "format": version}
        with pytest.raises(document.DocumentError, match=f"format version {version}, expected 1"):
            document.read(json.dumps(text).encode(), "a pin", [1])

    def test_a_body_is_an_object_although_its_digest_is_right(self) -> None:
        body: Any = [1]
        with pytest.raises(document.DocumentError, match="does not match its digest"):
            document.read(document.signed(1, body), "a pin", [1])

    @pytest.mark.parametrize("number", [float("nan"), float("-inf")])
    def test_a_number_that_no_reader_would_take_is_not_written(self, number: float) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            document.signed(1, {"a": number})


class TestWriting:
    @pytest.mark.parametrize("field", ["generation", "step"])
    def test_numbers_are_counts(self, field: str) -> None:
        assert getattr(decode(a_manifest(**{field: 0}).encode(RESERVED), PATH), field) == 0
        with pytest.raises(OffloadError, match="both must be from 0 to"):
            a_manifest(**{field: -1}).encode(RESERVED)

    def test_it_fits_its_room_to_the_last_byte(self) -> None:
        num_bytes = len(a_manifest().encode(RESERVED).rstrip())
        fitting = a_manifest().encode(num_bytes + 1)
        assert len(fitting) == num_bytes + 1
        assert decode(fitting, PATH) == a_manifest()
        with pytest.raises(OffloadError, match=f"needs {num_bytes + 1} bytes, but {num_bytes} "):
            a_manifest().encode(num_bytes)

    @pytest.mark.parametrize("limit", ["MAX_CONTENT_BYTES", "MAX_VALUES"])
    def test_it_may_be_as_large_as_readers_accept(
        self, limit: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = a_manifest().encode(RESERVED).rstrip()
        size = len(text) if limit == "MAX_CONTENT_BYTES" else num_marks(text)
        monkeypatch.setattr(manifest, limit, size)
        assert a_manifest().encode(RESERVED).rstrip() == text
        monkeypatch.setattr(manifest, limit, size - 1)
        with pytest.raises(OffloadError, match=r"at most .* are read: raise Options\(chunk_bytes"):
            a_manifest().encode(RESERVED)

    def test_optional_fields_are_left_out(self) -> None:
        body = json.loads(a_manifest().encode(RESERVED))["body"]
        assert body.keys() == good.BODY.keys()
        owners = synthetic.manifest_of([synthetic.reference_to(1)])
        body = json.loads(owners.encode(RESERVED))["body"]
        assert body.keys() - good.BODY.keys() == {"counts_from", "owners", "model_boxes"}
        assert good.BODY.keys() - body.keys() == {"model_digests"}

    def test_state_whose_blocks_are_counted_from_chunks_keeps_its_version(self) -> None:
        layout = replace(test_same_bytes.layout_of("bfloat16"), counts_from="chunk")
        written = test_same_bytes.manifest_of(layout)
        data = written.encode(1 << 17)
        assert data.startswith(b'{"format":2,')
        assert decode(data, PATH) == written


HUGE_INTEGER = {"tensor": str(2**64), "dtype": "int64", "shape": []}

LIES = {
    "a-group-just-beyond-the-last": (put("parameters", 0, 3, value=1), "a group that does not"),
    "no-share": (put("shares", value=[]), r"shares are \[\]"),
    "too-many-shares": (put("shares", value=[1] * 65), "shares are"),
    "a-share-of-nothing": (put("shares", value=[1, 0]), r"shares are \[1, 0\]"),
    "too-large-a-share": (put("shares", value=[2**16 + 1]), r"shares are \[65537\]"),
    "blocks-of-another-size": (put("model_block_bytes", value=4096), "model_block_bytes is 4096"),
    "no-digests-of-the-model": (put("model_digests", value=[]), "each block of the model file"),
    "an-order-of-no-groups": (put("order", value=[]), "the order of parameters"),
    "an-order-of-more-groups": (put("order", value=[[0, 1], [2, 3]]), "the order of parameters"),
    "an-order-beyond-the-last": (put("order", value=[[0, 1, 2, 4]]), "the order of parameters"),
    "a-tensor-of-65-bits": (put("groups", 0, "lr", value=HUGE_INTEGER), ""),
    **{
        f"numpy-{said}-{dtype}": (put("groups", 0, "lr", value={"numpy": said, "dtype": dtype}), "")
        for said, dtype in [("1e9", "float16"), ("x", "float32"), ("1", "object"), (0.5, "float64")]
    },
}


class TestReading:
    @pytest.mark.parametrize("name", LIES)
    def test_lies_are_refused(self, name: str) -> None:
        change, reason = LIES[name]
        body = good.body()
        change(body)
        with pytest.raises(ManifestError, match=rf"^{PATH}: contradictory content .*{reason}"):
            decode(good.manifest(body), PATH)

    def test_an_order_and_the_largest_share_are_taken(self) -> None:
        body = good.body()
        body.update(order=[[3, 1, 2, 0]], shares=[2**16])
        found = decode(good.manifest(body), PATH)
        assert found.order == ((3, 1, 2, 0),)
        assert found.layout.shares == (2**16,)

    def test_parts_that_are_not_those_of_its_digests_are_refused(self) -> None:
        body = good.two_drives()
        assert decode(good.manifest(body), PATH).parts[0].name == "part-1"
        body["parts"][0]["digest"] = "0" * 32
        with pytest.raises(ManifestError, match="the parts on other drives are not those"):
            decode(good.manifest(body), PATH)

    def test_the_version_of_compressed_state_is_not_for_float32(self) -> None:
        text = good.signed({**good.BODY, "counts_from": "parameter"})
        text["format"] = 3
        with pytest.raises(ManifestError, match="format version 3 is for compressed state"):
            decode(good.as_json(text), PATH)

    def test_one_that_is_being_rewritten_says_so(self) -> None:
        with pytest.raises(ManifestError, match=f"^{PATH}: withdrawn: .*being rewritten"):
            decode(invalid_manifest(4096), PATH)

    def test_one_that_is_damaged_says_so(self) -> None:
        with pytest.raises(ManifestError, match=f"^{PATH}: damaged: its content does not match"):
            decode(good.manifest().replace(b'"step":2', b'"step":3'), PATH)

    def test_a_model_may_be_as_large_as_a_file(self) -> None:
        """The store has owners: the digests of the model are then beside the boxes of it."""
        header_bytes = Layout((), (ModelTensor("w", "U8", (1,)),), 1024).model_header.data_start

        def with_tensor(nbytes: int) -> bytes:
            layout = Layout((), (ModelTensor("w", "U8", (nbytes,)),), 1024)
            written: Manifest = synthetic.manifest_of([synthetic.reference_to(1)], layout)
            return written.encode(RESERVED)

        most = MAX_COUNT - header_bytes
        assert decode(with_tensor(most), PATH).layout.model[0].shape == (most,)
        with pytest.raises(ManifestError, match="more bytes than any file has"):
            decode(with_tensor(most + 1), PATH)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, 0), (1, 1), (MODEL_BLOCK_BYTES, 1), (MODEL_BLOCK_BYTES + 1, 2)],
)
def test_blocks_are_of_the_data_and_not_of_the_header(nbytes: int, expected: int) -> None:
    assert num_model_blocks(Layout((), (ModelTensor("w", "U8", (nbytes,)),), 1024)) == expected


def long_names() -> Layout:
    name = "\N{SNOWMAN}" * 60
    model = tuple(
        ModelTensor(f"{name}{n}", "U8", (1,), tuple(f"{name}{n}.{k}" for k in range(3)))
        for n in range(300)
    )
    return Layout((), model, 1024)


def many_arrays() -> Layout:
    arrays = tuple(f"array_{number:02}".ljust(40, "x") for number in range(12))
    specs = tuple(ParameterSpec(f"w{number}", "F32", (8,), 0, arrays) for number in range(500))
    return Layout(specs, tuple(ModelTensor(spec.name, "F32", (8,)) for spec in specs), 1024)


def many_chunks() -> Layout:
    shape = (5000 * 1024,)
    spec = ParameterSpec("w", "BF16", shape, 0, synthetic.ARRAYS)
    return Layout((spec,), (ModelTensor("w", "BF16", shape),), 1024)


def many_blocks() -> Layout:
    return Layout((), (ModelTensor("w", "U8", (5000 * MODEL_BLOCK_BYTES,)),), 1024)


class TestRoom:
    @pytest.mark.parametrize("make", [long_names, many_arrays, many_chunks, many_blocks])
    def test_a_manifest_fits_the_room_of_its_layout(self, make: Callable[[], Layout]) -> None:
        layout = make()
        written = a_manifest(
            layout=layout,
            scalars=((("step", "f32", 1e30),),) * len(layout.parameters),
            digests=synthetic.digests_of(layout),
            model_digests=("0" * 16,) * num_model_blocks(layout),
        )
        assert decode(written.encode(reserved_bytes(layout, 1)), PATH) == written

    @pytest.mark.parametrize("shape", [(), (7,), (1 << 20, 3, 5, 7)], ids=str)
    def test_boxes_of_parameters_have_room(self, shape: tuple[int, ...]) -> None:
        names = [f"w{n}" for n in range(3000)]
        model = tuple(ModelTensor(name, "F32", shape) for name in names)
        box = Box.whole(shape)

        def room(cut: Cut | None) -> int:
            specs = tuple(ParameterSpec(n, "F32", shape, 0, ("exp_avg",), cut) for n in names)
            return reserved_bytes(Layout(specs, model, 1 << 40), 1, ["/data"])

        text = json.dumps([list(box.offsets), list(box.sizes)])
        more = room(Cut(shape, box)) - room(None)
        assert more > len(names) * len(text) - 4096  # both are rounded

    def test_boxes_of_the_model_have_room_if_there_are_owners(self) -> None:
        """All boxes are of one tensor. A store without owners has no room for them."""
        name, shape = "\N{SNOWMAN}" * 100, (1000,)
        cuts = [Cut(shape, Box((at,), (1,))) for at in range(1000)]
        specs = tuple(
            ParameterSpec(name, "F32", cut.box.sizes, 0, ("exp_avg",), cut) for cut in cuts
        )
        layout = Layout(specs, (ModelTensor(name, "F32", shape),), 1024)
        boxes = [ModelBox(name, cut.box, ("0" * 16,)) for cut in cuts]
        more = reserved_bytes(layout, 1, ["/data"]) - reserved_bytes(layout, 1)
        assert more > len(json.dumps(encode_model_boxes(boxes)))

    def test_as_many_values_as_are_read_are_allowed(self) -> None:
        """A chunk has one value here; the parameter and the tensor have 20 values together."""

        def layout_of(num_chunks: int) -> Layout:
            shape = (1024 * num_chunks,)
            spec = ParameterSpec("w", "F32", shape, 0, ("exp_avg",))
            return Layout((spec,), (ModelTensor("w", "F32", shape),), 1024)

        assert reserved_bytes(layout_of(MAX_VALUES - 20), 1) <= MAX_MANIFEST_BYTES
        with pytest.raises(OffloadError, match=f"{MAX_VALUES + 1} values, at most {MAX_VALUES} "):
            reserved_bytes(layout_of(MAX_VALUES - 19), 1)

    def test_one_that_readers_would_refuse_for_its_size_gets_no_room(self) -> None:
        nothing = Layout((), (), 1024)
        per_group = reserved_bytes(nothing, 1) // 2
        most = MAX_MANIFEST_BYTES // per_group - 1
        assert reserved_bytes(nothing, most) == MAX_MANIFEST_BYTES
        with pytest.raises(OffloadError, match=f"at most {MAX_MANIFEST_BYTES} are read"):
            reserved_bytes(nothing, most + 1)
