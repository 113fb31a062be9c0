"""Train states of several ranks in one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from offload.format.shares.rank_states import MAX_RANKS, join_ranks, split_ranks
from offload.format.train_state import (
    EncodedState,
    StoredTensor,
    TrainStateFormatError,
    TrainStateTagError,
    decode,
    encode,
    pack_encoded,
    unpack_encoded,
)

STATES: list[object] = [
    {"seed": 1, "rng": torch.arange(3), "at": (1, 2)},
    None,
    [np.float32(2), {"$": "ranks", "items": [1]}, -0.0, 1e300, float("nan")],
    {"rng": torch.arange(4, 9), "bytes": b"\0\xff", "more": torch.ones(2, 2)},
    {"text": 'quotes " and \\ and \u2603', "big": 2**70},
]


def test_each_rank_gets_its_own_state() -> None:
    encoded = [encode(state) for state in STATES]
    assert list(split_ranks(join_ranks(encoded))) == encoded


def test_the_joined_states_are_one_valid_file(tmp_path: Path) -> None:
    joined = join_ranks([encode(state) for state in STATES])
    data = pack_encoded(joined, capacity_bytes=8192, header={"step": "3"})
    (tmp_path / "file.safetensors").write_bytes(data)
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert file.get_tensor("rank.3.tensor.0").tolist() == [4, 5, 6, 7, 8]
    assert unpack_encoded(data)[0] == joined


def test_a_state_of_one_process_is_that_of_one_rank() -> None:
    for state in STATES:
        assert split_ranks(encode(state)) == (encode(state),)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(values, min_size=1, max_size=5))
def test_any_values_are_kept(states: list[object]) -> None:
    encoded = [encode(state) for state in states]
    assert list(split_ranks(join_ranks(encoded))) == encoded


def test_no_reader_of_one_state_takes_several_for_one() -> None:
    with pytest.raises(TrainStateTagError, match="'ranks' is unknown"):
        decode(join_ranks([encode(1), encode(2)]))


TENSOR = StoredTensor("U8", (1,), b"x")


@pytest.mark.parametrize(
    ("text", "tensors", "words"),
    [
        ('{"$":"ranks","items":[]}', {}, "not the states of several ranks"),
        ('{"$":"ranks","items":[1],"more":2}', {}, "not the states of several ranks"),
        ('{"$":"ranks","items":[1}', {}, "not JSON"),
        ('{"$":"ranks","items":[1,2]}', {"rank.2.tensor.0": TENSOR}, "'rank.2.tensor.0'"),
        ('{"$":"ranks","items":[1,2]}', {"rank.01.tensor.0": TENSOR}, "'rank.01.tensor.0'"),
        ('{"$":"ranks","items":[1,2]}', {"rank.1": TENSOR}, "'rank.1'"),
        ('{"$":"ranks","items":[1,2]}', {"tensor.0": TENSOR}, "'tensor.0'"),
        ('{"$":"ranks","items":[' + "1," * MAX_RANKS + "1]}", {}, f"{MAX_RANKS} at most"),
    ],
)
def test_what_was_not_joined_is_refused(
    text: str, tensors: dict[str, StoredTensor], words: str
) -> None:
    with pytest.raises(TrainStateFormatError, match=words):
        split_ranks(EncodedState(text, tensors))


@pytest.mark.parametrize("num", [0, MAX_RANKS + 1])
def test_the_number_of_ranks_is_bounded(num: int) -> None:
    with pytest.raises(ValueError, match="one per rank"):
        join_ranks([encode(None)] * num)
