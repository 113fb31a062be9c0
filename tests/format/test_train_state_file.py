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

from offload.errors import CheckpointError
from offload.format.header import TensorFileError, build_header, parse_header
from offload.format.train_state import (
    EncodedState,
    StoredTensor,
    TrainStateDigestError,
    TrainStateFormatError,
    TrainStateTagError,
    TrainStateTooLargeError,
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


class TestPack:
    def test_fills_its_capacity_exactly_and_comes_back(self):
        for capacity_bytes in (2048, 4096, 1 << 20):
            file = pack(STATE, capacity_bytes=capacity_bytes, header=HEADER)
            assert len(file) == capacity_bytes
            state, header = unpack(file)
            assert same(state, STATE)
            assert header == HEADER

    def test_is_deterministic(self):
        reordered = dict(reversed(HEADER.items()))
        one = pack(STATE, capacity_bytes=4096, header=HEADER)
        assert one == pack(copy.deepcopy(STATE), capacity_bytes=4096, header=reordered)

    def test_is_a_safetensors_file_with_aligned_tensors(self, tmp_path):
        path = tmp_path / "train_state.safetensors"
        path.write_bytes(pack(STATE, capacity_bytes=4096, header=HEADER))
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["step"] == "12"
            assert json.loads(file.metadata()["train_state"])["scheduler"]["lr"]["$"] == "tuple"
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert sorted(t.dtype.itemsize for t in tensors.values()) == [1, 2, 8]
        parsed = parse_header(path.read_bytes(), 4096)
        for one in parsed.entries.values():
            itemsize = tensors[one.name].dtype.itemsize
            assert (parsed.data_start + one.start) % itemsize == 0

    def test_digest_is_the_documented_one(self):
        file = pack(STATE, capacity_bytes=4096, header=HEADER)
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

    def test_too_large_says_what_it_needs_and_that_suffices(self):
        state = {"a": list(range(3000)), "t": torch.zeros(1000)}
        with pytest.raises(TrainStateTooLargeError, match="reserve 8192") as caught:
            pack(state, capacity_bytes=8192, header={})
        needed = int(str(caught.value).split("train_state_bytes=")[1].split(")")[0])
        assert same(unpack(pack(state, capacity_bytes=needed, header={}))[0], state)
        assert needed < 8192 * 4
        assert isinstance(caught.value, ValueError)

    def test_too_large_when_the_tensors_alone_are(self):
        with pytest.raises(TrainStateTooLargeError, match=r"Options\(train_state_bytes="):
            pack(torch.zeros(10_000), capacity_bytes=4096, header={})

    @pytest.mark.parametrize("num_bytes", [0, 1, 3600, 3900, 4096, 12_345])
    def test_suggested_size_is_one_that_the_option_takes_and_that_suffices(self, num_bytes):
        state = torch.zeros(num_bytes, dtype=torch.uint8)
        with pytest.raises(TrainStateTooLargeError) as caught:
            pack(state, capacity_bytes=64, header={})
        needed = int(str(caught.value).split("train_state_bytes=")[1].split(")")[0])
        assert Options(train_state_bytes=needed).train_state_bytes == needed
        assert len(pack(state, capacity_bytes=needed, header={})) == needed

    def test_what_no_option_could_hold_says_so(self):
        encoded = EncodedState("1", {"t": StoredTensor("U8", (100_000_000,), bytes(100_000_000))})
        with pytest.raises(TrainStateTooLargeError, match="keep large tensors in the model"):
            pack_encoded(encoded, capacity_bytes=4096, header={})

    @pytest.mark.parametrize("capacity_bytes", [0, -8, 4097, 100_000_016])
    def test_capacity_out_of_range_is_refused(self, capacity_bytes):
        with pytest.raises(ValueError, match="multiple of 8 from 8 to 100000008"):
            pack(1, capacity_bytes=capacity_bytes, header={})

    @pytest.mark.parametrize("key", ["train_state", "train_state_digest", "train_state_format"])
    def test_reserved_header_key_is_refused(self, key):
        with pytest.raises(ValueError, match=f"reserved key '{key}'"):
            pack(1, capacity_bytes=4096, header={key: "x"})

    def test_captured_state_packs_like_the_state_itself(self):
        captured = encode(STATE)
        file = pack_encoded(captured, capacity_bytes=4096, header=HEADER)
        assert file == pack(STATE, capacity_bytes=4096, header=HEADER)
        found, header = unpack_encoded(file)
        assert found == captured
        assert header == HEADER


class TestUnpack:
    def test_any_changed_byte_is_an_error(self):
        file = pack(STATE, capacity_bytes=4096, header=HEADER)
        used = len(file[: parse_header(file, len(file)).data_start].rstrip(b" "))
        positions = {*range(0, used, 3), used, used + 1, *range(used, 4096, 97)}
        positions |= {*range(4096 - 90, 4096)}
        for position in sorted(positions):
            for mask in (1, 0x29, 0x80):  # 0x29 makes a tab of a space, which is padding to JSON
                bad = bytearray(file)
                bad[position] ^= mask
                with pytest.raises((TensorFileError, CheckpointError), match=r"^p: "):
                    unpack(bytes(bad), "p")

    @pytest.mark.parametrize("length", [0, 7, 100, 4095])
    def test_a_file_cut_short_is_an_error(self, length):
        file = pack(STATE, capacity_bytes=4096, header=HEADER)
        with pytest.raises(TensorFileError):
            unpack(file[:length])

    def test_damaged_data_is_a_digest_error(self):
        file = bytearray(pack(STATE, capacity_bytes=4096, header=HEADER))
        file[-1] ^= 1
        with pytest.raises(TrainStateDigestError, match="the file is damaged"):
            unpack(bytes(file), "p")

    def test_another_header_under_the_same_digest_is_a_digest_error(self):
        file = pack(STATE, capacity_bytes=4096, header=HEADER).replace(
            b'"step":"12"', b'"step":"13"'
        )
        with pytest.raises(TrainStateDigestError):
            unpack(file)

    def test_padding_that_json_allows_is_a_format_error(self):
        file = bytearray(pack(1, capacity_bytes=4096, header={}))
        assert file[-1:] == b" "
        file[-1:] = b"\n"
        with pytest.raises(TrainStateFormatError, match="not as this package writes them"):
            unpack(bytes(file))

    def test_some_other_safetensors_file_is_a_format_error(self):
        file = safetensors.torch.save({"a": torch.zeros(2)})
        with pytest.raises(TrainStateFormatError, match="not a train_state"):
            unpack(file)

    def test_another_version_is_a_format_error_that_says_so(self):
        metadata = {"train_state": "1", "train_state_digest": "0" * 32, "train_state_format": "2"}
        with pytest.raises(TrainStateFormatError, match=r"is '2', this version .* reads '1'"):
            unpack(build_header([], metadata).encoded)

    def test_content_that_was_digested_but_never_encoded_names_the_file(self):
        file = pack_encoded(EncodedState('{"$":"odd"}'), capacity_bytes=4096, header={})
        with pytest.raises(TrainStateTagError, match=r"^run/x: train_state: .*'odd'"):
            unpack(file, "run/x")
