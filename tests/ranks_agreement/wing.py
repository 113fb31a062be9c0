"""The modules of the protocol, as they are or with one of its steps taken out."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from tests.mutation.mutation import ROOT, Edit

_FOLDER = "offload/distributed/agreement"
_NAMES = (
    "effects",
    "peers",
    "reports",
    "sights",
    "opening",
    "unanimous",
    "seal",
)
"""Modules that decide something; each imports only those before it."""

Wing = Any
"""One version of the protocol: a namespace of its modules."""


def plain() -> Wing:
    """Return the protocol as it is."""
    package = _FOLDER.replace("/", ".")
    return types.SimpleNamespace(**{n: importlib.import_module(f"{package}.{n}") for n in _NAMES})


def without(module: str, find: str, replace: str) -> Wing:
    """Return a copy of the protocol with an edit, under another name; the original stays."""
    package = f"_without_{abs(hash((find, replace)))}"
    sys.modules[package] = types.ModuleType(package)
    found = types.SimpleNamespace()
    for name in _NAMES:
        source = (ROOT / _FOLDER / f"{name}.py").read_text()
        if name == module:
            source = Edit(f"{_FOLDER}/{name}.py", find, replace).apply(source)
        source = source.replace(_FOLDER.replace("/", "."), package)
        made = types.ModuleType(f"{package}.{name}")
        sys.modules[made.__name__] = made
        exec(compile(source, f"{package}/{name}.py", "exec"), made.__dict__)
        setattr(found, name, made)
    return found
