"""What the training state refuses: values on the way in, and files on the way out."""

from __future__ import annotations

import enum
import json
from collections import defaultdict, namedtuple

import numpy as np
import pytest
import torch

from offload.errors import (
    OffloadError,
    TrainStateFormatError,
    TrainStateTagError,
    TrainStateTypeError,
)
from offload.format.train_state import (
    MAX_DEPTH,
    EncodedState,
    StoredTensor,
    decode,
    encode,
)


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


class Mapping(dict):
    pass


Point = namedtuple("Point", "x y")


def cycle() -> list[object]:
    loop: list[object] = []
    loop.append({"again": (loop,)})
    return loop


def nested(depth: int) -> object:
    state: object = 1
    for level in range(depth):
        state = (state,) if level % 2 else {1: state}
    return state


REFUSED = {
    "function": ([len], r"train_state\[0\]: .*builtin_function_or_method"),
    "lambda-by-path": (
        {"scheduler": {"lr_lambdas": [lambda step: step]}},
        r"train_state\['scheduler'\]\['lr_lambdas'\]\[0\]: .*function.*store its fields instead",
    ),
    "module": ({"m": torch.nn.Linear(1, 1)}, r"Linear; store its state_dict\(\) instead"),
    "enum": ({"e": Colour.RED}, r"\['e'\]: .*Colour.*\.name or \.value"),
    "str-subclass": (
        {"s": Text("a")},
        r"Text: restoring imports no modules, so it would become a plain str.*str\(value\)",
    ),
    "dict-subclass": (
        {"s": Mapping()},
        r"Mapping: restoring imports no modules, so it would become a plain dict",
    ),
    "namedtuple": (
        {"p": Point(1, 2)},
        r"Point: restoring imports no modules, so it would become a plain tuple",
    ),
    "object-key": ({("k", Colour.RED): 1}, r"train_state\.keys\(.*\)\[1\]: .*Colour"),
    "defaultdict-lambda": ([defaultdict(lambda: 1)], r"train_state\[0\]: .*default_factory"),
    "parameter": ({"w": torch.nn.Parameter(torch.zeros(1))}, r"\['w'\]: .*Parameter.*detach"),
    "generator": ({"g": torch.Generator()}, r"\['g'\]: .*Generator; store its get_state\(\)"),
    "sparse": ({"t": torch.eye(2).to_sparse()}, r"train_state\['t'\]: .*sparse_coo"),
    "meta-tensor": ([torch.empty(2, device="meta")], r"train_state\[0\]: .*meta"),
    "tensor-key": ({torch.zeros(1): 1}, r"train_state\.keys\(.*: a tensor or array cannot be"),
    "tensor-in-set": ({torch.zeros(1)}, "a tensor or array cannot be"),
    "object-array": (np.array([None]), "train_state: .*object"),
    "text-array": ({"a": np.array(["x"])}, r"\['a'\]: .*<U1"),
    "long-double": (np.longdouble(1), "longdouble|float128|float64"),
    "datetime64": (np.datetime64(0, "s"), "datetime64"),
    "cycle": (cycle(), r"train_state\[0\]\['again'\]\[0\]: contains itself"),
    "too-deep": (nested(MAX_DEPTH + 1), f"deeper than {MAX_DEPTH} levels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_is_refused_with_its_path(name):
    state, message = REFUSED[name]
    with pytest.raises(TrainStateTypeError, match=message) as caught:
        encode(state)
    assert str(caught.value).startswith("train_state")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, OffloadError)


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_a_quantized_tensor_is_refused():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(TrainStateTypeError, match=r"train_state\['q'\]: .*dtype quint8"):
        encode({"q": quantized})


def test_the_deepest_state_and_the_same_object_twice_are_taken():
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    shared = [1]
    assert decode(encode([shared, {"a": shared}])) == [[1], {"a": [1]}]


def tag(name: str, /, **fields: object) -> str:
    return json.dumps({"$": name, **fields})


BAD_JSON = {
    "not-json": "{",
    "nan": "NaN",
    "overflowing-float": "1e999",
    "huge-int": "1" * 5000,
    "int-beyond-64-bits": str(2**64),
    "duplicate-key": '{"a":1,"a":2}',
    "deep-lists": "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
    "bottomless": "[" * 200_000,
    "unknown-tag": tag("eval", code="1"),
    "dunder-tag": tag("__import__", name="os"),
    "tag-is-a-number": '{"$":1}',
    "tag-is-a-list": '{"$":["tuple"],"items":[]}',
    "missing-field": tag("tuple"),
    "set-of-lists": tag("set", items=[[1]]),
    "set-twice": tag("set", items=[1, 1]),
    "key-twice": tag("dict", items=[[1, 2], [1, 3]]),
    "key-is-a-list": tag("dict", items=[[[1], 2]]),
    "deque-overfull": tag("deque", items=[1, 2], maxlen=1),
    "deque-negative": tag("deque", items=[], maxlen=-1),
    "factory-unknown": tag("defaultdict", items=[], factory="eval"),
    "int-not-hex": tag("int", hex="0xzz"),
    "int-small": tag("int", hex="0x1"),
    "int-spaced": tag("int", hex=" 0x1_0000_0000_0000_0000"),
    "float-name": tag("float", value="infinity"),
    "complex-spelling": tag("complex", parts=["1", "2"]),
    "str-odd": tag("str", hex="a"),
    "str-not-utf8": tag("str", hex="ff"),
    "bytes-not-base64": tag("bytes", base64="!!"),
    "bytes-not-canonical": tag("bytes", base64="QUJ="),
    "size-overflow": tag("torch.Size", items=[2**63]),
    "dtype-by-attribute": tag("torch.dtype", name="nn"),
    "dtype-deep": '{"$":"torch.dtype","name":' + "[" * 400 + "]" * 400 + "}",
    "tag-deep": '{"$":' + "[" * 400 + "]" * 400 + "}",
    "size-huge": tag("torch.Size", items=[2**63 - 1, 2**63]),
    "deque-huge": tag("deque", items=[], maxlen=2**63),
    "factory-dotted": tag("defaultdict", items=[], factory="os.system"),
    "device-code": tag("torch.device", name="__import__('os')"),
    "device-unknown": tag("torch.device", name="fridge:0"),
    "scalar-dtype": tag("numpy.scalar", dtype="O", base64="AAAAAAAAAAA="),
    "scalar-length": tag("numpy.scalar", dtype="int8", base64="AAA="),
    "tensor-missing": tag("torch.Tensor", tensor="nope", dtype="float32"),
    "tensor-unused": "1",
    "tensor-other-dtype": tag("torch.Tensor", tensor="t", dtype="float64"),
    "tensor-unknown-dtype": tag("torch.Tensor", tensor="t", dtype="nn"),
    "array-object-dtype": tag("numpy.ndarray", tensor="t", dtype="|O"),
    "tensor-twice": f"[{', '.join([tag('torch.Tensor', tensor='t', dtype='float32')] * 2)}]",
}
UNKNOWN_TAGS = {"unknown-tag", "dunder-tag", "tag-is-a-number", "tag-is-a-list", "tag-deep"}


@pytest.mark.parametrize("name", BAD_JSON)
def test_what_is_never_written_is_refused_by_name(name):
    text = BAD_JSON[name]
    # Only where it is meant: an unused tensor is an error of its own, and would hide others.
    given = '"tensor": "t"' in text or name == "tensor-unused"
    tensors = {"t": StoredTensor("F32", (2,), bytes(8))} if given else {}
    with pytest.raises(TrainStateFormatError) as caught:
        decode(EncodedState(text, tensors))
    expected = TrainStateTagError if name in UNKNOWN_TAGS else TrainStateFormatError
    assert type(caught.value) is expected
    assert str(caught.value).startswith("train_state")
    assert len(str(caught.value)) < 500


def test_a_message_names_the_path_inside_the_state():
    text = json.dumps({"a": [{"$": "dict", "items": [["k", {"$": "odd"}]]}]})
    with pytest.raises(TrainStateTagError, match=r"^train_state\['a'\]\[0\]\['k'\]: .*'odd'"):
        decode(EncodedState(text))
