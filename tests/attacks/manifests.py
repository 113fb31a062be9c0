"""Attacks on ``manifest.json``: text that is no manifest, and manifests that lie.

The liars have the right digest: it protects against accidents, and anybody can compute it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.attacks import good
from tests.attacks.attack import Attack, Stage

Body = dict[str, Any]

_GOOD = good.manifest()
_PICKLE = b"cos\nsystem\n(S'touch PWNED'\ntR."
_NOT_JSON = "not a JSON document"
_CONTRADICTORY = "contradictory content"


def _replaced(old: str, new: str) -> bytes:
    assert old.encode() in _GOOD, old
    return _GOOD.replace(old.encode(), new.encode(), 1)


def _text() -> Iterator[tuple[str, bytes, str]]:
    """Yield name, content and reason of what is not the JSON of a manifest."""
    yield "empty", b"", _NOT_JSON
    yield "byte-order-mark", b"\xef\xbb\xbf" + _GOOD, _NOT_JSON
    yield "utf-16", _GOOD.decode().encode("utf-16"), "not a JSON document.*(UTF-8|zero bytes)"
    yield "not-utf-8", _replaced("0.weight", "0.w\x00").replace(b"\0", b"\xff"), "not UTF-8"
    yield "gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + _GOOD, _NOT_JSON
    yield "pickle", _PICKLE, _NOT_JSON
    yield "python-literal", repr(good.signed(good.BODY)).encode(), _NOT_JSON
    yield "zero-bytes", b"\0" * 8192, "not a JSON document.*zero bytes"
    yield "cut-short", _GOOD[: len(_GOOD) // 2], _NOT_JSON
    yield "two-documents", _GOOD + _GOOD, _NOT_JSON
    yield "nan", _replaced("0.001", "NaN"), "NaN is not a JSON number"
    yield "number-that-overflows", _replaced("0.001", "1e999"), "not finite"
    yield "integer-of-10000-digits", _replaced("0.001", "9" * 10_000), "10000 digits"
    yield "nested-100000-lists", b'{"format":' + b"[" * 100_000, "nested too deeply"
    yield "key-twice", _replaced('"step":2', '"step":2,"step":3'), "a key twice: 'step'"
    yield "key-twice-by-escape", _replaced('"step":2', '"step":2,"\\u0073tep":3'), "a key twice"


def _documents() -> Iterator[tuple[str, object, str]]:
    """Yield name, document and reason of JSON that is no manifest of this version."""
    yield "list", [good.signed(good.BODY)], "it has no 'format'"
    yield "no-format", {"body": {}}, "it has no 'format'"
    for name, version in (
        ("bool", True),
        ("text", "1"),
        ("zero", 0),
        ("future", 2),
        ("long-text", "1" * 50_000),
    ):
        document = {**good.signed(good.BODY), "format": version}
        yield f"format-{name}", document, "format version .*, expected 1; it was written by another"
    yield "no-body", {"format": 1, "digest": good.blake2b(None)}, "does not match its digest"
    yield "body-a-list", good.signed([good.BODY]), "does not match its digest"
    for name, digest in (
        ("list", ["0" * 32]),
        ("wrong", "0" * 32),
        ("upper-case", good.blake2b(good.BODY).upper()),
    ):
        yield (
            f"digest-{name}",
            {"format": 1, "digest": digest, "body": good.BODY},
            "does not match its digest",
        )
    escape = "\x1b]2;owned\x07[/red]\r\n" * 1000
    yield "withdrawn-with-escapes", {"format": 1, "invalid": escape}, "withdrawn: "
    yield "withdrawn-deep", {"format": 1, "invalid": json.loads("[" * 500 + "]" * 500)}, "withdrawn"


def put(*path: str | int, value: object) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def _many_arrays(body: Body) -> None:
    names = [f"a{index}" for index in range(3000)]
    body["parameters"][0][4] = names
    body["arrays"] = [[name, "F32", 1] for name in [*good.BODY["parameters"][0][4], *names]]
    body["digests"].update({name: [None, None] for name in names})


def _array_called(name: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        for parameter in body["parameters"]:
            parameter[4] = ["master", name, "exp_avg_sq"]
        body["arrays"][1][0] = name
        body["digests"] = {
            name if key == "exp_avg" else key: value for key, value in body["digests"].items()
        }

    return change


def _sized(size: int, *, chunk: int, chunks: int, blocks: int) -> Callable[[Body], None]:
    """Make one parameter huge, with as many digests as that asks for."""

    def change(body: Body) -> None:
        for key, at in (("parameters", 2), ("model", 2)):
            body[key][1][at] = [size]
        body["chunk_elements"] = chunk
        body["digests"] = {name: ["0" * 16] * chunks for name in body["digests"]}
        body["model_digests"] = ["0" * 16] * blocks

    return change


_DEEP = json.loads('{"tuple":[' * 60 + "1" + "]}" * 60)

LIES: dict[str, Callable[[Body], None]] = {
    "store-id-traversal": put("store_id", value="../../../../tmp/other"),
    "store-id-surrogate": put("store_id", value="\ud800" * 32),
    "generation-2-to-63": put("generation", value=2**63),
    "step-2-to-63": put("step", value=2**63),
    "created-not-a-time": put("created", value="[/bold]\x1b[2J"),
    "created-long": put("created", value="2026-01-01" * 1000),
    "optimizer-with-escapes": put("optimizer", value="\x1b]2;owned\x07[/red][bold]\n"),
    "torch-version-long": put("torch_version", value="2" * 5000),
    "group-params": put("groups", 0, "params", value=["0.weight"]),
    "group-param-names": put("groups", 0, "param_names", value=["x"]),
    "group-key-surrogate": put("groups", 0, "\ud800", value=1),
    "hyper-deep": put("groups", 0, "lr", value=_DEEP),
    "hyper-object": put("groups", 0, "lr", value={"$": "eval", "code": "1"}),
    "hyper-float-by-name": put("groups", 0, "lr", value={"float": "1e5"}),
    "hyper-float-long": put("groups", 0, "lr", value={"float": "1" * 5000}),
    "hyper-tensor-huge": put(
        "groups", 0, "lr", value={"tensor": "0.1", "dtype": "float32", "shape": [1 << 50]}
    ),
    "hyper-tensor-of-two": put(
        "groups", 0, "lr", value={"tensor": "0.1", "dtype": "float32", "shape": [2]}
    ),
    "hyper-tensor-overflow": put(
        "groups", 0, "lr", value={"tensor": "300", "dtype": "int8", "shape": []}
    ),
    "hyper-tensor-not-a-number": put(
        "groups", 0, "lr", value={"tensor": "os.system", "dtype": "float32", "shape": []}
    ),
    # Looking these up as attributes of torch would import a module, or find what is no dtype.
    "hyper-dtype-a-module": put(
        "groups", 0, "lr", value={"tensor": "0.5", "dtype": "_dynamo", "shape": []}
    ),
    "hyper-dtype-complex": put(
        "groups", 0, "lr", value={"tensor": "1", "dtype": "complex64", "shape": []}
    ),
    "scalar-long": put("scalars", 0, 0, value=["step", "int", "9" * 4000]),
    "scalar-code": put("scalars", 0, 0, value=["step", "f32", "__import__('os')"]),
    "chunk-zero": put("chunk_elements", value=0),
    "chunk-2-to-80": put("chunk_elements", value=2**66),
    "shares-huge": put("shares", value=[2**62]),
    "shares-of-60000": put("shares", value=[1] * 60_000),
    "shares-without-parts": put("shares", value=[1, 1]),
    "array-traversal": _array_called("../../../../etc/passwd"),
    "array-zero-byte": _array_called("exp\0avg"),
    "array-called-model": _array_called("model"),
    "array-long-name": _array_called("a" * 5000),
    "arrays-3000": _many_arrays,
    "arrays-repeated": put("parameters", 0, 4, value=["master", "exp_avg", "exp_avg"]),
    "arrays-differ": put("arrays", 0, 1, value="F64"),
    "parameter-name-surrogate": put("parameters", 0, 0, value="\ud83d"),
    "parameter-not-in-model": put("parameters", 0, 0, value="../../0.weight"),
    "parameter-group-negative": put("parameters", 0, 3, value=-1),
    "parameter-twice": lambda body: body["parameters"].append(body["parameters"][0]),
    "shape-overflows": _sized(2**62, chunk=1024, chunks=2, blocks=1),
    "shape-of-1000-dimensions": put("model", 0, 2, value=[1] * 1000),
    "model-tensor-twice": lambda body: body["model"].append(body["model"][0]),
    "model-alias-surrogate": put("model", 0, 3, value=["\ud800"]),
    "model-name-reserved": lambda body: body["model"].append(["__metadata__", "F32", [], []]),
    "terabytes": _sized(2**45, chunk=1024, chunks=2, blocks=1),
    "digests-too-few": put("digests", "exp_avg", value=["0" * 16]),
    "digests-of-another-array": put("digests", "exec", value=["0" * 16] * 2),
    "model-digests-missing": put("model_digests", value=[]),
    "model-block-huge": put("model_block_bytes", value=2**62),
    "parts-for-one-directory": lambda body: body.update(parts=good.two_drives()["parts"]),
}

PART_LIES: dict[str, Callable[[Body], None]] = {
    "part-name-traversal": put("parts", 0, "name", value="../../etc"),
    "part-name-zero": put("parts", 0, "name", value="part-0"),
    "part-name-long": put("parts", 0, "name", value="part-" + "1" * 5000),
    "part-directory-relative": put("parts", 0, "directory", value="../../../etc"),
    "part-directory-zero-byte": put("parts", 0, "directory", value="/tmp/\0/etc"),
    "part-directory-surrogate": put("parts", 0, "directory", value="/tmp/\ud800"),
    "part-generation": put("parts", 0, "generation", value=1),
    "part-digest": put("parts", 0, "digest", value="0" * 32),
    "part-twice": lambda body: body["parts"].append(body["parts"][0]),
}

# Manifests that are whole, and pass for one until an optimizer, or the drive, is asked.
LATER: dict[str, tuple[Callable[[Body], None], str, Stage]] = {
    "sixteen-gigabytes": (
        _sized(2**33, chunk=2**33, chunks=2, blocks=1025),
        "model.safetensors: a file of .* bytes, expected a file of 171",
        "open",
    ),
    "part-directory-nowhere": (
        lambda body: body.update(good.two_drives()),
        "master.safetensors: a file of|spread over 2 directories",
        "store",
    ),
    "optimizer-os-system": (
        put("optimizer", value="os.system"),
        "was made with os.system",
        "restore",
    ),
    "one-group-too-many": (
        lambda body: body["groups"].append(body["groups"][0]),
        "has 2 parameter groups",
        "restore",
    ),
    "lr-nan": (
        put("groups", 0, "lr", value={"float": "nan"}),
        "'lr'.* is nan, expected a number",
        "restore",
    ),
    "amsgrad-text": (
        put("groups", 0, "amsgrad", value="os.system"),
        "'amsgrad'.* is 'os.system', expected True or False",
        "restore",
    ),
    "amsgrad-without-its-array": (
        put("groups", 0, "amsgrad", value=True),
        "was in group 0 and kept",
        "restore",
    ),
    "step-count-nan": (put("scalars", 0, 0, 2, value="nan"), "step count .* is nan", "restore"),
    "step-count-a-plain-number": (
        put("scalars", 0, 0, value=["step", "int", "2"]),
        "scalar state of '0.weight'",
        "restore",
    ),
    "scalar-of-another-name": (
        put("scalars", 0, 0, 0, value="__class__"),
        "scalar state of '0.weight'",
        "restore",
    ),
    "parameter-renamed": (
        lambda body: [
            body[key][0].__setitem__(0, "../0.weight") for key in ("parameters", "model")
        ],
        "its header lists other tensors",
        "open",
    ),
}


def attacks() -> Iterator[Attack]:
    """Yield all of them."""
    target = "{step}/manifest.json"
    for name, content, reason in _text():
        yield Attack(name, "manifest", target, reason, content)
    for name, document, reason in _documents():
        yield Attack(name, "manifest", target, reason, good.as_json(document))
    for lies, base in ((LIES, good.body), (PART_LIES, good.two_drives)):
        for name, change in lies.items():
            body = base()
            change(body)
            assert good.manifest(body) != good.manifest(base()), name
            yield Attack(name, "manifest", target, _CONTRADICTORY, good.manifest(body))
    for name, (change, reason, stage) in LATER.items():
        body = good.body()
        change(body)
        assert body != good.BODY, name
        yield Attack(name, "manifest", target, reason, good.manifest(body), stage=stage)
