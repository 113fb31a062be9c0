"""Attacks on ``part.json``, ``store.json`` and ``calibration.json``.

`tests/contract/test_calibration.py` has which calibrations are believed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks import good
from tests.attacks.attack import Attack

_PART_BYTES, _STORE_BYTES = 4096, 512


def _padded(data: bytes, size: int = _PART_BYTES) -> bytes:
    assert len(data) <= size
    return data.ljust(size - 1) + b"\n" if len(data) < size else data


def _spoilt(**fields: object) -> bytes:
    return _padded(good.as_json(good.part({**good.PART, **fields})))


def _parts() -> Iterator[tuple[str, bytes, str]]:
    text = good.as_json(good.part())
    yield "empty", b"", "of 0 bytes, expected a file of 4096"
    yield "long", text.ljust(10_000), "of 10000 bytes, expected a file of 4096"
    yield "spaces", _padded(b""), "not a JSON document"
    yield "zero-bytes", bytes(_PART_BYTES), "not a JSON document"
    yield "pickle", _padded(b"cos\nsystem\n(S'touch PWNED'\ntR."), "not a JSON document"
    yield "deep", b"[" * _PART_BYTES, "nested too deeply"
    yield "nan", _padded(text.replace(b'"drive":1', b'"drive":NaN')), "NaN is not a JSON number"
    yield (
        "huge-integer",
        _padded(text.replace(b'"drive":1', b'"drive":' + b"9" * 400)),
        "400 digits",
    )
    yield "key-twice", _padded(text.replace(b'"drive":1', b'"drive":1,"drive":2')), "a key twice"
    yield "format", _padded(good.as_json({**good.part(), "format": True})), "format version True"
    yield "digest", _padded(good.as_json({**good.part(), "digest": "0" * 32})), "does not match"
    yield (
        "invalid-escapes",
        _padded(good.as_json({"format": 1, "invalid": "\x1b]2;owned\x07\n" * 90})),
        "not sealed",
    )
    its_body = "its body is"
    yield "store-id-surrogate", _spoilt(store_id="\ud800" * 32), its_body
    yield "store-id-escapes", _spoilt(store_id="\x1b[2J"), its_body
    yield "drive-bool", _spoilt(drive=True), its_body
    yield "field-unknown", _spoilt(__class__="os.system"), its_body
    yield "another-part", _padded(text), "is not the part that was sealed with it"


def _identities() -> Iterator[tuple[str, bytes]]:
    def padded(text: bytes) -> bytes:
        return _padded(text, _STORE_BYTES)

    yield "empty", b""
    yield "long", b" " * 100_000
    yield "deep", b"[" * _STORE_BYTES
    yield "list", padded(b"[1]")
    yield "id-list", padded(b'{"store_id":[]}')
    yield "id-traversal", padded(b'{"store_id":"../../../../../../../../etc/pas"}')
    yield "id-surrogate", padded(b'{"store_id":"' + b"\\ud800" * 32 + b'"}')
    yield "id-twice", padded(b'{"store_id":"%s","store_id":"%s"}' % (b"0" * 32, b"1" * 32))
    yield "utf-16", padded('{"store_id":1}'.encode("utf-16"))


def _calibrations() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "deep", b"[" * 60_000
    yield "long", b" " * 70_000
    yield "field-unknown", b'{"__class__":"os.system"}'


def attacks() -> Iterator[Attack]:
    """Yield all of them."""
    for name, content, reason in _parts():
        yield Attack(name, "part", "{part}/part.json", reason, content, num_directories=2)
    for name, content in _identities():
        yield Attack(
            f"store-{name}", "small", "store.json", "", content, stage="ignored", num_directories=2
        )
    for name, content in _calibrations():
        yield Attack(
            f"calibration-{name}", "small", "calibration.json", "", content, stage="ignored"
        )
