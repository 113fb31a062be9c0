"""Operators on conditions: what is true, or false, more often than it was."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
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
        if _fails_at_once(site, node, value):
            continue
        yield replace(
            body,
            site,
            value.lower(),
            node.test,
            _constant(body, node.test, value),
            f"`{brief(body.source.of(node.test))}` is always {value.lower()}",
            "at" if is_loop and value == "True" else place,
        )


def _fails_at_once(site: Site, node: ast.If | ast.While, value: str) -> bool:
    """Return whether a condition is that something is there, and what depends on it uses it.

    Whatever test gets so far with None notices.
    """
    found = _none_check(node.test)
    if found is None:
        return False
    name, is_none = found
    if is_none == (value == "True"):
        return False
    used = site.block[site.index + 1 :] if is_none else node.body
    return name in {
        ast.unparse(inner.value)
        for statement in used[:1]
        for inner in ast.walk(statement)
        if isinstance(inner, ast.Attribute)
    }


def _none_check(node: ast.AST) -> tuple[str, bool] | None:
    """Return what is compared with None, and whether it must be None."""
    match node:
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]
        ):
            inner = left.target if isinstance(left, ast.NamedExpr) else left
            return ast.unparse(inner), isinstance(op, ast.Is)
    return None


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
            if _guards_the_next(node.values, index, is_and=is_and):
                continue
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


def _guards_the_next(values: Sequence[ast.expr], index: int, *, is_and: bool) -> bool:
    """Return whether an operand only keeps the next one from using None."""
    found = _none_check(values[index])
    if found is None or found[1] == is_and or index + 1 == len(values):
        return False
    inner = ast.walk(values[index + 1])
    return found[0] in {ast.unparse(n.value) for n in inner if isinstance(n, ast.Attribute)}


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
