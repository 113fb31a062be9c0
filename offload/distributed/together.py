"""Calls that succeed on all ranks, or fail on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import offload.errors
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.messages import Json
from offload.errors import OffloadError, RanksError, reason_of

T = TypeVar("T")


def together(agreement: Agreement, what: str, action: Callable[[], T]) -> T:
    """Do something on every rank, and return when it has succeeded on all of them. Collective.

    Args:
        agreement: Agreement of all ranks.
        what: Call of the user, for messages.
        action: What this rank does. It makes no collective call.

    Returns:
        The value that the action returns on this rank.

    Raises:
        OffloadError: The action failed on a rank. That rank raises the error of the action, and the
            others an error that names the rank and the cause. It is of the same class, if the class
            is one of this package.
    """
    results: list[T] = []
    everywhere(agreement, what, lambda: results.append(action()))
    return results[0]


def everywhere(agreement: Agreement, what: str, action: Callable[[], Json]) -> Mapping[int, Json]:
    """Do something on every rank, and return what it returns on each of them. Collective."""
    failures: list[Exception] = []

    def ready(_: Json) -> Json:
        """Do it, and return the result or the error as the note of this rank."""
        try:
            return {"result": action()}
        except Exception as error:  # noqa: BLE001  (raised below, when all ranks know of it)
            failures.append(error)
            return {"class": type(error).__name__, "error": reason_of(error)}

    # A rank that announced an error before goes on with this call.
    notes = agreement.agree(what, lambda _: None, ready, heeds_errors=False).notes
    if failures:
        raise failures[0]
    for rank, note in sorted(notes.items()):
        if "error" in note:
            raise _class_of(note["class"])(f"{agreement.peers.name(rank)}: {note['error']}")
    return {rank: note["result"] for rank, note in notes.items()}


def _class_of(name: str) -> type[OffloadError]:
    """Return the class of this package with a name, if a message is all that it takes."""
    found = getattr(offload.errors, name, None)
    if (
        isinstance(found, type)
        and issubclass(found, OffloadError)
        and not issubclass(found, OSError)
    ):
        return found
    return RanksError
