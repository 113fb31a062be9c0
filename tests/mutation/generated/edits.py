"""What is common to all operators: an edit of a statement, and what they must leave alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.mutation.generated.points import Place
from tests.mutation.generated.statements import (
    Function,
    FunctionNode,
    Source,
    Statement,
    statements,
)

_TELLS: Final = ("warnings.warn", "_log.", "logging.")
"""Beginnings of calls whose arguments are words for people."""

_SHOWN: Final = 70
"""Characters of code in a line for people."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One way to break a statement."""

    operator: str
    statement: str
    """Name of the statement within its module."""

    spans: tuple[tuple[int, int, str], ...]
    """Bytes of the module from, to, and what takes their place."""

    shown: str
    """For people."""

    place: Place = "at"
    """What a test must reach to be able to notice it."""


@dataclass
class Site:
    """A statement, and where it is."""

    name: str
    node: Statement
    parent: ast.AST
    block: list[ast.stmt]
    """That it is one of; empty for an except clause."""

    @property
    def index(self) -> int:
        """Position in the block."""
        return next(i for i, other in enumerate(self.block) if other is self.node)

    @property
    def is_alone(self) -> bool:
        """Whether it is all that a block has."""
        return len(self.block) == 1


@dataclass
class Body:
    """A function to be mutated.

    Args:
        source: The module.
        function: One of its functions.
        defaults: For each name of a callable: the keywords that have a default.
    """

    source: Source
    function: Function
    defaults: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._words = _Words(self.function.node)
        parents = {id(child): (node, block) for node, block, child in _family(self.function.node)}
        self.sites = [
            Site(name, node, *parents.get(id(node), (self.function.node, [])))
            for name, node in statements(self.source, self.function)
        ]
        self._by_node = {id(site.node): site for site in self.sites}

    def is_words(self, node: ast.AST) -> bool:
        """Return whether a node only makes a text for people."""
        return self._words.has(node)

    def expressions(self, site: Site) -> Iterator[ast.AST]:
        """Yield the expressions of a statement, not of blocks in it, that make no words."""
        if not self.is_words(site.node):
            for child in _own_expressions(site.node):
                yield from self._within(child)

    def _within(self, node: ast.AST) -> Iterator[ast.AST]:
        if self.is_words(node):
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from self._within(child)

    def is_tail(self, site: Site, roots: tuple[type[ast.AST], ...]) -> bool:
        """Return whether nothing of a function, or of a loop, runs after a statement."""
        while site.block and site.block[-1] is site.node:
            parent = site.parent
            if isinstance(parent, roots):
                return True
            if isinstance(parent, ast.Try) and parent.orelse and site.block is parent.body:
                return False
            if not isinstance(parent, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                return False
            site = self._by_node[id(parent)]
            if isinstance(parent, ast.ExceptHandler):
                site = self._by_node[id(site.parent)]
        return False


def replace(
    body: Body,
    site: Site,
    operator: str,
    node: ast.AST,
    new: str,
    shown: str,
    place: Place = "at",
) -> Edit:
    """Return the edit that puts a text in the place of a node."""
    return Edit(operator, site.name, ((*body.source.span(node), new),), shown, place)


def is_call_to(node: ast.AST, *names: str) -> bool:
    """Return whether a node is a call of one of these plain names."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def brief(text: str) -> str:
    """Return code in one line, cut if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def _family(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt], ast.AST]]:
    for handler in getattr(node, "handlers", ()):
        yield node, [], handler
        yield from _family(handler)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            for child in block:
                yield node, block, child
                yield from _family(child)
    for case in getattr(node, "cases", ()):
        for child in case.body:
            yield case, case.body, child
            yield from _family(child)


def _own_expressions(statement: Statement) -> Iterator[ast.AST]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Match():
            return
        case ast.AnnAssign():
            if statement.value is not None:
                yield statement.value
        case _:
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr | ast.withitem):
                    yield child


class _Words:
    """The nodes of a function that only make texts: of errors, warnings and the log.

    Among them the statements that assign a variable which is used for nothing else.
    """

    def __init__(self, function: FunctionNode) -> None:
        self._nodes = set[int]()
        for node in ast.walk(function):
            if isinstance(node, ast.JoinedStr):
                self._take(node)
            elif isinstance(node, ast.Raise):
                for child in ast.iter_child_nodes(node):
                    self._take(child)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(_TELLS):
                for child in (*node.args, *node.keywords):
                    self._take(child)
        while self._take_variables(function):
            pass

    def has(self, node: ast.AST) -> bool:
        """Return whether a node is one of them."""
        return id(node) in self._nodes

    def _take(self, node: ast.AST) -> None:
        self._nodes.update(id(child) for child in ast.walk(node))

    def _take_variables(self, function: FunctionNode) -> bool:
        """Take assignments to variables that only words are made of; return whether it did."""
        loaded: dict[str, list[int]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                loaded.setdefault(node.id, []).append(id(node))
        only_words = {name for name, ids in loaded.items() if self._nodes.issuperset(ids)}
        new = False
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AugAssign) and id(node) not in self._nodes:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                if names and only_words.issuperset(names) and _binds_only_names(targets):
                    self._take(node)
                    new = True
            elif isinstance(node, ast.If) and id(node) not in self._nodes:
                inside = [*node.body, *node.orelse]
                if all(id(child) in self._nodes for child in inside):
                    self._take(node)
                    new = True
        return new


def _binds_only_names(targets: list[ast.expr]) -> bool:
    return all(isinstance(t, ast.Name | ast.Tuple | ast.Starred) for t in targets)
