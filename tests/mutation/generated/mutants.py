"""Mutants: one edit of one statement of a module, under a name that survives edits elsewhere."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.generated.edits import Body, Edit
from tests.mutation.generated.operators import OPERATORS, Operator
from tests.mutation.generated.points import point_name
from tests.mutation.generated.statements import Source, functions, short_digest
from tests.mutation.generated.targets import MODULES
from tests.mutation.mutation import ROOT, MutationError

_LIBRARY: Final = ("offload", "gds")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one edit."""

    name: str
    """``module.function/operator/digest``, the digest being of the statement and of the edit."""

    function: str
    """``module.function``"""

    code: str
    """Digest of that function's code: while it stays, what was found of the mutant stays."""

    point: str
    """What a test must reach to notice it."""

    file: str
    """The module's path within the checkout."""

    line: int
    shown: str
    """The edit, for people."""

    spans: tuple[tuple[int, int, str], ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it changes: one."""
        return (self.file,)

    def mutated(self, text: str) -> str:
        """Return the text of the module with the edit."""
        return Source(text).replaced([*self.spans])

    def apply(self, root: Path) -> None:
        """Edit a copy of the checkout.

        Raises:
            MutationError: The edit makes no Python, or none that is different.
        """
        path = root / self.file
        before = path.read_text()
        after = self.mutated(before)
        try:
            if ast.dump(ast.parse(after)) == ast.dump(ast.parse(before)):
                raise MutationError(f"{self.name}: the edit changes nothing")
        except SyntaxError as error:
            raise MutationError(f"{self.name}: {error}:\n{after}") from error
        path.write_text(after)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.shown}"


def mutants_of(
    modules: Mapping[str, str] = MODULES,
    operators: Sequence[Operator] = OPERATORS,
    root: Path = ROOT,
) -> list[Mutant]:
    """Return all mutants of some modules, in the order of their lines.

    Args:
        modules: Path of each within the checkout, by short name.
        operators: How statements are edited.
        root: The checkout.
    """
    defaults = known_defaults(root)
    found: list[Mutant] = []
    for module, path in modules.items():
        found += mutate((root / path).read_text(), module, path, defaults, operators)
    return found


def mutate(
    text: str,
    module: str,
    path: str,
    defaults: dict[str, dict[str, str]],
    operators: Sequence[Operator] = OPERATORS,
) -> Iterator[Mutant]:
    """Yield the mutants of one module.

    Args:
        text: The module.
        module: Its short name.
        path: Its path, for people.
        defaults: As from `known_defaults`.
        operators: How statements are edited.
    """
    source = Source(text)
    for function in functions(source):
        body = Body(source, function, defaults)
        seen: Counter[str] = Counter()
        for site in body.sites:
            for edit in (edit for operator in operators for edit in operator(body, site)):
                name = _name(source, module, function.name, site.node, edit)
                seen[name] += 1
                yield Mutant(
                    name=f"{name}.{seen[name]}" if seen[name] > 1 else name,
                    function=f"{module}.{function.name}",
                    code=function.digest,
                    point=point_name(module, edit.statement, edit.place),
                    file=path,
                    line=site.node.lineno,
                    shown=edit.shown,
                    spans=edit.spans,
                )


def _name(source: Source, module: str, function: str, node: ast.AST, edit: Edit) -> str:
    """Return a name that depends on the function, its statement and the edit, and nothing else."""
    edited = [part for start, stop, new in edit.spans for part in (source.text(start, stop), new)]
    # Two edits of a statement may replace the same text at different places.
    first = source.span(node)[0]
    before = source.text(first, edit.spans[0][0]) if edit.spans[0][0] > first else ""
    digest = short_digest(source.header(node), before, *edited)  # type: ignore[arg-type]
    return f"{module}.{function}/{edit.operator}/{digest}"


def known_defaults(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return, for each name of a function or class of the library, its keywords with defaults.

    A keyword counts if it has one and the same default wherever that name is defined.
    """
    found: dict[str, list[dict[str, str | None]]] = {}
    for part in _LIBRARY:
        for file in sorted((root / part).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef):
                    found.setdefault(node.name, []).append(_defaults(node.args))
                elif isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(_fields(node))
    return {
        name: {
            keyword: default
            for keyword, default in several[0].items()
            if default is not None and all(other.get(keyword) == default for other in several)
        }
        for name, several in found.items()
    }


def _defaults(args: ast.arguments) -> dict[str, str | None]:
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    out: dict[str, str | None] = {
        argument.arg: None if index < without else ast.unparse(args.defaults[index - without])
        for index, argument in enumerate(positional)
    }
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        out[argument.arg] = None if default is None else ast.unparse(default)
    return out


def _fields(node: ast.ClassDef) -> dict[str, str | None]:
    """Return what the constructor of a class takes: its own, or that of a dataclass."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return _defaults(child.args)
    return {
        child.target.id: None if child.value is None else ast.unparse(child.value)
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
