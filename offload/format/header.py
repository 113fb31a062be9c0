"""Headers of safetensors files: built byte-exact, parsed without trust.

Only the first 8 + N bytes are handled, never data. Data begins at a multiple of `gds.ALIGNMENT`,
which direct I/O needs. `parse_header` accepts a subset of what the safetensors library accepts: it
also refuses repeated keys, unknown fields, leading white space, a null ``__metadata__``, and dtypes
smaller than a byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gds import ALIGNMENT
from offload.errors import OffloadError
from offload.format.strict_json import is_text, parse_json, short

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E5M2": 1,
        "F8_E4M3": 1,
        "F8_E8M0": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "C64": 8,
        "F64": 8,
        "I64": 8,
        "U64": 8,
    }
)
"""Bytes per element of every safetensors dtype that has whole bytes (not F4, F6_E2M3, F6_E3M2)."""

MAX_HEADER_BYTES = 100_000_000
"""The format's limit for N, the length of the JSON with its padding."""

METADATA_KEY = "__metadata__"
"""The only key of a header that is not a tensor's name."""

_PREFIX_BYTES = 8
_MAX_SHAPE_DIMS = 64
"""Largest number of dimensions that numpy and torch support."""
_MAX_COUNT = 2**63 - 1
"""Largest number of elements or bytes. Larger numbers fit no file offset and no torch stride."""
_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


class TensorFileError(OffloadError, ValueError):
    """A safetensors file is damaged, or the given content cannot be stored as one."""


class HeaderTooLargeError(TensorFileError):
    """The header is longer than the format's limit, or than the space reserved for it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Entry of one tensor in its file's header."""

    name: str
    dtype: str
    """A key of `DTYPE_BYTES`."""

    shape: tuple[int, ...]
    """Elements per dimension; empty for a 0-d tensor."""

    start: int
    """First byte of the tensor, in bytes from the start of the data."""

    stop: int
    """End of the tensor (exclusive), in bytes from the start of the data."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A complete, valid header. `parse_header` of `encoded` gives an equal one."""

    encoded: bytes
    """The first `data_start` bytes of the file: length, JSON, padding."""

    data_start: int
    """Start of the data, in bytes from the start of the file."""

    entries: Mapping[str, TensorEntry]
    """Tensors by name, in the order of their offsets; a read-only mapping."""

    metadata: Mapping[str, str]
    """The ``__metadata__`` map, empty if there is none; a read-only mapping."""

    file_bytes: int
    """Size of the whole file in bytes."""


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    *,
    header_bytes: int | None = None,
) -> Header:
    """Lay tensors end to end in the given order, and return the header that describes them.

    Equal arguments give equal bytes. The order of `metadata` does not matter, because it is sorted.

    Args:
        tensors: Name, dtype (a key of `DTYPE_BYTES`) and shape of each tensor. Any name is legal
            except ``__metadata__`` and names with lone surrogates, which are not UTF-8.
        metadata: Map of strings to strings, stored under ``__metadata__``. None or an empty map
            stores nothing.
        header_bytes: Size of length prefix, JSON and padding together, in bytes. The default is the
            smallest sufficient multiple of `ALIGNMENT`.

    Raises:
        HeaderTooLargeError: `header_bytes` or the format's limit is too small. The message says by
            how much.
        TensorFileError: The arguments cannot be a safetensors file.
    """
    where = "cannot build a safetensors header"
    tree: dict[str, object] = {}
    extra = _checked_metadata(dict(metadata or {}), where)
    if extra:
        tree[METADATA_KEY] = dict(sorted(extra.items()))
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, dtype, shape in tensors:
        if name == METADATA_KEY:
            raise TensorFileError(
                f"{where}: a tensor is called {METADATA_KEY!r}, which the format reserves; "
                "rename the parameter or buffer"
            )
        if name in entries:
            raise TensorFileError(f"{where}: two tensors are called {short(name)}")
        _check_text(name, where)
        stop = offset + _shape_bytes(dtype, list(shape), f"{where}: tensor {short(name)}")
        entries[name] = TensorEntry(name, dtype, tuple(shape), offset, stop)
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    needed = _PREFIX_BYTES + len(text)
    total = -(-needed // ALIGNMENT) * ALIGNMENT if header_bytes is None else header_bytes
    if needed > total:
        raise HeaderTooLargeError(
            f"{where}: {len(entries)} tensors and {len(extra)} metadata entries need {needed} "
            f"bytes, available are {total}"
        )
    if total - _PREFIX_BYTES > MAX_HEADER_BYTES:
        raise HeaderTooLargeError(
            f"{where}: it would take {total} bytes, the format allows "
            f"{MAX_HEADER_BYTES + _PREFIX_BYTES}"
        )
    encoded = struct.pack("<Q", total - _PREFIX_BYTES) + text.ljust(total - _PREFIX_BYTES)
    return Header(encoded, total, MappingProxyType(entries), extra, total + offset)


def header_length(prefix: bytes, file_bytes: int, path: str = "<bytes>") -> int:
    """Return the size of the header in bytes, length prefix included, which is the data's offset.

    Args:
        prefix: The first 8 bytes of the file, or more.
        file_bytes: Size of the whole file in bytes; it bounds the header.
        path: Path of the file, for messages.

    Raises:
        HeaderTooLargeError: The claimed length is more than the format allows.
        TensorFileError: The file is shorter than the claimed header, or than 8 bytes.
    """
    if file_bytes < _PREFIX_BYTES or len(prefix) < _PREFIX_BYTES:
        raise TensorFileError(
            f"{path}: not a safetensors file: {min(file_bytes, len(prefix))} bytes, expected at "
            f"least the {_PREFIX_BYTES} bytes of the header's length"
        )
    length = int.from_bytes(prefix[:_PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderTooLargeError(
            f"{path}: the first 8 bytes claim a header of {length} bytes, the format allows "
            f"{MAX_HEADER_BYTES}; not a safetensors file, or damaged"
        )
    if length > file_bytes - _PREFIX_BYTES:
        raise TensorFileError(
            f"{path}: claims a header of {length} bytes, but only {file_bytes - _PREFIX_BYTES} "
            "bytes follow its length; the file was cut short"
        )
    return _PREFIX_BYTES + length


def parse_header(prefix: bytes, file_bytes: int, path: str = "<bytes>") -> Header:
    """Validate a header and return its content.

    Time and memory are bounded by the header's own length, which is bounded by the file's.

    Args:
        prefix: Start of the file: at least the whole header. Bytes after the header are ignored.
        file_bytes: Size of the whole file in bytes.
        path: Path of the file, for messages.

    Raises:
        TensorFileError: The header is bad. The message names path and tensor, what was found and
            what was expected.
    """
    data_start = header_length(prefix, file_bytes, path)
    if len(prefix) < data_start:
        raise TensorFileError(
            f"{path}: the header takes {data_start} bytes, got the first {len(prefix)}"
        )
    encoded = bytes(prefix[:data_start])
    tree = _parse_json(encoded[_PREFIX_BYTES:], path)
    metadata = _checked_metadata(tree.pop(METADATA_KEY, {}), path)
    entries = [_parse_entry(name, fields, path) for name, fields in tree.items()]
    # An empty tensor shares its offset with the next tensor, and sorts before it.
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.start != end:
            kind = "a hole" if entry.start > end else "an overlap"
            raise TensorFileError(
                f"{path}: tensor {short(entry.name)}: {kind} before it: its data starts at byte "
                f"{entry.start}, expected {end}"
            )
        end = entry.stop
    if data_start + end != file_bytes:
        raise TensorFileError(
            f"{path}: header and data take {data_start + end} bytes, the file has {file_bytes}"
        )
    by_name = MappingProxyType({entry.name: entry for entry in entries})
    return Header(encoded, data_start, by_name, metadata, file_bytes)


def read_header(read: Callable[[int, int], bytes], file_bytes: int, path: str) -> Header:
    """Read and validate the header of a file, in two reads and without any byte of data.

    Args:
        read: Function that returns the bytes at (offset, length), both in bytes.
        file_bytes: Size of the whole file in bytes.
        path: Path of the file, for messages.

    Raises:
        TensorFileError: The header is bad; see `parse_header`.
    """
    prefix = bytes(read(0, min(_PREFIX_BYTES, file_bytes)))
    rest = header_length(prefix, file_bytes, path) - _PREFIX_BYTES
    return parse_header(prefix + bytes(read(_PREFIX_BYTES, rest)), file_bytes, path)


def _parse_json(text: bytes, path: str) -> dict[str, object]:
    if text[:1] != b"{":
        raise TensorFileError(
            f"{path}: the header begins with {text[:1]!r}, expected b'{{'; not a safetensors file"
        )
    try:
        tree: dict[str, object] = parse_json(text, max_values=None)
    except ValueError as error:
        raise TensorFileError(f"{path}: the header is no JSON of a header: {error}") from error
    return tree


def _parse_entry(name: str, fields: object, path: str) -> TensorEntry:
    _check_text(name, path)
    at = f"{path}: tensor {short(name)}"
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_FIELDS:
        got = sorted(fields) if isinstance(fields, dict) else f"a {type(fields).__name__}"
        raise TensorFileError(
            f"{at}: got {short(got)}, expected a map of exactly {sorted(_ENTRY_FIELDS)}"
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    nbytes = _shape_bytes(dtype, shape, at)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1] <= _MAX_COUNT
    ):
        raise TensorFileError(
            f"{at}: data_offsets are {short(offsets)}, expected two integers 0 <= start <= stop"
        )
    start, stop = offsets
    if stop - start != nbytes:
        raise TensorFileError(
            f"{at}: {dtype} of shape {shape} takes {nbytes} bytes, its "
            f"data_offsets [{start}, {stop}] span {stop - start}"
        )
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def _shape_bytes(dtype: object, shape: object, at: str) -> int:
    """Return the bytes that a tensor takes, after checking dtype and shape."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise TensorFileError(
            f"{at}: dtype is {short(dtype)}, expected one of {', '.join(DTYPE_BYTES)}"
        )
    # isinstance takes a bool for an int, but JSON's true is not a size.
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise TensorFileError(
            f"{at}: shape is {short(shape)}, expected a list of non-negative integers"
        )
    if len(shape) > _MAX_SHAPE_DIMS:
        raise TensorFileError(
            f"{at}: {len(shape)} dimensions, at most {_MAX_SHAPE_DIMS} are supported"
        )
    extent = DTYPE_BYTES[dtype]
    for size in shape:
        # The product is checked after each factor and zeros are ignored, because the strides of
        # [2**62, 2**62, 0] would overflow.
        extent *= max(size, 1)
        if extent > _MAX_COUNT:
            raise TensorFileError(f"{at}: {dtype} of shape {short(shape)} overflows 63 bits")
    return 0 if 0 in shape else extent


def _checked_metadata(metadata: object, where: str) -> Mapping[str, str]:
    if not isinstance(metadata, dict):
        raise TensorFileError(
            f"{where}: {METADATA_KEY} is a {type(metadata).__name__}, expected a map of strings"
        )
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TensorFileError(
                f"{where}: {METADATA_KEY} maps {short(key)} to {short(value)}, expected a "
                "string for a string"
            )
        _check_text(key, where)
        _check_text(value, where)
    return MappingProxyType(metadata)


def _check_text(text: str, where: str) -> None:
    if not is_text(text):
        raise TensorFileError(
            f"{where}: {short(text)} has a lone surrogate, which UTF-8 cannot express"
        )
