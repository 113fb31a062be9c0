"""Optimizers that others have published: which are trained to their own bits, and a table of them.

Write the table of ``published.md`` anew::

    python -m tests.torch_contract.published
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from tests.torch_contract.itself import FAILS, ITS_BITS, REFUSED, Case, Outcome, outcome

PACKAGES = {
    "pytorch_optimizer": "pytorch_optimizer",
    "lion-pytorch": "lion_pytorch",
    "schedulefree": "schedulefree",
}
"""Module of each package."""

PAGE = Path(__file__).with_name("published.md")
BEGIN, END = "<!-- published optimizers -->", "<!-- end of published optimizers -->"

_USUAL = Case(shared={"use_muon": False})  # some ask for it in each group, and others ignore it
_CASES = (_USUAL, replace(_USUAL, missing=False), replace(_USUAL, missing=False, graph=True))
"""Programs, from the usual one to one that classes can train with that cannot with the others."""

_REASONS = {
    r"requires closure|'closure'": "needs a closure",
    r"\.train\(\)|its train\(\)": "has to be switched between training and evaluation",
    r"You need to install": "needs another package",
    r"^\w+Error: |zero_grad\(\) of|has no attribute '(named_)?parameters'": (
        "takes another optimizer, or a model"
    ),
    r"use_muon|__contains__": "takes groups that say `use_muon` only",
    r"state of no parameter": "keeps state of no parameter",
    r"grad_fn": "needs gradients of gradients",
    r"it keeps '|it keeps new state": "keeps state of another shape or type",
    r"its option": "has options that no checkpoint can hold",
    r"mat1|2D parameters": "needs matrices",
    r"updated in parts|other bits|value that depends|empty tensor|inner products": (
        "looks at more than one element, or at its place (as `pow` does)"
    ),
}
"""What refusals are called in the table, by a pattern of their text."""


def classes(package: str) -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizer classes that a package exports, by name."""
    module = importlib.import_module(PACKAGES[package])
    found = inspect.getmembers(module, inspect.isclass)
    return {
        name: cls
        for name, cls in found
        if issubclass(cls, torch.optim.Optimizer) and not inspect.isabstract(cls)
    }


def found(cls: type[torch.optim.Optimizer]) -> Outcome:
    """Return what came of a class, in the most usual program that it can train with in memory."""
    for case in _CASES:
        it = outcome(cls, case)
        if it.kind != FAILS:
            break
    return it


def in_few_words(it: Outcome) -> str:
    """Return what the table calls an outcome; its own text if it has no name."""
    if it.kind != REFUSED:
        return it.kind if it.kind == ITS_BITS else f"{it.kind}: {it.reason}"
    names = (words for pattern, words in _REASONS.items() if re.search(pattern, it.reason))
    return f"refused: {next(names, it.reason)}"


def package_and_version(package: str) -> str:
    """Return how the table names a package."""
    return f"{package} {importlib.metadata.version(package)}"


def table(words: dict[tuple[str, str], str]) -> str:
    """Return the table of the page.

    Args:
        words: What came of a class, by package and name.
    """

    def key(entry: tuple[str, str]) -> tuple[int, bool, str]:
        return [*PACKAGES].index(entry[0]), words[entry] != ITS_BITS, words[entry]

    lines = ["| package | what comes of it | classes |", "|---|---|---|"]
    for (index, _, what), entries in groupby(sorted(words, key=key), key):
        names = ", ".join(sorted((name for _, name in entries), key=str.lower))
        lines.append(f"| {package_and_version([*PACKAGES][index])} | {what} | {names} |")
    return "\n".join(lines)


def on_the_page() -> dict[tuple[str, str], str]:
    """Return what the page says came of a class, by package with version, and name."""
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in text.strip().splitlines()[2:]]
    return {(package, name): what for package, what, names in rows for name in names.split(", ")}


def every_class() -> list[tuple[str, str]]:
    """Return the package and the name of every class."""
    return [(package, name) for package in PACKAGES for name in classes(package)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable()  # of steps that are lost, and meant to be
    new = table({(p, name): in_few_words(found(classes(p)[name])) for p, name in every_class()})
    page = PAGE.read_text()
    PAGE.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n{new}\n{END}{page.split(END)[1]}")
