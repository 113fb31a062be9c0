"""Attacks on ``train_state.safetensors``: headers, JSON with the right digest, and wrong ties."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from offload.format.train_state import EncodedState, pack_encoded
from tests.attacks.attack import Attack
from tests.attacks.good import STORE_ID

_TIES = {"store_id": STORE_ID, "generation": "2", "step": "2"}
"""Those of the checkpoint that they are put into, which is the second of its store."""


def _packed(text: str, capacity_bytes: int = 2048) -> bytes:
    return pack_encoded(EncodedState(text), capacity_bytes=capacity_bytes, header=_TIES)


def _tag(name: object, /, **fields: object) -> str:
    return json.dumps({"$": name, **fields})


def _raw(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _files() -> Iterator[tuple[str, bytes, str]]:
    good = _packed("1")
    yield "empty", b"", "not a safetensors file"
    yield "gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + good, "claims? a header of"
    yield "pickle", b"cos\nsystem\n(S'touch PWNED'\ntR.", "claims? a header of"
    yield "torch-save", b"PK\x03\x04" + bytes(60), "claims? a header of|begins with"
    yield "length-2-to-63", _raw(b"{}", 2**63), "claim a header of 9223372036854775808"
    yield "length-zero", _raw(b""), "begins with"
    yield "length-past-the-end", _raw(b"{}", 1000), "claims a header of 1000"
    yield "zero-bytes", bytes(8192), "zero bytes in its header"
    yield "no-metadata", _raw(b"{}"), "without 'train_state'"
    yield "metadata-number", _raw(b'{"__metadata__":{"train_state":1}}'), "expected a string"
    yield "version", good.replace(b'format":"1"', b'format":"2"'), "train_state_format is '2'"
    yield "digest", good.replace(b'"train_state":"1"', b'"train_state":"2"'), "has the digest"
    respelled = good.replace(b'"train_state":"1"', b'"train_state": "1"')[: len(good)]
    yield "respelled", respelled, "not as this package writes them"
    yield "trailing", good + b"\0" * 8, "header and data take"
    others = pack_encoded(
        EncodedState("1", {}), capacity_bytes=2048, header={**_TIES, "generation": "1"}
    )
    yield "another-checkpoints", others, "belongs to another checkpoint"
    huge = b'{"t":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (2**60, 2**62)
    yield "tensor-of-exabytes", _raw(huge), "header and data take"


def _texts() -> Iterator[tuple[str, str, str]]:
    yield "not-json", "{", "not JSON"
    yield "integer-of-5000-digits", "9" * 5000, "5000 digits"
    yield "deep-objects", '{"a":' * 100_000, "nested too deeply"
    yield "deep-tuples", '{"$":"tuple","items":[' * 150 + "1" + "]}" * 150, "deeper than"
    for tag in ("eval", "os.system", "__reduce__", "torch.nn.Module"):
        yield f"tag-{tag}", _tag(tag, items=["id"], code="id"), "the tag .* is unknown"
    yield "factory-dotted", _tag("defaultdict", items=[], factory="os.system"), "default_factory"
    yield "dtype-lazy-module", _tag("torch.dtype", name="_dynamo"), "train_state"
    yield "device", _tag("torch.device", name="__import__('os')"), "train_state"
    yield "size-huge", _tag("torch.Size", items=[2**63 - 1, 2**63]), "train_state"
    yield "deque-huge", _tag("deque", items=[], maxlen=2**63), "maxlen"


def attacks() -> Iterator[Attack]:
    """Yield all; `tests/format/test_train_state_refusals.py` has what the parser refuses."""
    target = "{step}/train_state.safetensors"
    for name, content, reason in _files():
        yield Attack(name, "train_state", target, reason, content, stage="read")
    for name, text, reason in _texts():
        capacity = -(-(len(json.dumps(text)) + 1024) // 8) * 8
        content = _packed(text, capacity)
        yield Attack(f"json-{name}", "train_state", target, reason, content, stage="read")
