"""Storage of the caller's small training state in one safetensors file: lossless, no pickle.

Schedulers, random number generators, samplers and counters are plain Python values that JSON would
damage: it turns tuples into lists and integer keys into strings, and has no infinity. This module
stores them as JSON, with tags for what JSON lacks. The bytes of tensors and arrays are stored
beside the JSON.

Restored values are equal to the stored ones and have the same types. Dicts keep their order; sets
have none. These types are supported: None, bool, int, float, complex, str, bytes, bytearray, list,
tuple, dict, set, frozenset; `collections.Counter`, `OrderedDict`, `deque` and `defaultdict`
(factory None or a builtin type); numpy arrays and scalars of booleans, integers, floats and complex
numbers; `torch.Tensor` of every ordinary dtype, `torch.Size`, `torch.dtype`, `torch.device`.
Everything else, subclasses of these included, is a `TrainStateTypeError` that names its path:
restoring it would mean importing code that a file names.

These are not kept: the identity of an object that occurs several times; sign and payload of a
Python float's NaN; a tensor's device, strides, ``requires_grad`` and Python attributes; an array's
memory order.

`pack_encoded` describes the file.
"""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gds import ALIGNMENT
from offload.errors import (
    TrainStateDigestError,
    TrainStateFormatError,
    TrainStateTooLargeError,
    TrainStateTypeError,
)
from offload.format._train_state_leaves import TAG_KEY
from offload.format._train_state_leaves import StoredTensor as StoredTensor
from offload.format._train_state_tags import MAX_DEPTH as MAX_DEPTH
from offload.format._train_state_tags import Encoder, decode_text, dump_json, parse_text
from offload.format.header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    HeaderTooLargeError,
    build_header,
    parse_header,
)
from offload.format.strict_json import short

STATE_KEY = "train_state"
"""Metadata key of the JSON text."""

DIGEST_KEY = "train_state_digest"
"""Metadata key of the digest, 32 hexadecimal digits."""

FORMAT_KEY = "train_state_format"
"""Metadata key of the version of this encoding."""

FORMAT_VERSION = "1"
"""Version of this encoding."""

MAX_CAPACITY_BYTES = MAX_HEADER_BYTES + 8
"""Largest size of the file in bytes. Unused space is padding of the header, whose size the format
limits."""

_RESERVED_KEYS = (STATE_KEY, DIGEST_KEY, FORMAT_KEY)
_CAPACITY_MULTIPLE_BYTES = 8


@dataclass(frozen=True)
class EncodedState:
    """A training state, captured by value. Two states are equal exactly if the encodings are.

    Equality distinguishes types (1 and True differ, as do 0.0 and -0.0) and the order of dicts. All
    NaNs of Python floats are equal. Properties that the module's docstring lists as not kept do not
    matter.
    """

    json: str
    """JSON text with tags; valid UTF-8."""

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors that the JSON refers to, by name."""

    @property
    def tensor_bytes(self) -> int:
        """Size in bytes of all tensors together."""
        return sum(len(tensor.data) for tensor in self.tensors.values())


def encode(state: object) -> EncodedState:
    """Capture `state` by value; later changes to it have no effect.

    Raises:
        TrainStateTypeError: The state holds a value that could not be restored unchanged, contains
            itself, or is nested deeper than `MAX_DEPTH`. The message names the path of the value.
    """
    encoder = Encoder()
    tree = encoder.encode(state)
    return EncodedState(dump_json(tree), encoder.tensors)


def require_state(state: object) -> None:
    """Refuse a single value that is meant as something else: a file's name, a step, a flag.

    Raises:
        TrainStateTypeError: The state is a str, bytes, bytearray, path, int, float or bool.
    """
    if not isinstance(state, str | bytes | bytearray | os.PathLike | int | float):
        return
    raise TrainStateTypeError(
        "train_state must be what training needs besides the optimizer to continue, such as "
        f'{{"epoch": 3}}, got {type(state).__name__} {reprlib.repr(state)}. The step number and '
        "the name of the checkpoint need not be given: the store sets both"
    )


def decode(encoded: EncodedState) -> object:
    """Return a new state with the encoded values.

    Raises:
        TrainStateTagError: A tag is not known to this version.
        TrainStateFormatError: The encoding is otherwise not one that `encode` returns.
    """
    return decode_text(encoded.json, encoded.tensors)


def pack(state: object, *, capacity_bytes: int, header: Mapping[str, str]) -> bytes:
    """Encode `state` as one safetensors file of exactly `capacity_bytes` bytes.

    This is `pack_encoded` of the result of `encode`, and raises the errors of both.
    """
    return pack_encoded(encode(state), capacity_bytes=capacity_bytes, header=header)


def pack_encoded(encoded: EncodedState, *, capacity_bytes: int, header: Mapping[str, str]) -> bytes:
    """Return a captured state as one safetensors file of exactly `capacity_bytes` bytes.

    The file's ``__metadata__`` holds `header`, the JSON under ``train_state``, the version under
    ``train_state_format`` and a digest under ``train_state_digest``. Tensors follow in ascending
    order of their elements' size. The header is padded with spaces, so that the last tensor ends at
    `capacity_bytes`. As that is a multiple of 8, each tensor is aligned to its elements.

    The digest is BLAKE2b of 16 bytes, as lower-case hexadecimal, over the fields below. Each field
    is preceded by its length in bytes as a little-endian 64-bit integer. Texts are in UTF-8 and
    counts are decimal digits. The fields are ``train_state_format``'s value; the JSON; the number
    of `header`'s items; key and value of each item, sorted by key; the number of tensors; and for
    each tensor in file order its name, its dtype, its shape (sizes joined by commas) and its data.

    Args:
        encoded: Result of `encode`.
        capacity_bytes: Size of the file in bytes; a multiple of 8, at most `MAX_CAPACITY_BYTES`.
        header: More metadata, for example the step that the state belongs to.

    Raises:
        TrainStateTooLargeError: The state does not fit. The message says what it needs and which
            option to raise.
        ValueError: `capacity_bytes` is out of range, or `header` has a reserved key.
    """
    if capacity_bytes % _CAPACITY_MULTIPLE_BYTES or not 0 < capacity_bytes <= MAX_CAPACITY_BYTES:
        raise ValueError(
            f"capacity_bytes is {capacity_bytes}, expected a multiple of "
            f"{_CAPACITY_MULTIPLE_BYTES} from {_CAPACITY_MULTIPLE_BYTES} to {MAX_CAPACITY_BYTES}"
        )
    reserved = [key for key in _RESERVED_KEYS if key in header]
    if reserved:
        raise ValueError(f"header has the reserved key {reserved[0]!r}; choose another")
    tensors = dict(sorted(encoded.tensors.items(), key=lambda item: DTYPE_BYTES[item[1].dtype]))
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    metadata = {
        **header,
        STATE_KEY: encoded.json,
        FORMAT_KEY: FORMAT_VERSION,
        DIGEST_KEY: _digest(encoded.json, header, tensors),
    }
    data_bytes = encoded.tensor_bytes
    try:
        built = build_header(specs, metadata, header_bytes=capacity_bytes - data_bytes)
    except HeaderTooLargeError as error:
        raise _too_large(encoded, specs, metadata, capacity_bytes) from error
    return b"".join([built.encoded, *(tensor.data for tensor in tensors.values())])


def packed_bytes(encoded: EncodedState, header: Mapping[str, str]) -> int:
    """Return the least `capacity_bytes` with which `pack_encoded` succeeds.

    Args:
        encoded: Result of `encode`.
        header: More metadata, as for `pack_encoded`.

    Raises:
        TrainStateTooLargeError: There is none: the state is too large for any file.
    """
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in encoded.tensors.items()]
    metadata = {**header, STATE_KEY: encoded.json, FORMAT_KEY: FORMAT_VERSION, DIGEST_KEY: "0" * 32}
    try:
        exact = build_header(specs, metadata).data_start + encoded.tensor_bytes
    except HeaderTooLargeError as error:
        raise _too_large(encoded, specs, metadata, MAX_CAPACITY_BYTES) from error
    multiple = _CAPACITY_MULTIPLE_BYTES
    return -(-exact // multiple) * multiple


def unpack(data: bytes, path: str = "<bytes>") -> tuple[object, dict[str, str]]:
    """Return the state and the header that `pack` was given.

    Args:
        data: Content of the whole file.
        path: Path of the file, for messages.

    Raises:
        TensorFileError: The data is not a safetensors file.
        TrainStateFormatError: The file was not written by `pack`, or by another version of it.
        TrainStateDigestError: The content is not what was written.
    """
    encoded, header = unpack_encoded(data, path)
    try:
        return decode(encoded), header
    except TrainStateFormatError as error:
        raise type(error)(f"{path}: {error}") from error


def unpack_encoded(data: bytes, path: str = "<bytes>") -> tuple[EncodedState, dict[str, str]]:
    """Verify a packed file and return its content, without building the values.

    Any change of any byte is an error, padding included. The errors are those of `unpack`.
    """
    parsed = parse_header(data, len(data), path)
    metadata = dict(parsed.metadata)
    missing = [key for key in _RESERVED_KEYS if key not in metadata]
    if missing:
        raise TrainStateFormatError(
            f"{path}: a safetensors file without {missing[0]!r} in its metadata; not a train_state"
        )
    if metadata[FORMAT_KEY] != FORMAT_VERSION:
        raise TrainStateFormatError(
            f"{path}: {FORMAT_KEY} is {metadata[FORMAT_KEY][:80]!r}, this version of the package "
            f"reads {FORMAT_VERSION!r}"
        )
    if len(data) % _CAPACITY_MULTIPLE_BYTES:
        raise TrainStateFormatError(f"{path}: {len(data)} bytes; not a train_state")
    entries = parsed.entries.values()
    # The digest covers the meaning of the header; this covers its spelling and its padding.
    specs = [(entry.name, entry.dtype, entry.shape) for entry in entries]
    if build_header(specs, metadata, header_bytes=parsed.data_start).encoded != parsed.encoded:
        raise TrainStateFormatError(
            f"{path}: the header is valid, but its bytes are not as this package writes them; the "
            "file is damaged, or was rewritten"
        )
    start = parsed.data_start
    tensors = {
        entry.name: StoredTensor(
            entry.dtype, entry.shape, bytes(data[start + entry.start : start + entry.stop])
        )
        for entry in entries
    }
    text = metadata.pop(STATE_KEY)
    stored = metadata.pop(DIGEST_KEY)
    del metadata[FORMAT_KEY]
    computed = _digest(text, metadata, tensors)
    if computed != stored:
        raise TrainStateDigestError(
            f"{path}: the content has the digest {computed}, its metadata says {stored[:80]}; the "
            "file is damaged: use another checkpoint"
        )
    return EncodedState(text, tensors), metadata


def _too_large(
    encoded: EncodedState,
    specs: Sequence[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    capacity_bytes: int,
) -> TrainStateTooLargeError:
    size = (
        f"train_state: {len(encoded.json)} characters of JSON and {encoded.tensor_bytes} bytes of "
        "tensors"
    )
    try:
        exact = build_header(specs, metadata).data_start + encoded.tensor_bytes
    except HeaderTooLargeError:
        exact = MAX_CAPACITY_BYTES + 1
    if exact > MAX_CAPACITY_BYTES:
        return TrainStateTooLargeError(
            f"{size} do not fit {capacity_bytes} bytes, nor any number that can be reserved (at "
            f"most {MAX_CAPACITY_BYTES}); keep large tensors in the model, as buffers"
        )
    # The option takes whole blocks, at least two.
    needed = max(-(-exact // ALIGNMENT), 2) * ALIGNMENT
    return TrainStateTooLargeError(
        f"{size} need {needed} bytes of file, the checkpoints reserve {capacity_bytes}; store "
        f"less, or raise Options(train_state_bytes={needed})"
    )


def _digest(json: str, header: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)

    def add(value: str | bytes) -> None:
        """Add one field, preceded by its length."""
        data = value.encode() if isinstance(value, str) else value
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    add(FORMAT_VERSION)
    add(json)
    add(str(len(header)))
    for key in sorted(header):
        add(key)
        add(header[key])
    add(str(len(tensors)))
    for name, tensor in tensors.items():
        add(name)
        add(tensor.dtype)
        add(",".join(str(size) for size in tensor.shape))
        add(tensor.data)
    return digest.hexdigest()


MAX_RANKS = 4096
"""Largest number of ranks whose train states one file may have."""

_TAG = "ranks"
_OPENING = dump_json({TAG_KEY: _TAG, "items": []})[:-2]


def join_ranks(states: Sequence[EncodedState]) -> EncodedState:
    """Return one encoded state that holds the states of all ranks.

    Its JSON is the tag ``ranks`` with one item per rank. The tensors of rank r are stored as
    ``rank.<r>.<name>``, where the rank's own item calls them ``<name>``.

    Args:
        states: State of each rank, in the order of the ranks; at least one, at most `MAX_RANKS`.

    Raises:
        ValueError: The number of states is out of range.
    """
    if not 1 <= len(states) <= MAX_RANKS:
        raise ValueError(f"{len(states)} train states, expected 1 to {MAX_RANKS}, one per rank")
    tensors = {
        f"rank.{rank}.{name}": tensor
        for rank, state in enumerate(states)
        for name, tensor in state.tensors.items()
    }
    return EncodedState(f"{_OPENING}{','.join(state.json for state in states)}]}}", tensors)


def split_ranks(encoded: EncodedState) -> tuple[EncodedState, ...]:
    """Return the state of each rank; a state that `join_ranks` has not made is that of one rank.

    Raises:
        TrainStateFormatError: `join_ranks` does not return such a state.
    """
    if not encoded.json.startswith(_OPENING):
        return (encoded,)
    tree = parse_text(encoded.json)
    items = tree["items"]
    if tree.keys() != {TAG_KEY, "items"} or not isinstance(items, list) or not items:
        raise TrainStateFormatError("train_state: not the states of several ranks")
    if len(items) > MAX_RANKS:
        raise TrainStateFormatError(
            f"train_state: {len(items)} ranks, expected {MAX_RANKS} at most"
        )
    tensors: list[dict[str, StoredTensor]] = [{} for _ in items]
    for stored_name, tensor in encoded.tensors.items():
        prefix, _, rest = stored_name.partition(".")
        number, _, name = rest.partition(".")
        rank = int(number) if number.isdecimal() and len(number) <= len(str(MAX_RANKS)) else -1
        if prefix != "rank" or not 0 <= rank < len(items) or str(rank) != number or not name:
            raise TrainStateFormatError(
                f"train_state: the stored tensor {short(stored_name)} belongs to no rank"
            )
        tensors[rank][name] = tensor
    return tuple(
        EncodedState(dump_json(item), own) for item, own in zip(items, tensors, strict=True)
    )
