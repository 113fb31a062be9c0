"""What a manifest may take: of the drive, of memory, and of the format.

A reader knows nothing of a manifest before it has parsed it: its digest is inside. So the text is
bounded before it is parsed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offload.format.manifest import MAX_CONTENT_BYTES, MAX_MANIFEST_BYTES
from offload.format.names import MANIFEST_NAME
from offload.format.strict_json import MAX_VALUES, num_marks, parse_json

HEAD = b'{"format":2,"digest":"x","body":{"a":['
TAIL = b"0]}}"
MOST_GROWN_BYTES = 6 * MAX_MANIFEST_BYTES
"""Of memory, while a manifest is refused: it is read twice, and copied without its padding."""

CHILD = """
import resource, sys
from gds import PosixBackend
from offload.errors import ManifestError
from offload.checkpoint.reading import decode_manifest

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_manifest(PosixBackend(), sys.argv[1])
except ManifestError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, str(error)[:300])
"""


def refused(directory: Path, text: bytes) -> tuple[int, str]:
    """Return by how many bytes a process grew that refused a manifest, and what it said."""
    (directory / MANIFEST_NAME).write_bytes(text)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    grown_kib, _, message = done.stdout.partition(" ")
    return int(grown_kib) << 10, message


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1111,", b"1.5,", b'"",'], ids=repr)
def test_one_of_too_many_values_is_refused_before_it_is_parsed(tmp_path: Path, unit: bytes) -> None:
    """Of less than `MAX_CONTENT_BYTES`: small values take much more memory than text."""
    count = (MAX_CONTENT_BYTES - len(HEAD) - len(TAIL)) // len(unit)
    grown_bytes, message = refused(tmp_path, HEAD + unit * count + TAIL)
    assert f"at most {MAX_VALUES} are read" in message
    assert str(tmp_path) in message
    assert grown_bytes < MOST_GROWN_BYTES


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1111,", b'"",'], ids=repr)
def test_one_with_as_many_values_as_allowed_takes_bounded_memory(
    tmp_path: Path, unit: bytes
) -> None:
    """Its digest is wrong, which is known only after it has been parsed."""
    grown_bytes, message = refused(
        tmp_path, HEAD + unit * (MAX_VALUES // num_marks(unit) - 100) + TAIL
    )
    assert "digest" in message
    assert grown_bytes < MOST_GROWN_BYTES


def test_one_of_too_much_text_is_refused_and_padding_is_none(tmp_path: Path) -> None:
    text = HEAD + b'"' + b"a" * MAX_CONTENT_BYTES + b'",' + TAIL
    grown_bytes, message = refused(tmp_path, text + b" " * (MAX_MANIFEST_BYTES - len(text)))
    assert f"{len(text)} bytes of content, expected at most {MAX_CONTENT_BYTES}" in message
    assert grown_bytes < MOST_GROWN_BYTES
    padded = HEAD + TAIL
    _, message = refused(tmp_path, padded + b" " * (MAX_MANIFEST_BYTES - len(padded)))
    assert "bytes of content" not in message


def test_a_larger_file_is_refused_unread(tmp_path: Path) -> None:
    grown_bytes, message = refused(tmp_path, b" " * (MAX_MANIFEST_BYTES + 1))
    assert f"expected a file of at most {MAX_MANIFEST_BYTES}" in message
    assert grown_bytes < 16 << 20


def test_as_many_values_as_are_allowed_are_read() -> None:
    document = b"[" + b"1," * (MAX_VALUES - 1) + b"1]"
    assert len(parse_json(document)) == MAX_VALUES
    with pytest.raises(ValueError, match=f"about {MAX_VALUES + 1} values"):
        parse_json(document[:-1] + b",1]")
