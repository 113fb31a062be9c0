"""Hints at the end of an error message about a path that is no store or no checkpoint.

Errors of reading are ignored here, because they must not hide the error that is being reported.
"""

from __future__ import annotations

import os

from gds import Backend, StorageError
from offload.checkpoint.owner_parts import owner_directories, parts_of_owner
from offload.errors import UnreadableError
from offload.format.names import LOCK_NAME, checkpoint_name, owner_number, step_of

_MOST_LOOKED_AT = 100
"""Largest number of directories that are searched for stores."""

_MOST_SHOWN = 3
"""Largest number of names in a hint."""


def stores_below(backend: Backend, directory: str) -> str:
    """Return a hint at the stores directly below a directory, and at how to find deeper ones."""
    found = []
    try:
        names = backend.list_dir(directory)
    except StorageError:
        names = []
    for name in sorted(names)[:_MOST_LOOKED_AT]:
        try:
            stat = backend.stat(f"{directory}/{name}")
            inside = backend.list_dir(f"{directory}/{name}") if stat is not None else []
        except StorageError:
            continue
        if owner_number(name) is not None:
            continue  # parts of a store whose first directory is elsewhere
        if LOCK_NAME in inside or any(step_of(one) is not None for one in inside):
            found.append(name)
    if not found:
        return f"`offload verify --all {directory}` looks for stores below it"
    return (
        f"stores below it: {_shown(found)}. Give one of them, or read all with `offload verify "
        f"--all {directory}`"
    )


def owners_here(backend: Backend, directory: str) -> str:
    """Return what a directory has of a store whose first directory is elsewhere; empty if nothing.

    Every sealed part is named with its generation, and with the reason if it is not usable.
    """
    found: dict[str, list[str]] = {}
    try:
        for owner, path in owner_directories(backend, directory).items():
            for part in parts_of_owner(backend, path):
                if part.header is not None:
                    problem = f", not usable: {part.reason}" if part.reason else ""
                    found.setdefault(part.header.store_id, []).append(
                        f"owner-{owner}/{part.name} of generation {part.header.generation}{problem}"
                    )
    except (StorageError, UnreadableError):
        return ""
    if not found:
        return ""
    stores = "; ".join(f"store {store}: {', '.join(parts)}" for store, parts in found.items())
    return (
        f"it has parts that ranks of another host's store keep here ({stores}). The checkpoints "
        "that name them are in the store's first directory, on another host: look there"
    )


def other_checkpoints(backend: Backend, path: str) -> str:
    """Return a hint at the checkpoints beside a path; empty if there are none.

    The hint is also empty if the path is not named like a checkpoint.
    """
    store, name = os.path.split(path)
    if not name.startswith("step-"):
        return ""
    try:
        steps = sorted(step for n in backend.list_dir(store) if (step := step_of(n)) is not None)
    except StorageError:
        return ""
    if not steps:
        return ""
    names = [checkpoint_name(step) for step in steps[-_MOST_SHOWN:]]
    more = len(steps) - len(names)
    return f"; its store has {', '.join(names)}{f' and {more} older' if more else ''}"


def _shown(names: list[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
