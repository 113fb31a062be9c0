"""The modules of the protocol, as they are or with one of its steps taken out."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType

from tests.mutation.mutation import ROOT, Edit

FOLDER = "offload/distributed/agreement"

_NAMES = (
    "channel",
    "effects",
    "peers",
    "messages",
    "leaving",
    "ledger",
    "reports",
    "sights",
    "homes",
    "opening",
    "unanimous",
    "grant",
    "seal",
)
"""Modules that decide something; each imports only those before it."""

_numbers = count()


@dataclass(frozen=True)
class Wing:
    """One version of the protocol."""

    channel: ModuleType
    effects: ModuleType
    peers: ModuleType
    messages: ModuleType
    leaving: ModuleType
    ledger: ModuleType
    reports: ModuleType
    sights: ModuleType
    homes: ModuleType
    opening: ModuleType
    unanimous: ModuleType
    grant: ModuleType
    seal: ModuleType


def plain() -> Wing:
    """Return the protocol as it is."""
    return Wing(
        **{
            name: importlib.import_module(f"offload.distributed.agreement.{name}")
            for name in _NAMES
        }
    )


def mutated(edits: Sequence[Edit]) -> Wing:
    """Return a copy of the protocol with edits, under another name; the original stays."""
    package = f"_mutant_{next(_numbers)}"
    sys.modules[package] = types.ModuleType(package)
    found: dict[str, ModuleType] = {}
    for name in _NAMES:
        file = f"{FOLDER}/{name}.py"
        source = (ROOT / file).read_text()
        for edit in edits:
            if edit.file == file:
                source = edit.apply(source)
        source = source.replace("offload.distributed.agreement", package)
        module = types.ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{package}/{name}.py", "exec"), module.__dict__)
        setattr(sys.modules[package], name, module)
        found[name] = module
    return Wing(**found)
