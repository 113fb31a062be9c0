"""The first sentence of an error says what happened in at most 30 words; the rest comes after it.

Messages are read from the sources. A value in an f-string counts as one word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wings import ROOT, files

MOST_WORDS = 30

VALUE = "{}"


def text_of(node: ast.expr) -> str | None:
    """Return a message as it is written, or None for what is no text; of two, the longer one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(p.value if isinstance(p, ast.Constant) else VALUE for p in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = text_of(left), text_of(right)
            return None if texts == (None, None) else "".join(t or VALUE for t in texts)
        case ast.IfExp(body=body, orelse=orelse):
            return max(text_of(body), text_of(orelse), key=lambda text: len(text or ""))
    return None


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message that a file gives to an error."""
    tree = ast.parse(path.read_text())
    raised = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # Errors are also returned, and raised as what a function has made of the message.
        if node in raised or name.endswith(("Error", "BadParameter")) or name == "_fail":
            texts = (text_of(argument) for argument in node.args)
            yield from ((node.lineno, text) for text in texts if text and " " in text)


def first_sentence(text: str) -> str:
    """Return what comes before the first line end or full stop, without a path in front of it."""
    said = re.sub(r"^(\{\}[^:\s]*: )+", "", text)
    return re.split(r"\n|[.!?](?=\s|$)", said, maxsplit=1)[0]


@pytest.mark.parametrize("package", ["offload", "gds"])
def test_the_first_sentence_of_an_error_is_short(package: str) -> None:
    found = [(path, *message) for path in files(package) for message in messages(path)]
    assert len(found) > 100, "messages are found at all"
    long = {
        f"{path.relative_to(ROOT)}:{line}": sentence
        for path, line, text in found
        if len((sentence := first_sentence(text)).split()) > MOST_WORDS
    }
    assert not long


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('raise ValueError(f"{path}: one two three. Four five")', 3),
        ('raise gds.StorageError(5, f"one {x} three: four\\nfive", path)', 4),
        ('raise E("no")\nraise OSError("one " + ("two" if a else "two three") + f" {b}")', 4),
    ],
)
def test_words_are_counted_as_people_read_them(tmp_path: Path, code: str, words: int) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)
    ((_, text),) = messages(file)
    assert len(first_sentence(text).split()) == words
