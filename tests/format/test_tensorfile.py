"""Headers of safetensors files, good and hostile. The oracle is the safetensors library itself."""

from __future__ import annotations

import json
import re
import struct

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import OffloadError
from offload.format.header import (
    DTYPE_BYTES,
    Header,
    HeaderTooLargeError,
    TensorEntry,
    TensorFileError,
    build_header,
    parse_header,
    read_header,
)


def whole_file(header: Header) -> bytes:
    """Return a file with that header and data that has no two neighbouring bytes alike."""
    num = header.file_bytes - header.data_start
    return header.encoded + bytes(i % 251 for i in range(num))


def raw_file(tree: object, data: bytes = b"") -> bytes:
    """Return a file with any header at all: text, or what json makes of it."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def reader(file: bytes, reads: list[tuple[int, int]] | None = None):
    def read(offset: int, nbytes: int) -> bytes:
        if reads is not None:
            reads.append((offset, nbytes))
        return file[offset : offset + nbytes]

    return read


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
# Without surrogates, which the file's UTF-8 cannot express.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tensor_lists = st.lists(
    st.tuples(
        texts.filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(DTYPE_BYTES)),
        shapes,
    ),
    max_size=6,
    unique_by=lambda tensor: tensor[0],
)
metadatas = st.dictionaries(texts, texts, max_size=4)


def test_data_begins_at_a_multiple_of_4096_and_the_header_grows_by_whole_blocks():
    header = build_header([("w", "F32", (3,))])
    assert header.data_start == len(header.encoded) == 4096
    assert header.file_bytes == 4096 + 12
    header = build_header([(f"layer.{i}.weight", "F32", (3,)) for i in range(200)])
    assert header.data_start > 4096
    assert header.data_start % 4096 == 0
    assert parse_header(header.encoded, header.file_bytes) == header


def test_the_encoding_is_byte_exact():
    tensors = [("b", "BF16", (2, 3)), ("e", "F64", (0, 5)), ("a", "F32", ())]
    text = (
        b'{"__metadata__":{"format":"pt","z":"1"},'
        b'"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"e":{"dtype":"F64","shape":[0,5],"data_offsets":[12,12]},'
        b'"a":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}'
    )
    for metadata in ({"z": "1", "format": "pt"}, {"format": "pt", "z": "1"}):
        header = build_header(tensors, metadata, header_bytes=240)
        assert header.encoded == struct.pack("<Q", 232) + text.ljust(232, b" ")
    assert list(header.entries.values()) == [
        TensorEntry("b", "BF16", (2, 3), 0, 12),
        TensorEntry("e", "F64", (0, 5), 12, 12),
        TensorEntry("a", "F32", (), 12, 16),
    ]


def test_an_exact_size_is_kept_down_to_the_last_byte():
    tensors = [("w", "F32", (3,))]
    needed = len(build_header(tensors, header_bytes=4000).encoded.rstrip(b" "))
    tight = build_header(tensors, header_bytes=needed)
    assert len(tight.encoded) == tight.data_start == needed
    assert parse_header(tight.encoded, tight.file_bytes) == tight
    with pytest.raises(HeaderTooLargeError, match=rf"need {needed} bytes.*are {needed - 1}"):
        build_header(tensors, header_bytes=needed - 1)
    with pytest.raises(HeaderTooLargeError, match="100000008"):
        build_header([], header_bytes=100_000_009)


# What the message of each kind of fault says

TRUNCATED = r"not a safetensors file: |claims a header of|the header takes"
ENCODING = r"the header begins with|no JSON of a header|a lone surrogate"
STRUCTURE = r"nested too deeply|expected a map of exactly"
TWICE = r"two tensors are called|names a key twice"
RESERVED = r"which the format reserves"
DTYPE = r"dtype is .*, expected one of"
SHAPE = r"shape is|of shape|dimensions, at most"
OFFSETS = r"data_offsets are|a hole before|an overlap before"
SIZE = r"header and data take"
METADATA = r"__metadata__ (is a|maps)"
TOO_LARGE = r"a header of \d+ bytes, the format allows"

REFUSED = {
    "reserved": ([("__metadata__", "U8", (1,))], None, RESERVED),
    "duplicate": ([("a", "U8", ())] * 2, None, TWICE),
    "sub-byte-dtype": ([("a", "F4", (2,))], None, DTYPE),
    "unknown-dtype": ([("a", "float32", (2,))], None, DTYPE),
    "negative": ([("a", "U8", (-1,))], None, SHAPE),
    "bool-size": ([("a", "U8", (True,))], None, SHAPE),
    "overflow": ([("a", "U8", (2**40, 2**40))], None, SHAPE),
    "surrogate": ([("a\ud800", "U8", (1,))], None, ENCODING),
    "metadata-int": ([], {"a": 1}, METADATA),
    "metadata-int-key": ([], {1: "a"}, METADATA),
    "metadata-surrogate": ([], {"a": "\udfff"}, ENCODING),
}


@pytest.mark.parametrize(("tensors", "metadata", "error"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_file_is_refused(tensors, metadata, error):
    with pytest.raises(TensorFileError, match=error):
        build_header(tensors, metadata)


# Against the library


def test_the_dtype_table_is_the_librarys():
    for code, nbytes in DTYPE_BYTES.items():
        header = build_header([("a", code, (3,))])
        [(name, loaded)] = safetensors.deserialize(whole_file(header))
        assert (name, loaded["dtype"], len(loaded["data"])) == ("a", code, 3 * nbytes)
    # The library names all that it knows when it meets one that it does not.
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(raw_file({"a": entry("?")}, b"0"))
    known = set(str(caught.value).split("expected one of ")[1].split(" at line")[0].split("`"))
    assert known - {"", ", "} == {*DTYPE_BYTES, "F4", "F6_E2M3", "F6_E3M2"}


def test_files_the_library_writes_parse_and_rebuild_to_the_same_bytes():
    tensors = {
        "b.weight": torch.randn(3, 4, dtype=torch.bfloat16),
        "a": torch.zeros(()),
        "n": torch.empty(0, 7),
        "schicht-\u00e9\u4e2d": torch.arange(5),
    }
    file = safetensors.torch.save(tensors, {"step": "12"})
    header = parse_header(file, len(file))
    assert header.metadata == {"step": "12"}
    assert header.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = header.entries[name]
        assert found.shape == tuple(tensor.shape)
        data = file[header.data_start + found.start : header.data_start + found.stop]
        assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    rebuilt = build_header(
        [(one.name, one.dtype, one.shape) for one in header.entries.values()],
        header.metadata,
        header_bytes=header.data_start,
    )
    assert rebuilt == header


@settings(max_examples=60, deadline=None)
@given(tensors=tensor_lists, metadata=metadatas)
def test_any_layout_is_read_alike_by_us_and_by_the_library(tensors, metadata):
    header = build_header(tensors, metadata)
    file = whole_file(header)
    assert len(file) == header.file_bytes
    assert parse_header(file, len(file)) == header
    loaded = {
        name: (t["dtype"], tuple(t["shape"]), t["data"])
        for name, t in safetensors.deserialize(file)
    }
    assert loaded == {
        one.name: (
            one.dtype,
            one.shape,
            file[header.data_start + one.start : header.data_start + one.stop],
        )
        for one in header.entries.values()
    }


# Reading


def test_tensors_come_in_offset_order_whatever_order_the_json_has():
    tree = {"c": entry(offsets=[1, 2]), "empty": entry(shape=[0], offsets=[1, 1]), "a": entry()}
    file = raw_file(tree, b"00")
    assert list(parse_header(file, len(file)).entries) == ["a", "empty", "c"]


def test_the_header_is_read_and_nothing_more():
    header = build_header([("a", "F32", (1000,))], {"k": "v"})
    reads = []
    found = read_header(reader(whole_file(header), reads), header.file_bytes, "p")
    assert found == header
    assert reads == [(0, 8), (8, header.data_start - 8)]
    reads.clear()
    with pytest.raises(HeaderTooLargeError):  # an absurd length, before it is read
        read_header(reader(struct.pack("<Q", 2**40) + b"{}", reads), 2**50, "p")
    assert reads == [(0, 8)]
    for file, file_bytes in ((b"", 0), (bytes(7), 7), (header.encoded[:2000], header.file_bytes)):
        with pytest.raises(TensorFileError, match=rf"^p: .*({TRUNCATED})"):
            read_header(reader(file), file_bytes, "p")


# Headers that no good file has: each is refused by name, and by the library too

GOOD = {"a": entry("F32", [2], [0, 8]), "b": entry("U8", [3], [8, 11])}

# (file, our error, whether the library refuses it too)
HOSTILE = {
    "empty-file": (b"", TRUNCATED, True),
    "seven-bytes": (b"\x02\0\0\0\0\0\0", TRUNCATED, True),
    "header-of-2**63": (struct.pack("<Q", 2**63) + b"{}", TOO_LARGE, True),
    "header-over-limit": (struct.pack("<Q", 100_000_001) + b"{}", TOO_LARGE, True),
    "header-past-end": (struct.pack("<Q", 3) + b"{}", TRUNCATED, True),
    "no-header": (struct.pack("<Q", 0), ENCODING, True),
    "not-json": (raw_file(b"{nope"), ENCODING, True),
    "not-an-object": (raw_file(b"[]"), ENCODING, True),
    "leading-space": (raw_file(b" {}"), ENCODING, False),
    "byte-order-mark": (raw_file(b"\xef\xbb\xbf{}"), ENCODING, True),
    "not-utf8": (raw_file(b'{"__metadata__":{"a":"\xff"}}'), ENCODING, True),
    "nul-padding": (raw_file(b"{}\0\0"), ENCODING, True),
    "two-objects": (raw_file(b"{}{}"), ENCODING, True),
    "nan": (raw_file(b'{"a":NaN}'), ENCODING, True),
    "surrogate-name": (raw_file({"\ud800": entry()}, b"0"), ENCODING, True),
    "surrogate-metadata": (raw_file({"__metadata__": {"a": "\ud800"}}), ENCODING, True),
    "thousand-digits": (
        raw_file(b'{"a":{"dtype":"U8","shape":[' + b"1" * 1000 + b'],"data_offsets":[0,1]}}', b"0"),
        ENCODING,
        True,
    ),
    "ten-thousand-digits": (raw_file(b'{"a":' + b"1" * 10_000 + b"}"), ENCODING, True),
    "deep-nesting": (raw_file(b'{"a":' + b"[" * 200_000), STRUCTURE, True),
    "duplicate-name": (
        raw_file(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"0"),
        TWICE,
        False,
    ),
    "duplicate-name-by-escape": (
        raw_file(b'{"a":%s,"\\u0061":%s}' % ((json.dumps(entry()).encode(),) * 2), b"0"),
        TWICE,
        False,
    ),
    "duplicate-metadata": (
        raw_file(b'{"__metadata__":{"a":"b","a":"c"}}'),
        TWICE,
        False,
    ),
    "duplicate-field": (
        raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"0"),
        TWICE,
        True,
    ),
    "tensor-is-a-list": (raw_file({"a": ["U8", [1], [0, 1]]}, b"0"), STRUCTURE, False),
    "unknown-field": (raw_file({"a": {**entry(), "x": 1}}, b"0"), STRUCTURE, False),
    "missing-field": (
        raw_file({"a": {"dtype": "U8", "shape": [1]}}, b"0"),
        STRUCTURE,
        True,
    ),
    "unknown-dtype": (raw_file({"a": entry("F31")}, b"0"), DTYPE, True),
    "sub-byte-dtype": (raw_file({"a": entry("F4", [2])}, b"0"), DTYPE, False),
    "negative-size": (raw_file({"a": entry(shape=[-1])}, b"0"), SHAPE, True),
    "negative-zero": (
        raw_file(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        SHAPE,
        True,
    ),
    "bool-size": (raw_file({"a": entry(shape=[True])}, b"0"), SHAPE, True),
    "overflowing-product": (raw_file({"a": entry(shape=[2**40, 2**40])}, b"0"), SHAPE, True),
    "product-wraps-to-fit": (
        raw_file({"a": entry(shape=[2**32 + 1, 2**32 - 1, 1])}, b"0"),
        SHAPE,
        True,
    ),
    "overflow-beside-zero": (
        raw_file({"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}),
        SHAPE,
        False,
    ),
    "too-many-dimensions": (raw_file({"a": entry(shape=[1] * 65)}, b"0"), SHAPE, False),
    "shape-and-offsets-differ": (raw_file({"a": entry(shape=[2])}, b"0"), SHAPE, True),
    "offsets-reversed": (raw_file({"a": entry(offsets=[1, 0])}, b"0"), OFFSETS, True),
    "offsets-negative": (raw_file({"a": entry(offsets=[-1, 0])}, b"0"), OFFSETS, True),
    "offsets-bool": (raw_file({"a": entry(offsets=[False, True])}, b"0"), OFFSETS, True),
    "hole-at-start": (raw_file({"a": entry(offsets=[1, 2])}, b"00"), OFFSETS, True),
    "hole": (raw_file({"a": entry(), "b": entry(offsets=[2, 3])}, b"000"), OFFSETS, True),
    "overlap": (
        raw_file({"a": entry(shape=[2], offsets=[0, 2]), "b": entry(offsets=[1, 2])}, b"00"),
        OFFSETS,
        True,
    ),
    "empty-inside-another": (
        raw_file(
            {"a": entry(shape=[2], offsets=[0, 2]), "b": entry(shape=[0], offsets=[1, 1])}, b"00"
        ),
        OFFSETS,
        True,
    ),
    "trailing-slack": (raw_file(GOOD, b"0" * 12), SIZE, True),
    "cut-short": (raw_file(GOOD, b"0" * 10), SIZE, True),
    "metadata-null": (raw_file({"__metadata__": None}), METADATA, False),
    "metadata-nested": (raw_file({"__metadata__": {"a": {}}}), METADATA, True),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_by_name(case):
    file, error, library_refuses = HOSTILE[case]
    with pytest.raises(TensorFileError) as caught:
        parse_header(file, len(file), "run/model.safetensors")
    assert isinstance(caught.value, OffloadError)
    assert re.search(error, str(caught.value))
    assert str(caught.value).startswith("run/model.safetensors: ")
    assert len(str(caught.value)) < 1000
    if library_refuses:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(file)
    else:
        safetensors.deserialize(file)
