"""The training state as one file: exact size, digest, and what damage does to it."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
from collections import Counter

import numpy as np
import pytest
import safetensors.torch
import torch

from offload.errors import (
    TrainStateDigestError,
    TrainStateFormatError,
    TrainStateTagError,
    TrainStateTooLargeError,
)
from offload.format.header import build_header, parse_header
from offload.format.train_state import (
    EncodedState,
    StoredTensor,
    encode,
    pack,
    pack_encoded,
    unpack,
    unpack_encoded,
)
from offload.options import Options


def same(a: object, b: object) -> bool:
    """Return whether two states are: equal encodings mean that, as the round trips show."""
    return encode(a) == encode(b)


STATE = {
    "scheduler": {"milestones": Counter({3: 1}), "best": math.inf, "lr": (0.1, 0.2)},
    "rng": torch.arange(40, dtype=torch.uint8),
    "sampler": np.arange(5, dtype=np.int64),
    "half": torch.ones(3, dtype=torch.bfloat16),
}
HEADER = {"step": "12", "store": "\u00e9"}


def packed(state=STATE, header=HEADER, capacity_bytes=4096):
    return pack(state, capacity_bytes=capacity_bytes, header=header)


@pytest.mark.parametrize("capacity_bytes", [2048, 1 << 20])
def test_a_file_fills_its_capacity_exactly_and_comes_back(capacity_bytes):
    file = packed(capacity_bytes=capacity_bytes)
    assert len(file) == capacity_bytes
    state, header = unpack(file)
    assert same(state, STATE)
    assert header == HEADER
    reordered = dict(reversed(HEADER.items()))
    assert file == packed(copy.deepcopy(STATE), reordered, capacity_bytes)
    captured = encode(STATE)
    assert file == pack_encoded(captured, capacity_bytes=capacity_bytes, header=HEADER)
    assert unpack_encoded(file) == (captured, HEADER)


def test_it_is_a_safetensors_file_with_aligned_tensors(tmp_path):
    path = tmp_path / "train_state.safetensors"
    path.write_bytes(packed())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "12"
        assert json.loads(file.metadata()["train_state"])["scheduler"]["lr"]["$"] == "tuple"
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert sorted(t.dtype.itemsize for t in tensors.values()) == [1, 2, 8]
    parsed = parse_header(path.read_bytes(), 4096)
    for one in parsed.entries.values():
        itemsize = tensors[one.name].dtype.itemsize
        assert (parsed.data_start + one.start) % itemsize == 0


def test_the_digest_is_the_documented_one():
    file = packed()
    parsed = parse_header(file, len(file))
    fields = [b"1", parsed.metadata["train_state"].encode(), b"2"]
    fields += [b"step", b"12", b"store", "\u00e9".encode(), b"3"]
    for one in parsed.entries.values():
        data = file[parsed.data_start + one.start : parsed.data_start + one.stop]
        shape = ",".join(map(str, one.shape))
        fields += [one.name.encode(), one.dtype.encode(), shape.encode(), data]
    framed = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    digest = hashlib.blake2b(framed, digest_size=16).hexdigest()
    assert parsed.metadata["train_state_digest"] == digest


@pytest.mark.parametrize("num_bytes", [0, 3600, 4096, 12_345])
def test_what_is_too_large_says_which_option_suffices(num_bytes):
    state = {"a": list(range(300)), "t": torch.zeros(num_bytes, dtype=torch.uint8)}
    with pytest.raises(TrainStateTooLargeError, match="reserve 1024") as caught:
        packed(state, {}, 1024)
    needed = int(str(caught.value).split("train_state_bytes=")[1].split(")")[0])
    assert Options(train_state_bytes=needed).train_state_bytes == needed < 16384 + num_bytes
    assert same(unpack(packed(state, {}, needed))[0], state)
    assert isinstance(caught.value, ValueError)


def test_what_no_option_could_hold_says_so():
    encoded = EncodedState("1", {"t": StoredTensor("U8", (100_000_000,), bytes(100_000_000))})
    with pytest.raises(TrainStateTooLargeError, match="keep large tensors in the model"):
        pack_encoded(encoded, capacity_bytes=4096, header={})
    for capacity_bytes in (0, -8, 4097, 100_000_016):
        with pytest.raises(ValueError, match="multiple of 8 from 8 to 100000008"):
            packed(1, {}, capacity_bytes)


# Damage


def test_each_kind_of_damage_has_its_error():
    file, padded = packed(), packed(1, {})
    metadata = {"train_state": "1", "train_state_digest": "0" * 32, "train_state_format": "2"}
    odd = pack_encoded(EncodedState('{"$":"odd"}'), capacity_bytes=4096, header={})
    longer = (len(padded) - 7).to_bytes(8, "little") + padded[8:] + b" "
    step_13 = file.replace(b'"step":"12"', b'"step":"13"')
    for data, error, words in (
        (file[:-1] + bytes([file[-1] ^ 1]), TrainStateDigestError, "the file is damaged"),
        (step_13, TrainStateDigestError, "the file is damaged"),
        (padded[:-1] + b"\n", TrainStateFormatError, "not as this package writes them"),
        (longer, TrainStateFormatError, "4097 bytes; not a train_state"),
        (safetensors.torch.save({"a": torch.zeros(2)}), TrainStateFormatError, "not a train_state"),
        (build_header([], metadata).encoded, TrainStateFormatError, "is '2', this version"),
        (odd, TrainStateTagError, "^run/x: train_state: .*'odd'"),
    ):
        with pytest.raises(error, match=words):
            unpack(data, "run/x")
