"""Functions of a module that is imported take the code of an edited text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutation.swapping import functions_of, swap

TEXT = '''\
"""A module."""

import contextlib
import functools

LIMIT = 1


def plain(a, b=2):
    if a > LIMIT:
        return a + b
    return b


@functools.cache
def cached(a):
    return a + 1


@contextlib.contextmanager
def held(names):
    names.append("in")
    yield
    names.append("out")


class Base:
    def tell(self):
        return "base"


class Thing(Base):
    size = 3

    @property
    def double(self):
        return self.size * 2

    @classmethod
    def make(cls):
        return cls()

    @staticmethod
    def twice(a):
        return [a for _ in range(2)]

    def tell(self):
        return super().tell() + "!"

    def later(self):
        def inner():
            return self.size

        return inner


made = Thing()
'''


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    file = tmp_path / "module_to_be_edited.py"
    file.write_text(TEXT)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found
    spec.loader.exec_module(found)
    yield found
    del sys.modules[file.stem]


def swapped(module: ModuleType, old: str, new: str) -> bool:
    """Replace text in a module's functions."""
    file = str(module.__file__)
    assert TEXT.count(old) == 1
    return swap(functions_of([file]), file, TEXT, TEXT.replace(old, new))


def test_functions_and_what_was_made_of_them_run_the_new_code(module: ModuleType) -> None:
    assert module.plain(2) == 4
    plain = module.plain
    assert swapped(module, "a > LIMIT", "a > LIMIT + 1")
    assert plain(2) == 2
    assert plain(3) == 5

    assert swapped(module, "a + 1", "a + 2")
    assert module.cached(1) == 3

    names: list[str] = []
    assert swapped(module, 'append("out")', 'append("gone")')
    with module.held(names):
        pass
    assert names == ["in", "gone"]


@pytest.mark.parametrize(
    ("old", "new", "ask", "expected"),
    [
        ("self.size * 2", "self.size * 3", lambda thing: thing.double, 9),
        ("return cls()", "return None", lambda thing: type(thing).make(), None),
        ("range(2)", "range(1)", lambda thing: thing.twice(1), [1]),
        ('tell() + "!"', 'tell() + "?"', lambda thing: thing.tell(), "base?"),
        ("return self.size\n", "return -self.size\n", lambda thing: thing.later()(), -3),
    ],
    ids=["property", "class method", "comprehension", "super", "nested"],
)
def test_methods_of_objects_that_exist_run_the_new_code(
    module: ModuleType, old: str, new: str, ask: object, expected: object
) -> None:
    assert callable(ask)
    assert ask(module.made) != expected
    assert swapped(module, old, new)
    assert ask(module.made) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 1", "LIMIT = 2"),
        ("size = 3", "size = 4"),
        ("b=2", "b=3"),
        ("class Thing(Base)", "class Thing"),
        ("def held(names):\n", "def kept(names):\n"),
        ('super().tell() + "!"', '"base!"'),  # does without `__class__`, a variable around it
    ],
    ids=["constant", "attribute", "default", "base", "name", "closure"],
)
def test_what_has_run_when_the_module_was_imported_is_not_swapped(
    module: ModuleType, old: str, new: str
) -> None:
    assert not swapped(module, old, new)


def test_functions_that_did_not_change_stay_as_they_are(module: ModuleType) -> None:
    before = module.plain.__code__
    assert swapped(module, "range(2)", "range(1)")
    assert module.plain.__code__ is before
