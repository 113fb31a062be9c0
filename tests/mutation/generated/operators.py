"""The ways in which a statement is broken. Each operator yields the edits that it can make.

Left out are edits that change nothing, or that the first test of all notices:

- a condition that is negated (both constants are tried, or an operand is left out: whoever notices
  one of these notices the negation), and a function that returns at once or half way (each of its
  statements is left out by itself);
- a condition that is always true beside an `and` that loses an operand, or always false beside an
  `or`: the operand is the smaller edit;
- the first assignment to a variable or an attribute: the next use of it fails;
- a guarded statement beside its condition that is always false; `return` and `continue` where
  nothing follows;
- the first turn of a loop: each statement in the loop is left out by itself;
- a condition, or an operand of one, that something is not None, where the very next thing uses it:
  every test that gets there with None notices;
- words: messages of errors, warnings and the log, and what only they are made of.

Some of them can still be made, to see whether they are rightly left out: `SAMPLED`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from tests.mutation.generated.conditions import (
    comparison,
    condition,
    first_turn,
    inner_condition,
    negate,
    operand,
)
from tests.mutation.generated.edits import Body, Edit, Site, brief, is_call_to, replace
from tests.mutation.generated.statements import FunctionNode

Operator: TypeAlias = Callable[[Body, Site], Iterator[Edit]]

_SWAPPED_CALLS: Final = {"any": "all", "all": "any", "min": "max", "max": "min"}
_NOT_FLIPPED: Final = ("strict",)
"""Of `zip`: what it checks does not happen."""

_CLOCKS: Final = ("perf_counter", "monotonic")
"""Differences of times are for people."""

_NOTHING: Final = "__import__('contextlib').nullcontext()"


def delete(body: Body, site: Site) -> Iterator[Edit]:
    """Leave a statement out."""
    if _can_be_deleted(body, site):
        text = brief(body.source.of(site.node))
        yield replace(body, site, "delete", site.node, "pass", f"without `{text}`")


def _can_be_deleted(body: Body, site: Site) -> bool:
    node = site.node
    guarded = site.is_alone and isinstance(site.parent, ast.If) and site.block is site.parent.body
    if body.is_words(node) or guarded:
        return False
    match node:
        case ast.Expr(value=ast.Call()):
            return True
        case ast.AugAssign() | ast.Delete() | ast.Raise():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target]):
            return not _is_first_binding(body, site, target)
        case ast.Assign(targets=[ast.Name() as target]):
            return not _is_first_binding(body, site, target)
        case ast.Return(value=None | ast.Constant(value=None)):
            return not body.is_tail(site, (ast.FunctionDef,))
        case ast.Return():
            return not isinstance(site.parent, FunctionNode)
        case ast.Continue():
            return not body.is_tail(site, (ast.For, ast.While))
        case ast.Break():
            return True
    return False


def _is_first_binding(body: Body, site: Site, target: ast.expr) -> bool:
    """Return whether nothing can have given a value to a target before."""
    function = body.function.node
    is_init = function.name in ("__init__", "__post_init__")
    if isinstance(target, ast.Attribute) and not is_init:
        return False
    if isinstance(target, ast.Subscript):
        return False
    text = ast.unparse(target)
    if isinstance(target, ast.Name) and any(
        arg.arg == text
        for arg in (*function.args.args, *function.args.kwonlyargs, *function.args.posonlyargs)
    ):
        return False
    return not any(
        _binds(other.node, text) for other in body.sites if other.node.lineno < site.node.lineno
    )


def _binds(node: ast.AST, text: str) -> bool:
    match node:
        case ast.Assign():
            targets = node.targets
        case ast.AnnAssign() if node.value is not None:
            targets = [node.target]
        case ast.For():
            targets = [node.target]
        case ast.If() | ast.While():
            return any(
                isinstance(n, ast.NamedExpr) and n.target.id == text for n in ast.walk(node.test)
            )
        case _:
            return False
    return any(ast.unparse(n) == text for t in targets for n in ast.walk(t) if hasattr(n, "ctx"))


def swap(body: Body, site: Site) -> Iterator[Edit]:
    """Let a statement with an effect change places with the next one."""
    if not site.block or site.node is site.block[-1]:
        return
    first, second = site.node, site.block[site.index + 1]
    if body.function.node.name == "__init__" or not _order_may_matter(first, second):
        return
    if body.is_words(first) or body.is_words(second):
        return
    texts = [body.source.of(node) for node in (first, second)]
    spans = [body.source.span(node) for node in (first, second)]
    yield Edit(
        "swap",
        site.name,
        ((*spans[0], texts[1]), (*spans[1], texts[0])),
        f"`{brief(texts[0])}` after `{brief(texts[1])}`",
    )


def _order_may_matter(first: ast.AST, second: ast.AST) -> bool:
    """Return whether both have effects, one of them by a call, and none needs the other's names."""
    if not (_has_effect(first) and _has_effect(second)):
        return False
    if not any(isinstance(n, ast.Call) for s in (first, second) for n in ast.walk(s)):
        return False
    if isinstance(first, ast.Assign) and isinstance(second, ast.Assign):
        return False  # what is only looked at
    names = [{n.id: n.ctx for n in ast.walk(s) if isinstance(n, ast.Name)} for s in (first, second)]
    stored = [{n for n, c in found.items() if not isinstance(c, ast.Load)} for found in names]
    return not (stored[0] & names[1].keys() or stored[1] & names[0].keys())


def _has_effect(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.With():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Call(func=called)):
            return not (
                isinstance(called, ast.Name) and called.id[0].isupper()
            )  # it only makes one
    return False


def loop(body: Body, site: Site) -> Iterator[Edit]:
    """End a loop after its first turn."""
    node = site.node
    if not isinstance(node, ast.For) or body.is_words(node):
        return
    text = brief(body.source.header(node))
    last = body.source.span(node.body[-1])[1]
    indent = " " * node.body[0].col_offset
    if not isinstance(node.body[-1], ast.Return | ast.Raise | ast.Break):
        spans = ((last, last, f"\n{indent}break"),)
        yield Edit("first-only", site.name, spans, f"`{text}` ends after its first turn", "body")


def skip_first(body: Body, site: Site) -> Iterator[Edit]:
    """Leave out the first turn of a loop."""
    node = site.node
    if not isinstance(node, ast.For) or body.is_words(node):
        return
    text = brief(body.source.header(node))
    iterable = body.source.of(node.iter)
    if "count(" not in iterable:
        yield replace(
            body,
            site,
            "skip-first",
            node.iter,
            f"[*({iterable})][1:]",
            f"`{text}` leaves out its first turn",
            "body",
        )


def handler(body: Body, site: Site) -> Iterator[Edit]:
    """Let an except clause catch nothing, or one class less."""
    node = site.node
    if not isinstance(node, ast.ExceptHandler) or node.type is None:
        return
    text = f"except {body.source.of(node.type)}"
    yield replace(body, site, "no-except", node.type, "()", f"`{text}` catches nothing", "body")
    if isinstance(node.type, ast.Tuple) and len(node.type.elts) > 1:
        for index, one in enumerate(node.type.elts):
            rest = [body.source.of(e) for i, e in enumerate(node.type.elts) if i != index]
            name = body.source.of(one)
            new = f"({', '.join(rest)},)"
            yield replace(
                body, site, "no-class", node.type, new, f"`{text}` without {name}", "body"
            )


def context(body: Body, site: Site) -> Iterator[Edit]:
    """Leave the context manager of a `with` out, where its value is not used."""
    if isinstance(site.node, ast.With):
        for item in site.node.items:
            if item.optional_vars is None:
                expression = item.context_expr
                text = brief(body.source.of(expression))
                yield replace(
                    body, site, "no-with", expression, _NOTHING, f"without `with {text}`", "body"
                )


def keyword(body: Body, site: Site) -> Iterator[Edit]:
    """Leave out a keyword argument that has a default; turn a boolean around that has none."""
    for node in body.expressions(site):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        defaults = body.defaults.get(called, {})
        for argument in node.keywords:
            if argument.arg is None or argument.arg == "stacklevel" or body.is_words(argument):
                continue
            text = brief(body.source.of(argument))
            value = ast.unparse(argument.value)
            if argument.arg in defaults:
                if value != defaults[argument.arg]:
                    every = sorted([*node.args, *node.keywords], key=body.source.span)
                    edits = _without(body, every, every.index(argument))
                    yield Edit("keyword", site.name, edits, f"`{called}(...)` without `{text}`")
            elif value in ("True", "False") and argument.arg not in _NOT_FLIPPED:
                new = "False" if value == "True" else "True"
                yield replace(body, site, "flip", argument.value, new, f"`{text}` becomes {new}")


def _without(body: Body, every: Sequence[ast.AST], index: int) -> tuple[tuple[int, int, str], ...]:
    """Remove one of several expressions, and the comma behind it, or before the last."""
    start, stop = body.source.span(every[index])
    if index + 1 < len(every):
        stop = body.source.span(every[index + 1])[0]
    elif index:
        start = body.source.span(every[index - 1])[1]
    return ((start, stop, ""),)


def arithmetic(body: Body, site: Site) -> Iterator[Edit]:
    """Be off by one: in an index, in the bound of a slice, where one is added or subtracted."""
    for node in body.expressions(site):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if ast.unparse(node.right) == "1":
                text = brief(body.source.of(node))
                left = f"({body.source.of(node.left)})"
                yield replace(body, site, "off-by-one", node, left, f"`{text}` without the one")
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                value = None if bound is None else _whole_number(bound)
                if bound is not None and value is not None:
                    new = str(value - 1 if value > 0 or value == -1 else value + 1)
                    text = brief(body.source.of(node))
                    yield replace(body, site, "off-by-one", bound, new, f"`[{text}]` with {new}")


def _whole_number(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return None


def less(body: Body, site: Site) -> Iterator[Edit]:
    """Subtract nothing; leave out one of several things that are put together."""
    for node in body.expressions(site):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            told = any(clock in ast.unparse(node.left) for clock in _CLOCKS)
            if not isinstance(node.right, ast.Constant) and not told:
                text, right = brief(body.source.of(node)), brief(body.source.of(node.right))
                left = f"({body.source.of(node.left)})"
                yield replace(body, site, "less", node, left, f"`{text}` without `- {right}`")
        elif isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
            for index, one in enumerate(node.elts):
                if isinstance(one, ast.Starred) and len(node.elts) > 1:
                    rest = [body.source.of(e) for i, e in enumerate(node.elts) if i != index]
                    new = f"[{', '.join(rest)}]"
                    new = f"({', '.join(rest)},)" if isinstance(node, ast.Tuple) else new
                    text, gone = brief(body.source.of(node)), brief(body.source.of(one))
                    yield replace(body, site, "less", node, new, f"`{text}` without `{gone}`")


def function_call(body: Body, site: Site) -> Iterator[Edit]:
    """Take `all` for `any` and `max` for `min`; leave an order as it comes."""
    for node in body.expressions(site):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        text = brief(body.source.of(node))
        if node.func.id in _SWAPPED_CALLS:
            new = _SWAPPED_CALLS[node.func.id]
            yield replace(body, site, "other-call", node.func, new, f"`{text}` with {new}()")
        elif is_call_to(node, "sorted", "reversed"):
            first = body.source.of(node.args[0])
            yield replace(body, site, "unsorted", node, f"[*({first})]", f"`{text}` unsorted")


def returned(body: Body, site: Site) -> Iterator[Edit]:
    """Return a constant, where a truth value or perhaps nothing is returned."""
    node = site.node
    if not isinstance(node, ast.Return) or node.value is None or body.is_words(node):
        return
    function = body.function.node
    kind = ast.unparse(function.returns) if function.returns is not None else ""
    value = body.source.of(node.value)
    if kind == "bool":
        news = {"True": ["False"], "False": ["True"]}.get(value, ["True", "False"])
    elif "| None" in kind and value != "None":
        news = ["None"]
    else:
        return
    for new in news:
        shown = f"`{brief(body.source.of(node))}` returns {new}"
        yield replace(body, site, f"return-{new.lower()}", node.value, new, shown)


def return_early(body: Body, site: Site) -> Iterator[Edit]:
    """Return before a statement of a function that returns nothing."""
    function = body.function.node
    nothing = function.returns is not None and ast.unparse(function.returns) == "None"
    if nothing and site.parent is function and isinstance(site.node, ast.stmt):
        start, _ = body.source.span(site.node)
        indent = " " * site.node.col_offset
        text = brief(body.source.header(site.node))
        yield Edit(
            "return", site.name, ((start, start, f"return\n{indent}"),), f"return before `{text}`"
        )


OPERATORS: Final[tuple[Operator, ...]] = (
    delete,
    condition,
    inner_condition,
    first_turn,
    operand,
    comparison,
    swap,
    loop,
    handler,
    context,
    keyword,
    arithmetic,
    less,
    function_call,
    returned,
)
"""That every full run applies."""

SAMPLED: Final[tuple[Operator, ...]] = (negate, return_early, skip_first)
"""That are left out, since the others contain them; kept so that this can be looked at again."""
