"""The training state: what goes in comes back the same, or is refused by its path."""

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
    "torch-generator-state": torch.Generator().manual_seed(3).get_state(),
}


class TestRoundTrip:
    @pytest.mark.parametrize("name", VALUES)
    def test_value_comes_back_the_same(self, name):
        found = round_trip({"state": VALUES[name]})
        assert same(found, {"state": VALUES[name]})

    @pytest.mark.parametrize("name", VALUES)
    def test_value_comes_back_the_same_at_the_top(self, name):
        assert same(round_trip(VALUES[name]), VALUES[name])

    def test_the_comparison_of_these_tests_tells_values_apart(self):
        pairs = [
            (1, True),
            (0.0, -0.0),
            ((1,), [1]),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            (deque([1]), deque([1], 3)),
            (defaultdict(int), defaultdict(float)),
            (Counter("a"), {"a": 1}),
            ({1}, {2}),
            (torch.zeros(2), torch.zeros(2).half()),
            (torch.tensor(0.0), torch.tensor(-0.0)),
            (np.zeros(2), np.zeros(2, ">f8")),
            (np.float32(1), np.float64(1)),
        ]
        assert not any(same(a, b) for a, b in pairs)

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.uint16,
            torch.int32,
            torch.uint32,
            torch.int64,
            torch.uint64,
            torch.float8_e4m3fn,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex32,
            torch.complex64,
            torch.complex128,
        ],
        ids=str,
    )
    def test_tensor_of_every_dtype(self, dtype):
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        base = (raw % 2).bool()[:6] if dtype is torch.bool else raw.view(dtype)
        tensors = {
            "matrix": base.reshape(2, 3),
            "transposed": base.reshape(2, 3).T,
            "strided": base[::2],
            "scalar": base[3],
            "empty": base[:0].reshape(0, 7),
        }
        found = round_trip(tensors)
        assert same(found, tensors)
        assert all(tensor.is_contiguous() for tensor in found.values())

    def test_tensor_comes_back_detached_and_independent(self):
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

    def test_lazily_conjugated_and_negated_tensors_are_resolved(self):
        base = torch.tensor([1 + 2j, 3 - 4j])
        state = [base.conj(), base.conj().imag, torch._neg_view(torch.ones(2))]
        assert state[0].is_conj()
        assert state[1].is_neg()
        assert state[2].is_neg()
        assert state[2].is_contiguous()  # so that no copy resolves it by the way
        found = round_trip(state)
        assert found[0].tolist() == [1 - 2j, 3 + 4j]
        assert found[1].tolist() == [-2.0, 4.0]
        assert found[2].tolist() == [-1.0, -1.0]

    @pytest.mark.parametrize("order", ["<", ">"])
    @pytest.mark.parametrize(
        "code", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    )
    def test_array_of_every_dtype_and_byte_order(self, code, order):
        array = np.arange(6).astype(order + code).reshape(2, 3)
        arrays = [array, array.T, array[:, ::2], array[1, 1:1], array[0].reshape(3, 1, 1)]
        arrays += [np.asfortranarray(array), array[:0], np.array(1, order + code)]
        found = round_trip(arrays)
        assert same(found, arrays)
        assert all(one.flags.writeable and one.flags.c_contiguous for one in found)

    def test_payload_of_nan_survives_in_arrays_and_tensors(self):
        array = np.array([0x7F800001, 0xFFC12345], np.uint32)
        state = [
            array.view(np.float32),
            array.byteswap().view(">f4"),
            torch.from_numpy(array.view(np.int32)).view(torch.float32),
            array.view(np.float32)[0],
        ]
        assert same(round_trip(state), state)

    @pytest.mark.parametrize(
        "scalar",
        [
            np.bool_(True),
            np.int8(-3),
            np.uint64(2**64 - 1),
            np.float16(0.1),
            np.float32(-0.0),
            np.float64(math.inf),
            np.complex64(1 - 2j),
            np.complex128(complex(math.nan, -0.0)),
        ],
        ids=lambda scalar: type(scalar).__name__,
    )
    def test_numpy_scalar_keeps_its_type(self, scalar):
        assert same(round_trip([scalar]), [scalar])

    def test_python_generator_continues_where_it_was(self):
        source = random.Random(1)
        source.gauss(0, 1)  # leaves half a pair behind, a float in the state
        state = round_trip(source.getstate())
        other = random.Random()
        other.setstate(state)
        assert [source.gauss(0, 1) for _ in range(9)] == [other.gauss(0, 1) for _ in range(9)]

    def test_numpy_generators_continue_where_they_were(self):
        legacy, modern = np.random.RandomState(1), np.random.default_rng(1)
        states = round_trip((legacy.get_state(), modern.bit_generator.state))
        wanted = legacy.rand(9).tolist() + modern.random(9).tolist()
        legacy.set_state(states[0])
        modern.bit_generator.state = states[1]
        assert legacy.rand(9).tolist() + modern.random(9).tolist() == wanted

    def test_torch_generator_continues_where_it_was(self):
        generator = torch.Generator().manual_seed(1)
        torch.randn(3, generator=generator)
        state = round_trip(generator.get_state())
        wanted = torch.randn(9, generator=generator)
        generator.set_state(state)
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


class PrintedError(RuntimeError):
    pass


def test_keys_are_printed_only_into_messages(monkeypatch):
    # reprlib sorts what is in sets: comparing numpy scalars with large floats warns.
    state = {frozenset({np.float32(0.1), 1e200, -1e200}): [np.zeros(1), np.int8(1), (b"x",)]}

    def refuse(path):
        raise PrintedError(path)

    for module in ("leaves", "encode", "decode"):
        monkeypatch.setattr(f"offload.format._train_state_{module}.render", refuse)
    assert same(round_trip(state), state)
    with pytest.raises(PrintedError):
        encode({1: object()})


class TestAnyState:
    @settings(max_examples=120, deadline=None)
    @given(state=states)
    def test_comes_back_the_same_and_encodes_the_same_again(self, state):
        encoded = encode(state)
        found = decode(encoded)
        assert same(found, state)
        assert encode(found) == encoded
        json.loads(encoded.json.encode(), parse_constant=pytest.fail)

    @settings(max_examples=60, deadline=None)
    @given(a=states, b=states)
    def test_encodings_are_equal_exactly_if_states_are(self, a, b):
        assert (encode(a) == encode(b)) == same(a, b)
        assert encode(a) == encode(copy.deepcopy(a))

    @settings(max_examples=60, deadline=None)
    @given(state=states, data=st.data())
    def test_damaged_json_is_refused_by_name_or_is_another_state(self, state, data):
        text = encode(state).json
        position = data.draw(st.integers(0, len(text) - 1))
        char = data.draw(st.sampled_from('"{}[],:$0-9eainfl\\ '))
        bad = EncodedState(text[:position] + char + text[position + 1 :], encode(state).tensors)
        try:
            found = decode(bad)
        except TrainStateFormatError:
            return
        encode(found)


def schedulers():
    """Yield real schedulers, each some steps into its life."""
    module = torch.optim.lr_scheduler

    def make(kind, **options):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return kind(optimizer, **options)

    yield "multistep", lambda: make(module.MultiStepLR, milestones=[3, 5, 5], gamma=0.5)
    yield "plateau", lambda: make(module.ReduceLROnPlateau, patience=1)
    yield "onecycle", lambda: make(module.OneCycleLR, max_lr=1.0, total_steps=50)
    yield "cosine-restarts", lambda: make(module.CosineAnnealingWarmRestarts, T_0=3, T_mult=2)
    yield "lambda", lambda: make(module.LambdaLR, lr_lambda=lambda step: 0.9**step)

    def sequential():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        parts = [
            module.LinearLR(optimizer, total_iters=3),
            module.MultiStepLR(optimizer, milestones=[2, 4]),
        ]
        return module.SequentialLR(optimizer, parts, milestones=[4])

    yield "sequential", sequential


SCHEDULERS = dict(schedulers())


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_continues_where_it_was(name):
    def advance(scheduler, num_steps):
        rates = []
        for step in range(num_steps):
            scheduler.optimizer.step()
            if name == "plateau":
                scheduler.step(1.0 + step)
            else:
                scheduler.step()
            rates.append(scheduler.optimizer.param_groups[0]["lr"])
        return rates

    source, other = SCHEDULERS[name](), SCHEDULERS[name]()
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


class TestEncoding:
    def test_is_plain_json_where_json_is_lossless(self):
        assert encode({"a": [1, 2.5, None, True, "x"]}) == EncodedState(
            '{"a":[1,2.5,null,true,"x"]}', {}
        )

    def test_of_a_tensor_is_its_bytes(self):
        encoded = encode((torch.tensor([1.0, 2.0]),))
        assert json.loads(encoded.json) == {
            "$": "tuple",
            "items": [{"$": "torch.Tensor", "tensor": "tensor.0", "dtype": "float32"}],
        }
        assert encoded.tensors == {
            "tensor.0": StoredTensor("F32", (2,), struct.pack("<2f", 1.0, 2.0))
        }
        assert encoded.tensor_bytes == 8

    def test_of_equal_sets_is_equal_whatever_order_they_iterate_in(self):
        # The two collide in a set of eight, so the first one in comes first.
        forward, backward = {0, 8}, {8, 0}
        assert list(forward) != list(backward)
        assert encode(forward) == encode(backward)

    def test_is_a_copy_of_the_values(self):
        state = {"a": [1], "t": torch.zeros(1), "n": np.zeros(1)}
        encoded = encode(state)
        state["a"].append(2)
        state["t"] += 1
        state["n"] += 1
        assert same(decode(encoded), {"a": [1], "t": torch.zeros(1), "n": np.zeros(1)})
