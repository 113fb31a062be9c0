"""The training state: what goes in comes back the same.

A whole checkpoint would show the same through `checkpoint.train_state`, a hundred times slower.
"""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.format.train_state import (
    EncodedState,
    StoredTensor,
    TrainStateFormatError,
    decode,
    encode,
    pack,
    unpack,
)


def same(a: object, b: object) -> bool:
    """Return whether two states have the same types and values, NaN like NaN, in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    if isinstance(a, np.generic):
        return (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and all(
                same(k, other) and same(v, w)
                for (k, v), (other, w) in zip(a.items(), b.items(), strict=True)
            )
            and getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
        )
    if isinstance(a, (list, tuple, deque)):
        return (
            len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
            and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        )
    if isinstance(a, (set, frozenset)):
        # Every NaN is a member of its own; a member may equal one of another type.
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return a == b


def bits(tensor: torch.Tensor) -> list[int]:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).tolist() if plain.numel() else []


def round_trip(state: object) -> object:
    file = pack(state, capacity_bytes=1 << 16, header={})
    assert len(file) == 1 << 16
    return unpack(file)[0]


VALUES = {
    "none": None,
    "bools": [True, False, 1, 0, 1.0, 0.0],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 3**20_000, -(10**5000)],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22, 2**53 + 1.0, math.pi],
    "float-specials": [math.inf, -math.inf, math.nan],
    "complex": [1 + 2j, complex(-0.0, math.nan), complex(math.inf, -0.0), complex(0.1, 5e-324)],
    "strings": ["", "a", "\0", '"\\/', "\u00e9\u4e2d\U0001f600", "\u2028", "$", "NaN", "null"],
    "lone-surrogates": ["\ud800", "\udfff\ud800", "a\udc80b", "\ud83d\ude00"],
    "bytes": [b"", b"\0\xff", bytes(range(256))],
    "bytearray": bytearray(b"\0abc"),
    "empty-containers": [[], (), {}, set(), frozenset(), deque(), Counter(), OrderedDict()],
    "nested-tuples": (1, (2, [3, (4,)]), ()),
    "dict-order": {"b": 1, "a": 2, "": 3},
    "dict-int-keys": {1: "a", 0: "b", -5: "c"},
    "dict-mixed-keys": {"1": "a", 1: "b", None: "c", (1, "x"): "d", 2.5: "e", b"k": "f"},
    "dict-bool-key": {True: 1, "True": 2},
    "dict-tuple-keys": {(0, (1, None)): {("a",): frozenset({1})}},
    "dict-surrogate-key": {"\ud800": 1},
    "dict-nan-key": {math.nan: 1},
    "like-a-tag": {"$": "tuple", "items": [1, 2]},
    "like-a-tag-nested": {"$": {"$": "dict", "items": [["$", 1]]}, "x": {"$": None}},
    "metadata-like-keys": {"__metadata__": 1, "train_state": 2, "__class__": 3},
    "set": {1, "a", None, (1, 2), b"x", 2.5, frozenset({"q"})},
    "frozenset": frozenset({1, 2, 3}),
    "deque": deque([1, (2,), [3]]),
    "deque-maxlen": deque([1, 2], maxlen=2),
    "counter": Counter({80: 1, 30: 2, "x": 0, None: -1}),
    "counter-odd-counts": Counter({"a": 1.5}),
    "ordered-dict": OrderedDict([("b", 1), (2, (3,))]),
    "defaultdicts": [
        defaultdict(factory, {1: 2}) for factory in (None, int, float, list, dict, set, str, bool)
    ],
    "torch-size": torch.Size([2, 0, 3]),
    "torch-dtypes": [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.qint8],
    "torch-devices": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
    "torch-keys": {torch.float32: 1, torch.device("cpu"): 2, torch.Size([1]): 3},
    "numpy-keys": {np.int64(3): 1, np.float32(0.5): {np.uint8(1)}},
    "random-state": random.Random(3).getstate(),
    "numpy-legacy-state": np.random.RandomState(3).get_state(),
    "numpy-legacy-state-dict": np.random.RandomState(3).get_state(legacy=False),
    "numpy-generator-state": np.random.default_rng(3).bit_generator.state,
    "numpy-mt19937-state": np.random.Generator(np.random.MT19937(5)).bit_generator.state,
    "numpy-scalars": [
        *(np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(0.1), np.float32(-0.0)),
        *(np.float64(math.inf), np.complex64(1 - 2j), np.complex128(complex(math.nan, -0.0))),
    ],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_the_same(name):
    found = round_trip([VALUES[name], {"state": VALUES[name]}])
    assert same(found, [VALUES[name], {"state": VALUES[name]}])


TENSOR_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype_come_back_contiguous():
    for dtype in TENSOR_DTYPES:
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        base = (raw % 2).bool()[:6] if dtype is torch.bool else raw.view(dtype)
        matrix, empty = base.reshape(2, 3), base[:0].reshape(0, 7)
        found = round_trip(tensors := [matrix, matrix.T, base[::2], base[3], empty])
        assert same(found, tensors), dtype
        assert all(tensor.is_contiguous() for tensor in found)


def test_arrays_of_every_dtype_and_byte_order_come_back_writable():
    numbers = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    for code in ("?", *numbers):
        for order in "<>":
            array = np.arange(6).astype(order + code).reshape(2, 3)
            arrays = [array, array.T, array[:, ::2], array[1, 1:1], array[0].reshape(3, 1, 1)]
            arrays += [np.asfortranarray(array), array[:0], np.array(1, order + code)]
            found = round_trip(arrays)
            assert same(found, arrays), (order, code)
            assert all(one.flags.writeable and one.flags.c_contiguous for one in found)


def test_a_tensor_comes_back_detached_resolved_and_independent():
    tensor = torch.arange(4.0, requires_grad=True)
    encoded = encode([tensor, tensor])
    with torch.no_grad():
        tensor.zero_()
    first, second = decode(encoded)
    assert first.tolist() == [0, 1, 2, 3]
    assert not first.requires_grad
    first.zero_()
    assert second.tolist() == [0, 1, 2, 3]
    first.resize_(1000)
    base = torch.tensor([1 + 2j, 3 - 4j])
    lazy = [base.conj(), base.conj().imag, torch._neg_view(torch.ones(2))]
    assert lazy[0].is_conj()
    assert lazy[1].is_neg()
    assert [one.tolist() for one in round_trip(lazy)] == [[1 - 2j, 3 + 4j], [-2, 4], [-1, -1]]


def test_the_payload_of_a_nan_survives():
    array = np.array([0x7F800001, 0xFFC12345], np.uint32)
    state = [
        array.view(np.float32),
        array.byteswap().view(">f4"),
        torch.from_numpy(array.view(np.int32)).view(torch.float32),
        array.view(np.float32)[0],
    ]
    assert same(round_trip(state), state)


def test_generators_continue_where_they_were():
    source, other = random.Random(1), random.Random()
    source.gauss(0, 1)  # leaves half a pair behind, a float in the state
    legacy, modern = np.random.RandomState(1), np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    states = [source.getstate(), legacy.get_state(), modern.bit_generator.state]
    states = round_trip([*states, generator.get_state()])
    wanted = torch.randn(9, generator=generator)
    other.setstate(states[0])
    assert [source.gauss(0, 1) for _ in range(9)] == [other.gauss(0, 1) for _ in range(9)]
    drawn = legacy.rand(9).tolist() + modern.random(9).tolist()
    legacy.set_state(states[1])
    modern.bit_generator.state = states[2]
    assert legacy.rand(9).tolist() + modern.random(9).tolist() == drawn
    generator.set_state(states[3])
    assert torch.equal(torch.randn(9, generator=generator), wanted)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["$", "items", "tuple"])
    | st.binary(max_size=8)
    | st.sampled_from([torch.float16, torch.device("cuda:1"), torch.Size([3]), np.float32(0.1)])
)
keys = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
mutable = st.binary(max_size=4).map(bytearray) | st.sampled_from(
    [torch.tensor([1.5, -0.0]), torch.zeros(0, 2), np.array([1, 2], ">i2"), np.array(2j)]
)
states = st.recursive(
    leaves | mutable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(st.text(max_size=4) | st.just("$"), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
        | st.dictionaries(keys, inner, max_size=4).map(lambda d: defaultdict(list, d))
        | st.sets(keys, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(state=states, other=states)
def test_any_state_comes_back_the_same_and_equal_states_encode_alike(state, other):
    encoded = encode(state)
    found = decode(encoded)
    assert same(found, state)
    assert encode(found) == encoded == encode(copy.deepcopy(state))
    assert (encode(other) == encoded) == same(other, state)
    json.loads(encoded.json.encode(), parse_constant=pytest.fail)


@settings(max_examples=40, deadline=None)
@given(state=states, data=st.data())
def test_damaged_json_is_refused_by_name_or_is_another_state(state, data):
    text = encode(state).json
    position = data.draw(st.integers(0, len(text) - 1))
    char = data.draw(st.sampled_from('"{}[],:$0-9eainfl\\ '))
    bad = EncodedState(text[:position] + char + text[position + 1 :], encode(state).tensors)
    try:
        found = decode(bad)
    except TrainStateFormatError:
        return
    encode(found)


def scheduled(name):
    """Return a real scheduler."""
    module = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    if name == "SequentialLR":
        first = module.LinearLR(optimizer, total_iters=3)
        second = module.MultiStepLR(optimizer, milestones=[2, 4])
        return module.SequentialLR(optimizer, [first, second], milestones=[4])
    return getattr(module, name)(optimizer, **SCHEDULERS[name])


SCHEDULERS = {
    "MultiStepLR": {"milestones": [3, 5, 5], "gamma": 0.5},
    "ReduceLROnPlateau": {"patience": 1},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 50},
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "SequentialLR": {},
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_continues_where_it_was(name):
    def advance(scheduler, num_steps):
        rates = []
        for step in range(num_steps):
            scheduler.optimizer.step()
            scheduler.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
            rates.append(scheduler.optimizer.param_groups[0]["lr"])
        return rates

    source, other = scheduled(name), scheduled(name)
    advance(source, 4)
    state = source.state_dict()
    found = round_trip({"scheduler": state})["scheduler"]
    assert same(found, state)
    other.load_state_dict(found)
    other.optimizer.load_state_dict(source.optimizer.state_dict())
    assert advance(other, 6) == advance(source, 6)


def test_optimizer_and_scaler_state_dicts_come_back_the_same():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    assert same(round_trip(state), state)


def test_the_encoding_is_plain_json_and_bytes_where_they_are_lossless():
    plain = encode({"a": [1, 2.5, None, True, "x"]})
    assert plain == EncodedState('{"a":[1,2.5,null,true,"x"]}', {})
    encoded = encode((torch.tensor([1.0, 2.0]),))
    assert json.loads(encoded.json) == {
        "$": "tuple",
        "items": [{"$": "torch.Tensor", "tensor": "tensor.0", "dtype": "float32"}],
    }
    assert encoded.tensors == {"tensor.0": StoredTensor("F32", (2,), struct.pack("<2f", 1, 2))}
    # The two collide in a set of eight, so the first one in comes first.
    forward, backward = {0, 8}, {8, 0}
    assert list(forward) != list(backward)
    assert encode(forward) == encode(backward)


def test_the_encoding_is_a_copy_of_the_values():
    state = {"a": [1], "t": torch.zeros(1), "n": np.zeros(1)}
    encoded = encode(state)
    state["a"].append(2)
    state["t"] += 1
    state["n"] += 1
    assert same(decode(encoded), {"a": [1], "t": torch.zeros(1), "n": np.zeros(1)})
