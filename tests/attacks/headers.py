"""Attacks on the headers of tensor files, in a checkpoint whose manifest is good.

Only the start of the good file is overwritten: a file of another size is refused before anybody
looks at its header. `tests/format/test_tensorfile.py` has what the parser refuses.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from typing import Any

from tests.attacks import good
from tests.attacks.attack import Attack

_START = 4096
_ROOM = _START - 8

Tree = dict[str, Any]


def _tree(arrays: bool = False) -> Tree:
    """Return the good header of ``model.safetensors``, or of a state array."""
    size = 4 if arrays else 2
    tree: Tree = {} if arrays else {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, _, shape, *_ in good.BODY["parameters"]:
        stop = offset + size * shape[0] * (shape[1] if len(shape) > 1 else 1)
        dtype = "F32" if arrays else "BF16"
        tree[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    return tree


def start(tree: object, length: int | None = None, *, arrays: bool = False) -> bytes:
    """Return the first 4096 bytes of a file: a length, JSON (or any bytes), and spaces."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree, separators=(",", ":")).encode()
    assert len(text) <= _ROOM, len(text)
    return struct.pack("<Q", _ROOM if length is None else length) + text.ljust(_ROOM)


def _changed(name: str, **fields: object) -> Tree:
    tree = copy.deepcopy(_tree())
    tree[name].update(fields)
    return tree


def _text(tree: Tree) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def _renamed(new: str) -> bytes:
    tree = {new if key == "0.weight" else key: value for key, value in _tree().items()}
    return start(tree)


def _starts() -> Iterator[tuple[str, bytes, str]]:
    good_text = _text(_tree())
    damaged = "damaged header"
    for name, length in (("2-to-63", 2**63), ("at-the-limit", 100_000_000)):
        yield f"length-{name}", start(good_text, length), damaged
    yield "length-to-the-end", start(good_text, _ROOM + 2 * 1404), "its header takes"
    yield "not-json", start(b"{nope"), damaged
    yield "deep", start(b'{"a":' + b"[" * 4000), damaged
    yield "tensor-twice", start(good_text[:-1] + b"," + good_text[1:]), "twice"
    other = "its header lists other tensors than the manifest"
    yield "name-traversal", _renamed("../../../../etc/passwd"), other
    yield "name-zero-byte", _renamed("a\0b"), other
    yield "name-long", _renamed("x" * 3000), other
    yield "name-surrogate", _renamed("\ud800"), damaged
    yield "name-escapes", _renamed("\x1b]2;owned\x07[/red]"), other
    yield "shape-transposed", start(_changed("0.weight", shape=[30, 40])), other
    yield "shape-wraps", start(_changed("0.weight", shape=[2**32 + 1, 2**32 - 1])), damaged
    yield "dtype-other", start(_changed("0.weight", dtype="F16")), other
    yield "offsets-huge", start(_changed("0.weight", data_offsets=[2**62, 2**62 + 2400])), damaged


def attacks() -> Iterator[Attack]:
    """Yield all of them."""
    target = "{step}/model.safetensors"
    for name, content, reason in _starts():
        yield Attack(name, "header", target, reason, content, start_only=True)
    swapped = _tree(arrays=True)
    swapped["0.weight"], swapped["1.weight"] = swapped["1.weight"], swapped["0.weight"]
    master = "{step}/master.safetensors"
    yield Attack(
        "array-length", "header", master, "damaged header", start(b"{}", 2**62), start_only=True
    )
    yield Attack(
        "array-names-swapped",
        "header",
        master,
        "its header lists other tensors",
        start(swapped),
        start_only=True,
    )
    for name, content in (("empty", b""), ("seven-bytes", b"\x10" + bytes(6)), ("only", start({}))):
        reason = f"a file of {len(content)} bytes, expected a file of"
        yield Attack(f"file-{name}", "header", target, reason, content)
