"""Headers that no good file has: each is refused by name, and by the library too."""

from __future__ import annotations

import json
import struct

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from offload.errors import OffloadError
from offload.format.header import (
    DtypeError,
    DuplicateNameError,
    FileSizeError,
    HeaderEncodingError,
    HeaderStructureError,
    HeaderTooLargeError,
    HeaderTruncatedError,
    MetadataError,
    OffsetError,
    ShapeError,
    TensorFileError,
    parse_header,
)


def raw_file(tree: object, data: bytes = b"") -> bytes:
    """Return a file with any header at all: text, or what json makes of it."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = {"a": entry("F32", [2], [0, 8]), "b": entry("U8", [3], [8, 11])}

# (file, our error, whether the library refuses it too)
HOSTILE = {
    "empty-file": (b"", HeaderTruncatedError, True),
    "seven-bytes": (b"\x02\0\0\0\0\0\0", HeaderTruncatedError, True),
    "header-of-2**63": (struct.pack("<Q", 2**63) + b"{}", HeaderTooLargeError, True),
    "header-over-limit": (struct.pack("<Q", 100_000_001) + b"{}", HeaderTooLargeError, True),
    "header-past-end": (struct.pack("<Q", 3) + b"{}", HeaderTruncatedError, True),
    "no-header": (struct.pack("<Q", 0), HeaderEncodingError, True),
    "not-json": (raw_file(b"{nope"), HeaderEncodingError, True),
    "not-an-object": (raw_file(b"[]"), HeaderEncodingError, True),
    "leading-space": (raw_file(b" {}"), HeaderEncodingError, False),
    "byte-order-mark": (raw_file(b"\xef\xbb\xbf{}"), HeaderEncodingError, True),
    "not-utf8": (raw_file(b'{"__metadata__":{"a":"\xff"}}'), HeaderEncodingError, True),
    "nul-padding": (raw_file(b"{}\0\0"), HeaderEncodingError, True),
    "two-objects": (raw_file(b"{}{}"), HeaderEncodingError, True),
    "nan": (raw_file(b'{"a":NaN}'), HeaderEncodingError, True),
    "infinity": (raw_file(b'{"a":-Infinity}'), HeaderEncodingError, True),
    "surrogate-name": (raw_file({"\ud800": entry()}, b"0"), HeaderEncodingError, True),
    "surrogate-metadata": (raw_file({"__metadata__": {"a": "\ud800"}}), HeaderEncodingError, True),
    "thousand-digits": (
        raw_file(b'{"a":{"dtype":"U8","shape":[' + b"1" * 1000 + b'],"data_offsets":[0,1]}}', b"0"),
        HeaderEncodingError,
        True,
    ),
    "ten-thousand-digits": (raw_file(b'{"a":' + b"1" * 10_000 + b"}"), HeaderEncodingError, True),
    "deep-nesting": (raw_file(b'{"a":' + b"[" * 200_000), HeaderStructureError, True),
    "some-nesting": (raw_file(b'{"a":' + b"[" * 90 + b"]" * 90 + b"}"), HeaderStructureError, True),
    "duplicate-name": (
        raw_file(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"0"),
        DuplicateNameError,
        False,
    ),
    "duplicate-name-by-escape": (
        raw_file(b'{"a":%s,"\\u0061":%s}' % ((json.dumps(entry()).encode(),) * 2), b"0"),
        DuplicateNameError,
        False,
    ),
    "duplicate-metadata": (
        raw_file(b'{"__metadata__":{"a":"b","a":"c"}}'),
        DuplicateNameError,
        False,
    ),
    "duplicate-field": (
        raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"0"),
        DuplicateNameError,
        True,
    ),
    "tensor-is-a-number": (raw_file({"a": 1}), HeaderStructureError, True),
    "tensor-is-a-list": (raw_file({"a": ["U8", [1], [0, 1]]}, b"0"), HeaderStructureError, False),
    "unknown-field": (raw_file({"a": {**entry(), "x": 1}}, b"0"), HeaderStructureError, False),
    "missing-field": (
        raw_file({"a": {"dtype": "U8", "shape": [1]}}, b"0"),
        HeaderStructureError,
        True,
    ),
    "unknown-dtype": (raw_file({"a": entry("F31")}, b"0"), DtypeError, True),
    "dtype-is-a-list": (raw_file({"a": entry(["U8"])}, b"0"), DtypeError, True),
    "sub-byte-dtype": (raw_file({"a": entry("F4", [2])}, b"0"), DtypeError, False),
    "shape-is-a-number": (raw_file({"a": entry(shape=1)}, b"0"), ShapeError, True),
    "negative-size": (raw_file({"a": entry(shape=[-1])}, b"0"), ShapeError, True),
    "negative-zero": (
        raw_file(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        ShapeError,
        True,
    ),
    "bool-size": (raw_file({"a": entry(shape=[True])}, b"0"), ShapeError, True),
    "float-size": (raw_file({"a": entry(shape=[1.0])}, b"0"), ShapeError, True),
    "text-size": (raw_file({"a": entry(shape=["1"])}, b"0"), ShapeError, True),
    "overflowing-product": (raw_file({"a": entry(shape=[2**40, 2**40])}, b"0"), ShapeError, True),
    "product-wraps-to-fit": (
        raw_file({"a": entry(shape=[2**32 + 1, 2**32 - 1, 1])}, b"0"),
        ShapeError,
        True,
    ),
    "overflow-beside-zero": (
        raw_file({"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}),
        ShapeError,
        False,
    ),
    "too-many-dimensions": (raw_file({"a": entry(shape=[1] * 65)}, b"0"), ShapeError, False),
    "shape-and-offsets-differ": (raw_file({"a": entry(shape=[2])}, b"0"), ShapeError, True),
    "offsets-reversed": (raw_file({"a": entry(offsets=[1, 0])}, b"0"), OffsetError, True),
    "offsets-negative": (raw_file({"a": entry(offsets=[-1, 0])}, b"0"), OffsetError, True),
    "offsets-of-three": (raw_file({"a": entry(offsets=[0, 1, 1])}, b"0"), OffsetError, True),
    "offsets-bool": (raw_file({"a": entry(offsets=[False, True])}, b"0"), OffsetError, True),
    "hole-at-start": (raw_file({"a": entry(offsets=[1, 2])}, b"00"), OffsetError, True),
    "hole": (raw_file({"a": entry(), "b": entry(offsets=[2, 3])}, b"000"), OffsetError, True),
    "overlap": (
        raw_file({"a": entry(shape=[2], offsets=[0, 2]), "b": entry(offsets=[1, 2])}, b"00"),
        OffsetError,
        True,
    ),
    "same-range-twice": (raw_file({"a": entry(), "b": entry()}, b"0"), OffsetError, True),
    "empty-inside-another": (
        raw_file(
            {"a": entry(shape=[2], offsets=[0, 2]), "b": entry(shape=[0], offsets=[1, 1])}, b"00"
        ),
        OffsetError,
        True,
    ),
    "trailing-slack": (raw_file(GOOD, b"0" * 12), FileSizeError, True),
    "cut-short": (raw_file(GOOD, b"0" * 10), FileSizeError, True),
    "metadata-null": (raw_file({"__metadata__": None}), MetadataError, False),
    "metadata-list": (raw_file({"__metadata__": []}), MetadataError, True),
    "metadata-number": (raw_file({"__metadata__": {"a": 1}}), MetadataError, True),
    "metadata-nested": (raw_file({"__metadata__": {"a": {}}}), MetadataError, True),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_by_name(case):
    file, error, library_refuses = HOSTILE[case]
    with pytest.raises(TensorFileError) as caught:
        parse_header(file, len(file), "run/model.safetensors")
    assert type(caught.value) is error
    assert issubclass(error, OffloadError)
    assert str(caught.value).startswith("run/model.safetensors: ")
    assert len(str(caught.value)) < 1000
    if library_refuses:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(file)
    else:
        safetensors.deserialize(file)


def test_one_flipped_bit_is_refused_by_name_or_harmless_to_the_library_too():
    file = raw_file({"__metadata__": {"k": "v"}, **GOOD}, b"0" * 11)
    assert [one.stop for one in parse_header(file, len(file)).entries.values()] == [8, 11]
    num_refused = num_accepted = 0
    for position in range(len(file) - 11):
        for bit in range(8):
            bad = bytearray(file)
            bad[position] ^= 1 << bit
            try:
                parse_header(bytes(bad), len(bad))
            except TensorFileError:
                num_refused += 1
            else:
                # A name, or a word of the metadata, became another legal one.
                safetensors.deserialize(bytes(bad))
                num_accepted += 1
    assert num_accepted > 0
    assert num_refused > 0.9 * 8 * (len(file) - 11)
