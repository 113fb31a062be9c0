"""Functions and statements of a module, by names that survive edits elsewhere.

The name of a statement is made from its function's and a digest of its own text, without comments
and white space. A second one of the same text in a function gets a number.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Statement: TypeAlias = ast.stmt | ast.ExceptHandler
"""An except clause counts as one: what is in it may run or not."""

_NOT_CODE: Final = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_SHOWN_ONLY: Final = ("__repr__", "__str__")
"""Methods that make text for people."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a module or a method; what is defined within it belongs to it."""

    name: str
    """``Class.method`` or ``function``; a second one of a name, as of a property, gets a number."""

    node: FunctionNode

    digest: str
    """Of its code: without comments, white space and docstring."""


class Source:
    """The text of a module, with positions as `ast` gives them.

    Args:
        text: The module.
    """

    def __init__(self, text: str) -> None:
        self._lines = [line.encode() for line in text.splitlines(keepends=True)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._data = text.encode()
        self.tree = ast.parse(text)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes."""
        return (
            self._starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self._starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(self, start: int, stop: int) -> str:
        """Return the text between two positions."""
        return self._data[start:stop].decode()

    def of(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return self.text(*self.span(node))

    def replaced(self, edits: list[tuple[int, int, str]]) -> str:
        """Return the whole text with some spans, which do not overlap, replaced."""
        data = self._data
        for start, stop, new in sorted(edits, reverse=True):
            data = data[:start] + new.encode() + data[stop:]
        return data.decode()

    def header(self, statement: Statement) -> str:
        """Return the text of a statement without the blocks in it."""
        start, stop = self.span(statement)
        body = getattr(statement, "body", None)
        if body:
            stop = self.span(body[0])[0]
        return self.text(start, stop)


def short_digest(*texts: str) -> str:
    """Return a digest of code, whatever its comments and white space, as six hexadecimal digits."""
    plain = "\0".join(_without_comments(text) for text in texts)
    return hashlib.sha256(plain.encode()).hexdigest()[:6]


def _without_comments(code: str) -> str:
    """Return the tokens of code that need not be complete, without what lies between them."""
    found: list[str] = []
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    with suppress(tokenize.TokenError, IndentationError, SyntaxError):  # where it breaks off
        found.extend(token.string for token in tokens if token.type not in _NOT_CODE)
    return "".join("".join(found).split()) or "".join(code.split())


def functions(source: Source) -> Iterator[Function]:
    """Yield all functions and methods of a module, the outermost ones of each nest."""
    seen: Counter[str] = Counter()
    for prefix, node in _function_nodes(source.tree.body, ""):
        name = f"{prefix}{node.name}"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}.{seen[name]}"
        yield Function(name, node, _function_digest(source, node))


def _function_nodes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    for node in body:
        if isinstance(node, FunctionNode) and node.name not in _SHOWN_ONLY:
            yield prefix, node
        elif isinstance(node, ast.ClassDef):
            yield from _function_nodes(node.body, f"{prefix}{node.name}.")


def _function_digest(source: Source, node: FunctionNode) -> str:
    start, stop = source.span(node)
    text = source.text(start, stop)
    if docstring := docstring_of(node):
        first, last = source.span(docstring)
        text = source.text(start, first) + "..." + source.text(last, stop)
    return short_digest(text)


def docstring_of(node: FunctionNode) -> ast.stmt | None:
    """Return the statement that is a function's docstring."""
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first if isinstance(first.value.value, str) else None
    return None


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks that are directly in a node."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block
    for handler in getattr(node, "handlers", ()):
        yield handler.body


def statements(source: Source, function: Function) -> Iterator[tuple[str, Statement]]:
    """Yield the name (within the module) and node of all statements of a function, in order.

    Definitions within it are gone into; a docstring is left out.
    """
    seen: Counter[str] = Counter()
    for statement in _statement_nodes(function.node):
        name = f"{function.name}/{short_digest(source.header(statement))}"
        seen[name] += 1
        yield (f"{name}.{seen[name]}" if seen[name] > 1 else name), statement


def _statement_nodes(node: ast.AST) -> Iterator[Statement]:
    docstring = docstring_of(node) if isinstance(node, FunctionNode) else None
    children: list[Statement] = []
    for name in ("body", "handlers", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list):
            children += found
    for case in getattr(node, "cases", ()):
        children += case.body
    for child in children:
        if child is not docstring:
            yield child
            yield from _statement_nodes(child)
