"""Train states of several ranks in one file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

from offload.errors import TrainStateFormatError
from offload.format.train_state import (
    MAX_RANKS,
    EncodedState,
    StoredTensor,
    encode,
    join_ranks,
    pack_encoded,
    split_ranks,
    unpack_encoded,
)

STATES: list[object] = [
    {"seed": 1, "rng": torch.arange(3), "at": (1, 2)},
    None,
    [np.float32(2), {"$": "ranks", "items": [1]}, -0.0, 1e300, float("nan")],
    {"rng": torch.arange(4, 9), "bytes": b"\0\xff", "more": torch.ones(2, 2)},
    {"text": 'quotes " and \\ and \u2603', "big": 2**70},
]


def test_the_joined_states_are_one_valid_file(tmp_path):
    encoded = [encode(state) for state in STATES]
    joined = join_ranks(encoded)
    assert list(split_ranks(joined)) == encoded
    data = pack_encoded(joined, capacity_bytes=8192, header={"step": "3"})
    (tmp_path / "file.safetensors").write_bytes(data)
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert file.get_tensor("rank.3.tensor.0").tolist() == [4, 5, 6, 7, 8]
    assert unpack_encoded(data)[0] == joined


def test_a_state_of_one_process_is_that_of_one_rank():
    for state in STATES:
        assert split_ranks(encode(state)) == (encode(state),)


TENSOR = StoredTensor("U8", (1,), b"x")


@pytest.mark.parametrize(
    ("text", "tensors", "words"),
    [
        ('{"$":"ranks","items":[]}', {}, "not the states of several ranks"),
        ('{"$":"ranks","items":[1],"more":2}', {}, "not the states of several ranks"),
        ('{"$":"ranks","items":[1}', {}, "not JSON"),
        ('{"$":"ranks","items":[1,2]}', {"rank.2.tensor.0": TENSOR}, "'rank.2.tensor.0'"),
        ('{"$":"ranks","items":[1,2]}', {"rank.01.tensor.0": TENSOR}, "'rank.01.tensor.0'"),
        ('{"$":"ranks","items":[1,2]}', {"tensor.0": TENSOR}, "'tensor.0'"),
        ('{"$":"ranks","items":[' + "1," * MAX_RANKS + "1]}", {}, f"{MAX_RANKS} at most"),
    ],
)
def test_what_was_not_joined_is_refused(text, tensors, words):
    with pytest.raises(TrainStateFormatError, match=words):
        split_ranks(EncodedState(text, tensors))
