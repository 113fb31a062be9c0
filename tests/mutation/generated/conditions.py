"""Operators on conditions: what is true, or false, more often than it was."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.mutation.generated.edits import Body, Edit, Site, brief, replace
from tests.mutation.generated.points import Place

_NEIGHBOURS: Final[dict[type[ast.cmpop], tuple[str, bool]]] = {
    ast.Lt: ("<=", True),
    ast.LtE: ("<", False),
    ast.Gt: (">=", True),
    ast.GtE: (">", False),
}
"""What takes the place of a comparison, and whether that is true more often."""


def condition(body: Body, site: Site) -> Iterator[Edit]:
    """Make a condition always true, or always false."""
    node = site.node
    if not isinstance(node, ast.If | ast.While) or body.is_words(node):
        return
    if isinstance(node.test, ast.Constant):
        return
    is_loop = isinstance(node, ast.While)
    for value, place, subsumed in (("True", "else", ast.And), ("False", "body", ast.Or)):
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, subsumed):
            continue
        if is_loop and value == "True" and not _has_exit(node):
            continue  # would never end, which every test notices and takes long to
        yield replace(
            body,
            site,
            value.lower(),
            node.test,
            _constant(body, node.test, value),
            f"`{brief(body.source.of(node.test))}` is always {value.lower()}",
            "at" if is_loop and value == "True" else place,
        )


def _constant(body: Body, test: ast.expr, value: str) -> str:
    """Return a constant that still assigns what the condition assigns."""
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(test)):
        return f"(({body.source.of(test)}), {value})[1]"
    return value


def _has_exit(loop: ast.While) -> bool:
    inside = [n for child in loop.body for n in ast.walk(child)]
    return any(isinstance(node, ast.Return | ast.Raise | ast.Break) for node in inside)


def inner_condition(body: Body, site: Site) -> Iterator[Edit]:
    """Make the condition of an expression always true or false; let everything pass a filter."""
    for node in body.expressions(site):
        if isinstance(node, ast.IfExp):
            for value in ("True", "False"):
                yield replace(
                    body,
                    site,
                    value.lower(),
                    node.test,
                    _constant(body, node.test, value),
                    f"`{brief(body.source.of(node.test))}` is always {value.lower()}",
                )
        for comprehension in getattr(node, "generators", ()):
            for test in comprehension.ifs:
                if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
                    continue
                yield replace(
                    body,
                    site,
                    "true",
                    test,
                    _constant(body, test, "True"),
                    f"`if {brief(body.source.of(test))}` lets everything pass",
                )


def first_turn(body: Body, site: Site) -> Iterator[Edit]:
    """Check something in the first turn of a loop only."""
    node = site.node
    if not isinstance(node, ast.If) or not isinstance(site.parent, ast.For) or body.is_words(node):
        return
    if not any(isinstance(child, ast.Raise | ast.Return) for child in node.body):
        return
    start, _ = body.source.span(site.parent)
    indent = " " * site.parent.col_offset
    test = body.source.of(node.test)
    once = f"all([_turns.pop() if _turns else False, ({test})])"
    yield Edit(
        "first-turn",
        site.name,
        ((start, start, f"_turns = [True]\n{indent}"), (*body.source.span(node.test), once)),
        f"`if {brief(test)}` in the first turn of its loop only",
        "else",
    )


def operand(body: Body, site: Site) -> Iterator[Edit]:
    """Leave out one operand of `and` or `or`."""
    for node, polarity in _with_polarity(body, site):
        if not isinstance(node, ast.BoolOp):
            continue
        word, is_and = ("and", True) if isinstance(node.op, ast.And) else ("or", False)
        for index, value in enumerate(node.values):
            rest = [f"({body.source.of(v)})" for i, v in enumerate(node.values) if i != index]
            yield replace(
                body,
                site,
                "operand",
                node,
                f"({f' {word} '.join(rest)})",
                f"`{brief(body.source.of(node))}` without `{brief(body.source.of(value))}`",
                _place(polarity, weaker=is_and),
            )


def comparison(body: Body, site: Site) -> Iterator[Edit]:
    """Move a bound by one: `<` becomes `<=`, and so on."""
    for node, polarity in _with_polarity(body, site):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        found = _NEIGHBOURS.get(type(node.ops[0]))
        if found is None:
            continue
        new, weaker = found
        left, right = body.source.of(node.left), body.source.of(node.comparators[0])
        yield replace(
            body,
            site,
            "bound",
            node,
            f"(({left}) {new} ({right}))",
            f"`{brief(body.source.of(node))}` with `{new}`",
            _place(polarity, weaker=weaker),
        )


def _with_polarity(body: Body, site: Site) -> Iterator[tuple[ast.AST, int]]:
    """Yield expressions, and whether truth of one is truth of the statement's condition.

    1: it is; -1: its truth is the condition's falsehood; 0: neither can be said.
    """
    known: dict[int, int] = {}
    if isinstance(site.node, ast.If):
        pending = [(site.node.test, 1)]
        while pending:
            node, polarity = pending.pop()
            known[id(node)] = polarity
            if isinstance(node, ast.BoolOp):
                pending += [(value, polarity) for value in node.values]
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                pending.append((node.operand, -polarity))
    for node in body.expressions(site):
        yield node, known.get(id(node), 0)


def _place(polarity: int, *, weaker: bool) -> Place:
    """Return where a test must be to notice that an expression is true more, or less, often."""
    if not polarity:
        return "at"
    return "else" if weaker == (polarity > 0) else "body"


def negate(body: Body, site: Site) -> Iterator[Edit]:
    """Turn a condition around."""
    node = site.node
    if isinstance(node, ast.If | ast.While) and not body.is_words(node):
        text = body.source.of(node.test)
        yield replace(body, site, "negate", node.test, f"(not ({text}))", f"not `{brief(text)}`")
