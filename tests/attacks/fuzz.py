"""Fuzzing of what reads a store: ``python -m tests.attacks.fuzz --seconds 600``.

Each target has inputs (good ones with bytes changed, and with a value of their JSON changed) and a
check: what is refused is refused by name; what is taken means, written again, the same.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offload.errors import (
    CheckpointError,
    ManifestError,
    TrainStateFormatError,
)
from offload.format.header import TensorFileError, build_header, parse_header
from offload.format.manifest import decode as decode_manifest
from offload.format.part_file import decode_part
from offload.format.train_state import (
    EncodedState,
    StoredTensor,
    decode,
    encode,
    pack,
    unpack,
)
from tests.attacks import good

_PATH = "run/file"

# Names and numbers that have broken readers of other formats, beside Hypothesis's own.
_TEXTS = st.one_of(
    st.sampled_from(["", "a", "../../etc/passwd", "a\0b", "\ud800", "x" * 300, "__class__", "$"]),
    st.text(max_size=8),
)
_NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]),
    st.integers(-3, 2**12),
    st.floats(),
)
_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)


def _trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
        max_leaves=12,
    )


_ANYTHING = _trees(_LEAVES)


@st.composite
def _with_bytes_changed(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["set", "flip", "insert", "delete", "copy", "cut"]))
        if kind == "set":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "flip":
            data[at : at + 1] = bytes(b ^ (1 << draw(st.integers(0, 7))) for b in data[at : at + 1])
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "copy":
            start = draw(st.integers(0, max(len(data) - 1, 0)))
            data[at:at] = data[start : start + draw(st.integers(1, 64))]
        else:
            del data[at:]
    return bytes(data)


@st.composite
def _with_a_value_changed(draw: st.DrawFn, document: Any) -> Any:
    """Replace, remove or repeat something somewhere in a JSON value."""
    tree = json.loads(json.dumps(document))
    place: Any = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
            break
        place = inner
    kind = draw(st.sampled_from(["replace", "replace", "like", "remove", "repeat", "wrap"]))
    if kind == "replace":
        place[key] = draw(_ANYTHING)
    elif kind == "like":
        place[key] = draw(_like(inner))
    elif kind == "remove":
        del place[key]
    elif kind == "repeat" and isinstance(place, list):
        place.append(inner)
    else:
        place[key] = [inner]
    return tree


def _like(value: Any) -> st.SearchStrategy[Any]:
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, str):
        return _TEXTS
    if isinstance(value, int):
        return st.integers(0, 2**14)
    if isinstance(value, float):
        return st.floats()
    return _ANYTHING


# Headers of tensor files.

_HEADER = build_header(
    [("w", "BF16", (3, 4)), ("b", "F32", (0,)), ("s", "I64", ())], {"format": "pt"}
)
_HEADERS = [_HEADER.encoded.rstrip() + bytes(32), _HEADER.encoded + bytes(32)]


_HEADER_TREE = json.loads(_HEADER.encoded[8:])


def _with_header(tree: Any) -> bytes:
    text = json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + bytes(32)


def _check_header(data: bytes) -> bool:
    try:
        found = parse_header(data, len(data), _PATH)
    except TensorFileError as error:
        return _refused(error)
    tensors = [(one.name, one.dtype, one.shape) for one in found.entries.values()]
    again = build_header(tensors, found.metadata)
    assert dict(again.entries) == dict(found.entries)
    assert dict(again.metadata) == dict(found.metadata)
    assert parse_header(again.encoded, again.file_bytes).entries == again.entries
    return True


# Manifests and parts.

_MANIFESTS = [good.manifest(), good.manifest(good.two_drives())]


def _signed(body: Any) -> bytes:
    return good.as_json(good.signed(body))


def _check_manifest(data: bytes) -> bool:
    try:
        found = decode_manifest(data, _PATH)
    except ManifestError as error:
        return _refused(error)
    room = 8 * len(data) + 4096
    encoded = found.encode(room)
    before, after = json.loads(data)["body"], json.loads(encoded)["body"]
    # What is not there may be left out; what nobody knows is passed over.
    assert after == {"parts": [], **{key: before[key] for key in before.keys() & after.keys()}}
    assert decode_manifest(encoded, _PATH).encode(room) == encoded
    return True


def _check_part(data: bytes) -> bool:
    try:
        found = decode_part(data, _PATH)
    except CheckpointError as error:
        return _refused(error)
    assert decode_part(found.encode(), _PATH) == found
    return True


# Train states.

_STATE = {"epoch": 3, "mean": (1.5, float("inf")), 7: {b"x", None}, "big": 2**80}
_STATES = [
    pack(_STATE, capacity_bytes=1024, header={"step": "1"}),
    pack([1, 2.5, "a"], capacity_bytes=512, header={}),
]
_STORED = {"t": StoredTensor("F32", (2,), bytes(8)), "u": StoredTensor("U8", (1,), b"\1")}
_VALUES = [
    *([1, 2.5, "a", None], {"a": (1, [2]), 7: {b"x", None}}, {"$": 1}, "\ud800", [2**80, -(2**70)]),
    *([float("inf"), 1 - 2j], Counter("abca"), OrderedDict([(1, 2)]), deque([1, 2], maxlen=2)),
    *(defaultdict(list, {1: 2}), bytearray(b"z"), frozenset({1, (2,)}), torch.Size([1, 2])),
    *([torch.float32, torch.device("cuda:1")], np.float32(0.1)),
]
_STATE_TREES = [json.loads(encode(value).json) for value in _VALUES] + [
    [
        {"$": "torch.Tensor", "tensor": "t", "dtype": "float32"},
        {"$": "numpy.ndarray", "tensor": "u", "dtype": "|u1"},
    ]
]


def _check_state_text(tree: Any) -> bool:
    text = json.dumps(tree)
    # Only tensors that are meant: one that belongs to no value is an error of its own.
    tensors = {name: one for name, one in _STORED.items() if f'"tensor": "{name}"' in text}
    try:
        value = decode(EncodedState(text, tensors))
    except TrainStateFormatError as error:
        return _refused(error, "train_state")
    again = encode(value)
    assert encode(decode(again)) == again
    return True


def _check_state_file(data: bytes) -> bool:
    try:
        value, header = unpack(data, _PATH)
    except (TensorFileError, CheckpointError) as error:
        return _refused(error)
    assert unpack(pack(value, capacity_bytes=len(data), header=header))[1] == header
    return True


def _refused(error: Exception, where: str = _PATH) -> bool:
    message = str(error)
    assert message.startswith(where), message
    assert len(message) < 2000, len(message)
    return False


@dataclass(frozen=True)
class Target:
    """Something that reads a store."""

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], bool]
    """Returns whether it was taken."""


TARGETS: dict[str, Target] = {
    "header": Target(
        _with_bytes_changed(_HEADERS) | _with_a_value_changed(_HEADER_TREE).map(_with_header),
        _check_header,
    ),
    "manifest": Target(
        _with_bytes_changed(_MANIFESTS)
        | _with_a_value_changed(good.BODY).map(_signed)
        | _with_a_value_changed(good.two_drives()).map(_signed)
        | _with_a_value_changed(good.signed(good.BODY)).map(good.as_json)
        | _ANYTHING.map(_signed),
        _check_manifest,
    ),
    "part": Target(
        _with_bytes_changed([good.as_json(good.part())])
        | _with_a_value_changed(good.PART).map(lambda body: good.as_json(good.part(body))),
        _check_part,
    ),
    "train-state": Target(
        st.sampled_from(_STATE_TREES).flatmap(
            lambda tree: _with_a_value_changed([tree, {"like": tree}])
        ),
        _check_state_text,
    ),
    "train-state-file": Target(_with_bytes_changed(_STATES), _check_state_file),
}


def fuzz(name: str, seed: int, num_examples: int) -> Counter[bool]:
    """Try a number of inputs; return how many were taken, and how many refused.

    Raises:
        AssertionError: What was taken means something else when it is written again.
        Exception: Whatever was raised that is not a named refusal.
    """
    target = TARGETS[name]
    counts: Counter[bool] = Counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def try_one(value: Any) -> None:
        counts[target.check(value)] += 1

    try_one()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long, all targets together"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    arguments = parser.parse_args()
    totals: dict[str, Counter[bool]] = {name: Counter() for name in arguments.target or TARGETS}
    seed, end = arguments.seed, time.monotonic() + arguments.seconds
    print(f"seed {seed}", flush=True)
    while time.monotonic() < end:
        for name, counts in totals.items():
            try:
                counts += fuzz(name, seed, 500)
            except BaseException:
                print(f"{name}: failed with --seed {seed}", flush=True)
                raise
        seed += 1
    for name, counts in totals.items():
        print(f"{name}: {counts[True]} taken, {counts[False]} refused by name")


if __name__ == "__main__":
    main()
