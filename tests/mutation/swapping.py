"""Giving the functions of a module that is imported already the code of an edited text.

This saves what importing the library and collecting its tests takes, which is longer than most
mutants live. It works for an edit within functions. What a module has computed when it was imported
stays as it was, so an edit of a constant, a default or a class body is refused here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import TypeAlias

Key: TypeAlias = tuple[str, str, int]
"""Of a function: its file, its qualified name, and the first line of its code."""


def functions_of(files: Sequence[str]) -> dict[Key, list[FunctionType]]:
    """Return the functions of some files that exist in this process.

    Args:
        files: As Python names them in what it has compiled.
    """
    wanted, found = {*files}, dict[Key, list[FunctionType]]()
    for one in gc.get_objects():
        # By `type`: some objects answer to `isinstance` with a warning.
        if type(one) is FunctionType and one.__code__.co_filename in wanted:
            found.setdefault(_key(one.__code__), []).append(one)
    return found


def swap(functions: dict[Key, list[FunctionType]], file: str, before: str, after: str) -> bool:
    """Give functions the code of another text of their file.

    Args:
        functions: As from `functions_of`.
        file: As Python names it.
        before: The text that they come from.
        after: The text that is to take its place.

    Returns:
        Whether that was possible. If not, some functions may have been changed already.
    """
    old, new = (compile(text, file, "exec", dont_inherit=True) for text in (before, after))
    if _shell(old) != _shell(new):
        return False
    for one, other in _pairs(old, new):
        if one == other:
            continue
        for function in functions.get(_key(one), ()):
            try:
                function.__code__ = other
            except ValueError:  # it uses other variables of the functions around it
                return False
    return True


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the functions of two texts, as far as they have the same ones."""
    olds, news = _inner(old), _inner(new)
    if [one.co_qualname for one in olds] != [one.co_qualname for one in news]:
        return
    for one, other in zip(olds, news, strict=True):
        if _is_function(one):
            yield one, other
        yield from _pairs(one, other)


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & 0x2)  # CO_NEWLOCALS: a class body has none


def _shell(code: CodeType) -> object:
    """Return what of a text runs when it is imported: all but what its functions do."""
    consts = [
        (type(const), const)
        if not isinstance(const, CodeType)
        else const.co_qualname
        if _is_function(const)
        else _shell(const)
        for const in code.co_consts
    ]
    return code.co_qualname, code.co_code, code.co_names, consts
