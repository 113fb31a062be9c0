"""The generator makes the mutants that it should, under names that stay."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.generated.mutants import Mutant, known_defaults, mutants_of, mutate
from tests.mutation.generated.operators import OPERATORS, SAMPLED, Operator
from tests.mutation.generated.statements import Source, functions
from tests.mutation.generated.targets import MODULES, NOT_FOR_MUTANTS, TEST_FOLDERS
from tests.mutation.mutation import ROOT, MutationError

DEFAULTS = {"open_it": {"shared": "False"}, "write": {}}


def made(body: str, *operators: Operator, returns: str = "int") -> dict[str, str]:
    """Return the mutants of a function by their operators' names: its body after the edit."""
    text = f"def f(self, a, b, c, names) -> {returns}:\n"
    text += textwrap.indent(textwrap.dedent(body), "    ")
    found: dict[str, str] = {}
    for mutant in mutate(text, "m", "m.py", DEFAULTS, operators or OPERATORS):
        after = mutant.mutated(text)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(text)), mutant
        operator = mutant.name.split("/")[1]
        key = operator if operator not in found else f"{operator} {mutant.shown}"
        found[key] = ast.unparse(ast.parse(after).body[0].body)  # type: ignore[attr-defined]
    return found


CASES = {
    "a call": ("a.sync()\nreturn b", {"delete": "pass\nreturn b"}),
    "calls in order": (
        "a.sync()\na.rename(b)",
        {
            "delete": "pass\na.rename(b)",
            "delete without `a.rename(b)`": "a.sync()\npass",
            "swap": "a.rename(b)\na.sync()",
        },
    ),
    "a name that the next call needs": (
        "a.check()\nx = a.take()\nx.sync()",
        {
            "delete": "pass\nx = a.take()\nx.sync()",
            "delete without `x.sync()`": "a.check()\nx = a.take()\npass",
            "swap": "x = a.take()\na.check()\nx.sync()",
        },
    ),
    "a guard": (
        "if a:\n    return b\nreturn c",
        {"true": "if True:\n    return b\nreturn c", "false": "if False:\n    return b\nreturn c"},
    ),
    "a condition that assigns": (
        "if (x := a()) is None:\n    return b\nreturn x",
        {
            "true": "if ((x := a()) is None, True)[1]:\n    return b\nreturn x",
            "false": "if ((x := a()) is None, False)[1]:\n    return b\nreturn x",
        },
    ),
    "and": (
        "if a and b:\n    return c\nreturn 0",
        {
            "false": "if False:\n    return c\nreturn 0",
            "operand": "if b:\n    return c\nreturn 0",
            "operand `a and b` without `b`": "if a:\n    return c\nreturn 0",
        },
    ),
    "or": (
        "if a or b:\n    return c\nreturn 0",
        {
            "true": "if True:\n    return c\nreturn 0",
            "operand": "if b:\n    return c\nreturn 0",
            "operand `a or b` without `b`": "if a:\n    return c\nreturn 0",
        },
    ),
    "a bound": (
        "return a if b < c else 0",
        {
            "true": "return a if True else 0",
            "false": "return a if False else 0",
            "bound": "return a if b <= c else 0",
        },
    ),
    "a loop": (
        "for x in names:\n    x.close()",
        {
            "delete": "for x in names:\n    pass",
            "first-only": "for x in names:\n    x.close()\n    break",
        },
    ),
    "a check in a loop": (
        "for x in names:\n    if x != a:\n        raise ValueError\nreturn 0",
        {
            "true": "for x in names:\n    if True:\n        raise ValueError\nreturn 0",
            "false": "for x in names:\n    if False:\n        raise ValueError\nreturn 0",
            "first-turn": "_turns = [True]\nfor x in names:\n"
            "    if all([_turns.pop() if _turns else False, x != a]):\n"
            "        raise ValueError\nreturn 0",
            "first-only": "for x in names:\n    if x != a:\n        raise ValueError\n    break\n"
            "return 0",
        },
    ),
    "a loop that ends": (
        "while a.more():\n    pass",
        {"false": "while False:\n    pass"},
    ),
    "something that may be missing, used at once": (
        "if a is not None:\n    a.close()\nif b is None:\n    return c\nb.go()",
        {
            "delete": "if a is not None:\n    a.close()\nif b is None:\n    return c\npass",
            "false": "if False:\n    a.close()\nif b is None:\n    return c\nb.go()",
            "true": "if a is not None:\n    a.close()\nif True:\n    return c\nb.go()",
        },
    ),
    "something that may be missing, used later": (
        "if a is None:\n    return c\nb.go()\na.go()",
        {
            "delete": "if a is None:\n    return c\npass\na.go()",
            "delete without `a.go()`": "if a is None:\n    return c\nb.go()\npass",
            "true": "if True:\n    return c\nb.go()\na.go()",
            "false": "if False:\n    return c\nb.go()\na.go()",
            "swap": "if a is None:\n    return c\na.go()\nb.go()",
        },
    ),
    "an operand that keeps the next one from using nothing": (
        "if a is not None and a.ok:\n    return b\nif a is None or a.ok:\n    return b\nreturn c",
        {
            "false": "if False:\n    return b\nif a is None or a.ok:\n    return b\nreturn c",
            "operand": "if a is not None:\n    return b\nif a is None or a.ok:\n    return b\n"
            "return c",
            "true": "if a is not None and a.ok:\n    return b\nif True:\n    return b\nreturn c",
            "operand `a is None or a.ok` without `a.ok`": "if a is not None and a.ok:\n"
            "    return b\nif a is None:\n    return b\nreturn c",
        },
    ),
    "a loop without an end": (
        "while True:\n    if a:\n        return b",
        {
            "true": "while True:\n    if True:\n        return b",
            "false": "while True:\n    if False:\n        return b",
        },
    ),
    "an except clause": (
        "try:\n    return a()\nexcept (OSError, ValueError):\n    b.close()\n    raise",
        {
            "delete": "try:\n    pass\nexcept (OSError, ValueError):\n    b.close()\n    raise",
            "delete without `b.close()`": "try:\n    return a()\n"
            "except (OSError, ValueError):\n    pass\n    raise",
            "delete without `raise`": "try:\n    return a()\nexcept (OSError, ValueError):\n"
            "    b.close()\n    pass",
            "no-except": "try:\n    return a()\nexcept ():\n    b.close()\n    raise",
            "no-class": "try:\n    return a()\nexcept (ValueError,):\n    b.close()\n    raise",
            "no-class `except (OSError, ValueError)` without ValueError": "try:\n    return a()\n"
            "except (OSError,):\n    b.close()\n    raise",
        },
    ),
    "with": (
        "with a.lock, b as x:\n    return x",
        {
            "delete": "with a.lock, b as x:\n    pass",
            "no-with": "with __import__('contextlib').nullcontext(), b as x:\n    return x",
        },
    ),
    "a keyword with a default": (
        "return open_it(a, shared=True)",
        {"keyword": "return open_it(a)"},
    ),
    "a keyword that says what the default says": ("return open_it(a, shared=False)", {}),
    "a boolean that must be given": (
        "return a.write(b, sync=True)",
        {"flip": "return a.write(b, sync=False)"},
    ),
    "sequences that are equally long": ("return [*zip(a, b, strict=True)]", {}),
    "a duration": ("return time.perf_counter() - a", {}),
    "bounds of a slice": (
        "return a[1:] + b[:-2]",
        {
            "off-by-one": "return a[0:] + b[:-2]",
            "off-by-one `[:-2]` with -1": "return a[1:] + b[:-1]",
        },
    ),
    "one more": ("return a[b + 1]", {"off-by-one": "return a[b]"}),
    "a difference": ("return a - b", {"less": "return a"}),
    "a list of several": (
        "return [*a, *b]",
        {"less": "return [*b]", "less `[*a, *b]` without `*b`": "return [*a]"},
    ),
    "all and an order": (
        "return all(x for x in sorted(a))",
        {
            "other-call": "return any((x for x in sorted(a)))",
            "unsorted": "return all((x for x in [*a]))",
        },
    ),
    "a filter": (
        "return [x for x in a if x.ok]",
        {"true": "return [x for x in a if True]"},
    ),
    "a variable that has a value already": (
        "x = a\nif b:\n    c.go()\n    x = b\nreturn x",
        {
            "true": "x = a\nif True:\n    c.go()\n    x = b\nreturn x",
            "false": "x = a\nif False:\n    c.go()\n    x = b\nreturn x",
            "delete": "x = a\nif b:\n    pass\n    x = b\nreturn x",
            "delete without `x = b`": "x = a\nif b:\n    c.go()\n    pass\nreturn x",
        },
    ),
    "an attribute": ("self.x = a\nreturn 0", {"delete": "pass\nreturn 0"}),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_every_way_to_break_a_statement_is_tried_and_no_other(
    body: str, expected: dict[str, str]
) -> None:
    assert made(body) == expected


def test_constants_are_returned_where_a_truth_value_or_perhaps_nothing_is() -> None:
    assert made("return a.ok()", returns="bool") == {
        "return-true": "return True",
        "return-false": "return False",
    }
    assert made("return True", returns="bool") == {"return-false": "return False"}
    assert made("return a", returns="str | None") == {"return-none": "return None"}
    assert made("return a", returns="str") == {}


@pytest.mark.parametrize(
    "body",
    [
        '"""It says `a and b`."""\nreturn a',
        "raise ValueError(f'{a} < {b}', a and b, sorted(c))",
        "names = ', '.join(sorted(a)) or 'none'\nraise ValueError(f'no {b}: {names}')",
        "x: list[int] = a\nreturn x",
        "x = a\nreturn x",
        "if a:\n    more = '; and more'\nelse:\n    more = ''\nraise ValueError(f'{b}{more}')",
        "return f'{a and b}'",
    ],
    ids=[
        "docstring",
        "message",
        "message made before",
        "annotation",
        "first value",
        "condition of words",
        "text",
    ],
)
def test_words_and_what_fails_at_once_are_left_alone(body: str) -> None:
    assert {name for name in made(body) if not name.startswith("delete")} == set()


def test_a_warning_may_be_left_out_but_not_reworded() -> None:
    found = made("warnings.warn(f'{a and b}' if c else 'no', stacklevel=2)\nreturn a")
    assert found == {"delete": "pass\nreturn a"}


def test_methods_that_make_text_for_people_are_left_alone() -> None:
    text = "class A:\n    def __repr__(self) -> str:\n        self.x.sync()\n        return 'A'\n"
    assert list(mutate(text, "m", "m.py", {})) == []


def test_what_falls_off_the_end_anyway_is_not_deleted() -> None:
    found = made("if a:\n    b.go()\n    return None", returns="None")
    assert [name for name in found if name.startswith("delete")] == ["delete"]  # of the call
    found = made("if a:\n    b.go()\n    return None\nc.go()", returns="None")
    assert "delete without `return None`" in found
    body = "for x in names:\n    try:\n        y = x()\n    except OSError:\n        continue"
    assert not [name for name in made(body) if "continue" in name]


def test_the_operators_that_are_sampled_work_as_well() -> None:
    found = made("for x in a:\n    c.go(x)", *SAMPLED)
    assert found == {"skip-first": "for x in [*a][1:]:\n    c.go(x)"}
    found = made("if a:\n    b.go()\nc.go()", *SAMPLED, returns="None")
    assert found == {
        "negate": "if not a:\n    b.go()\nc.go()",
        "return": "return\nif a:\n    b.go()\nc.go()",
        "return return before `c.go()`": "if a:\n    b.go()\nreturn\nc.go()",
    }


BEFORE = '''\
import os


class Store:
    """A store."""

    def commit(self, slot, path) -> None:
        """Commit."""
        slot.sync()
        slot.sync()
        if path:
            os.rename(slot, path)

    def close(self) -> None:
        self.lock.release()
'''
AFTER = '''\
"""A module."""

import os

LIMIT = 1


class Store:
    """A store, and more."""

    def open(self) -> None:
        self.lock.take()

    def commit(self, slot, path) -> None:
        """Commit, in other words."""
        slot.sync()  # data

        # and names
        slot.sync()
        if path:
            os.rename(
                slot, path
            )

    def close(self) -> None:
        self.lock.release()
        self.backend.close()
'''


def test_names_survive_edits_elsewhere() -> None:
    before, after = (
        {m.name: m for m in mutate(text, "store", "store.py", {})} for text in (BEFORE, AFTER)
    )
    assert before.keys() <= after.keys()
    moved = [name for name in before if before[name].line != after[name].line]
    assert moved == [*before]
    changed = {m.function for m in before.values() if m.code != after[m.name].code}
    assert changed == {"store.Store.close"}


def test_an_edit_of_a_statement_renames_its_mutants_only() -> None:
    edited = BEFORE.replace("if path:", "if path is not None:")
    before, after = (
        {m.name for m in mutate(text, "store", "store.py", {})} for text in (BEFORE, edited)
    )
    assert {name.rsplit("/", 1)[0] for name in before ^ after} == {
        "store.Store.commit/true",
        "store.Store.commit/false",
    }


def test_a_second_statement_of_the_same_text_has_a_name_of_its_own() -> None:
    names = [m.name for m in mutate(BEFORE, "store", "store.py", {})]
    assert len(set(names)) == len(names)
    first, second = [name for name in names if name.startswith("store.Store.commit/delete")][:2]
    assert second == f"{first}.2"


def test_functions_are_told_apart_by_code_and_not_by_comments() -> None:
    first, second, third = (
        next(functions(Source(text))).digest
        for text in (
            "def f(a):\n    '''One.'''\n    return a + 1\n",
            "def f(a):\n    '''Two.'''\n    # three\n    return a  +  1  # four\n",
            "def f(a):\n    '''One.'''\n    return a + 2\n",
        )
    )
    assert first == second != third


@pytest.fixture(scope="module")
def every() -> list[Mutant]:
    return mutants_of()


def test_every_mutant_of_the_library_has_a_name_and_is_other_python(every: list[Mutant]) -> None:
    assert len({mutant.name for mutant in every}) == len(every)
    sources = {path: Source((ROOT / path).read_text()) for path in MODULES.values()}
    nodes = {
        f"{module}.{function.name}": function.node
        for module, path in MODULES.items()
        for function in functions(sources[path])
    }
    for mutant in every:
        # The function by itself: whole modules would take half a minute.
        node, source = nodes[mutant.function], sources[mutant.file]
        wrapper = "if 1:\n" + " " * node.col_offset if node.col_offset else ""
        start, stop = source.span(node)
        before = wrapper + source.text(start, stop)
        shift = len(wrapper) - start
        after = Source(before).replaced([(a + shift, b + shift, c) for a, b, c in mutant.spans])
        compile(after, mutant.name, "exec")
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), mutant.name


def test_every_module_of_the_table_is_there_and_has_mutants(every: list[Mutant]) -> None:
    assert len(set(MODULES.values())) == len(MODULES)
    assert {mutant.file for mutant in every} == {*MODULES.values()}
    for path in (*MODULES.values(), *TEST_FOLDERS, *NOT_FOR_MUTANTS):
        assert (ROOT / path).exists(), path


def test_an_edit_that_makes_no_python_says_so(every: list[Mutant], tmp_path: Path) -> None:
    mutant = every[0]
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    target.write_text((ROOT / mutant.file).read_text())
    start = mutant.spans[0][0]
    with pytest.raises(MutationError, match=mutant.name):
        replace(mutant, spans=((start, start, "("),)).apply(tmp_path)
    with pytest.raises(MutationError, match="changes nothing"):
        replace(mutant, spans=((start, start, ""),)).apply(tmp_path)
    mutant.apply(tmp_path)
    assert target.read_text() != (ROOT / mutant.file).read_text()


def test_a_default_counts_only_where_it_is_the_same_everywhere() -> None:
    defaults = known_defaults()
    assert defaults["lock"]["shared"] == "False"
    assert "path" not in defaults["lock"]
