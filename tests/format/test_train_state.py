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
from itertools import combinations

import numpy as np
import pytest
import torch

from offload.format.train_state import (
    EncodedState,
    StoredTensor,
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


def states_of_torch() -> dict[str, object]:
    """Return what training loops keep: schedulers, an optimizer, a scaler, a generator."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    module, found = torch.optim.lr_scheduler, {}
    for scheduler in (
        module.MultiStepLR(optimizer, milestones=[3, 5, 5], gamma=0.5),
        module.ReduceLROnPlateau(optimizer, patience=1),
        module.OneCycleLR(optimizer, max_lr=1.0, total_steps=50),
        module.LambdaLR(optimizer, lr_lambda=lambda step: 0.9**step),
        module.SequentialLR(
            optimizer, [module.LinearLR(optimizer), module.StepLR(optimizer, 2)], milestones=[4]
        ),
    ):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, module.ReduceLROnPlateau) else []))
        found[type(scheduler).__name__] = scheduler.state_dict()
    found["optimizer"] = optimizer.state_dict()
    found["scaler"] = torch.amp.GradScaler("cpu").state_dict()
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    return {**found, "generator": generator.get_state()}


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
    "states-of-torch": states_of_torch(),
    "numpy-scalars": [
        *(np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(0.1), np.float32(-0.0)),
        *(np.float64(math.inf), np.complex64(1 - 2j), np.complex128(complex(math.nan, -0.0))),
    ],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_the_same_and_is_encoded_alike(name):
    state = [VALUES[name], {"state": VALUES[name]}]
    found = round_trip(state)
    assert same(found, state)
    encoded = encode(state)
    assert encode(found) == encoded == encode(copy.deepcopy(state))
    json.loads(encoded.json.encode(), parse_constant=pytest.fail)


def test_no_two_values_are_encoded_alike():
    """A state that is sealed again at the same step is compared by its encoding."""
    encoded = {name: encode(value) for name, value in VALUES.items()}
    alike = [(a, b) for a, b in combinations(encoded, 2) if encoded[a] == encoded[b]]
    assert alike == []
    zeros = [encode(value) for value in (0, 0.0, -0.0, False, None, "", (), [], {}, set())]
    assert not any(a == b for a, b in combinations(zeros, 2))


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
