"""Headers of safetensors files. The oracle is the safetensors library itself."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.format.header import (
    DTYPE_BYTES,
    DtypeError,
    DuplicateNameError,
    Header,
    HeaderEncodingError,
    HeaderTooLargeError,
    HeaderTruncatedError,
    MetadataError,
    ReservedNameError,
    ShapeError,
    TensorEntry,
    build_header,
    parse_header,
    read_header,
)

# safetensors.numpy has no bfloat16 and no float8.
NUMPY_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


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


REFUSED = {
    "reserved": ([("__metadata__", "U8", (1,))], None, ReservedNameError),
    "duplicate": ([("a", "U8", ())] * 2, None, DuplicateNameError),
    "sub-byte-dtype": ([("a", "F4", (2,))], None, DtypeError),
    "unknown-dtype": ([("a", "float32", (2,))], None, DtypeError),
    "negative": ([("a", "U8", (-1,))], None, ShapeError),
    "bool-size": ([("a", "U8", (True,))], None, ShapeError),
    "overflow": ([("a", "U8", (2**40, 2**40))], None, ShapeError),
    "surrogate": ([("a\ud800", "U8", (1,))], None, HeaderEncodingError),
    "metadata-int": ([], {"a": 1}, MetadataError),
    "metadata-int-key": ([], {1: "a"}, MetadataError),
    "metadata-surrogate": ([], {"a": "\udfff"}, HeaderEncodingError),
}


@pytest.mark.parametrize(("tensors", "metadata", "error"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_file_is_refused(tensors, metadata, error):
    with pytest.raises(error):
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


def test_numpy_loads_the_values_we_lay_out():
    draw = np.random.default_rng(7)
    for code, dtype in NUMPY_DTYPES.items():
        wanted = {
            "matrix": draw.integers(0, 2, (3, 5)).astype(dtype),
            "empty": np.zeros((0, 4), dtype),
            "scalar": np.array(1, dtype),
        }
        header = build_header([(name, code, a.shape) for name, a in wanted.items()], {"a": "b"})
        data = b"".join(array.tobytes() for array in wanted.values())
        loaded = safetensors.numpy.load(header.encoded + data)
        assert loaded.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(loaded[name], array, strict=True)


@pytest.mark.parametrize("code", TORCH_DTYPES)
def test_torch_loads_the_values_and_metadata_we_lay_out(code, tmp_path):
    dtype = TORCH_DTYPES[code]
    wanted = torch.arange(6).to(dtype).reshape(2, 3)
    header = build_header([("w", code, (2, 3)), ("e", code, (0,))], {"format": "pt", "x": "y"})
    path = tmp_path / "a.safetensors"
    path.write_bytes(header.encoded + wanted.view(torch.uint8).numpy().tobytes())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "x": "y"}
        assert set(file.keys()) == {"w", "e"}
        loaded = file.get_tensor("w")
        assert loaded.dtype is dtype
        assert torch.equal(loaded.view(torch.uint8), wanted.view(torch.uint8))
        assert file.get_tensor("e").shape == (0,)


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
        with pytest.raises(HeaderTruncatedError, match=r"^p: "):
            read_header(reader(file), file_bytes, "p")


def test_importing_it_imports_neither_torch_nor_numpy():
    code = (
        "import sys, offload.format.header, offload.format.train_state as t\n"
        "state = {'a': (1, {2: b'x'})}\n"
        "t.unpack(t.pack(state, capacity_bytes=4096, header={}))\n"
        "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
