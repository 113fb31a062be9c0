"""Questions to a server about a store that it has: what may be read while others train.

A question is a hello that says it wants to read, on a connection of its own. It takes no lock, and
is answered by one document. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

from offload.checkpoint.listing import CheckpointInfo
from offload.checkpoint.overview import Overview
from offload.checkpoint.verify import VerifyReport
from offload.errors import NearError, OffloadError
from offload.format._manifest_fields import decode_group, each, items, mapping
from offload.format.names import step_of
from offload.near.errors_sent import decode_error
from offload.near.place import Place, place_of, token_for
from offload.near.wire import Kind, Wire
from offload.store.verification import Verified

_TIMEOUT_S: Final = 60.0
"""Seconds without a sign of life after which the server counts as lost."""


def overview(url: str) -> Overview:
    """Return what a store on a server has, with the paths of checkpoints as URLs.

    Raises:
        NearError: The URL names no run, or the server cannot be reached, or refuses.
        OffloadError: The error of the server.
    """
    with _answer(url, "overview") as (place, found):
        return Overview(
            [info(place, one) for one in each(mapping, found["checkpoints"])],
            _texts(found["unnamed_parts"]),
            found["is_further"] is True,
            _texts(found["lost_pins"]),
        )


def describe(url: str) -> dict[str, Any]:
    """Return what a server says of a checkpoint, as `offload.checkpoint.overview.describe` does.

    Args:
        url: Checkpoint, or store: its newest checkpoint.

    Raises:
        NearError: The URL names no run, or the server cannot be reached, or refuses.
        OffloadError: The error of the server.
    """
    with _answer(url, "describe") as (place, found):
        groups = [decode_group(one) for one in each(mapping, found["hyperparameters"])]
        return {**found, "path": place.checkpoint(found["path"]), "hyperparameters": groups}


def verify(url: str) -> tuple[list[Verified], list[str]]:
    """Let a server compare every byte of checkpoints with digests; nothing of them crosses.

    Args:
        url: Checkpoint, or store: all its checkpoints.

    Returns:
        Results, and the URLs of checkpoints that were recycled in the meantime.

    Raises:
        NearError: The URL names no run, or the server cannot be reached, or refuses.
        OffloadError: The error of the server.
    """
    with _answer(url, "verify") as (place, found):
        results = [
            Verified(
                place.checkpoint(one["path"]),
                VerifyReport(**_tuples(mapping(one["report"]))),
                recorded=_texts(one["recorded"]),
            )
            for one in each(mapping, found["results"])
        ]
        return results, [place.checkpoint(path) for path in _texts(found["recycled"])]


def ask(wire: Wire, place: Place, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a question about a run, on a new connection.

    Raises:
        NearError: The server is lost.
        Exception: The error of the server.
    """
    begin_question(wire, place, question)
    return answered(wire)


def begin_question(wire: Wire, place: Place, question: Mapping[str, Any]) -> None:
    """Send a question; frames of it may follow before `answered`."""
    asked = {**question, "run": place.run}
    wire.send_document(Kind.HELLO, 0, {"read": asked, "token": token_for(place)})


def answered(wire: Wire) -> dict[str, Any]:
    """Receive the answer to a question, or raise the error of the server."""
    frame = wire.receive((Kind.RESULT, Kind.ERROR), 0)
    found = wire.read_document(frame)
    if frame.kind == Kind.ERROR:
        raise decode_error(found, wire.peer)
    return found


@contextmanager
def _answer(url: str, what: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Ask a server, and yield the run and the answer, which may not be what is expected."""
    store, checkpoint = url.rstrip("/"), None
    head, _, last = store.rpartition("/")
    if step_of(last) is not None:
        store, checkpoint = head, last
    try:
        place = place_of(store)
    except ValueError as error:
        raise NearError(str(error)) from None
    with closing(Wire(place.connect(), place.peer, _TIMEOUT_S)) as wire:
        try:
            found = ask(wire, place, {"what": what, "checkpoint": checkpoint})
        except (TypeError, ValueError, KeyError, RuntimeError, MemoryError) as error:
            raise error if isinstance(error, OffloadError) else NearError(str(error)) from None
    try:
        yield place, found
    except (KeyError, TypeError, ValueError) as error:
        raise NearError(
            f"{place.peer} gave an answer that is none ({error}): use the same version here and "
            "there"
        ) from error


def _texts(value: object) -> list[str]:
    return [str(one) for one in items(value)]


def _tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass whose tuples have become lists."""
    return {name: _tuple(value) for name, value in found.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(one) for one in value) if isinstance(value, list) else value


def info(place: Place, found: Mapping[str, Any]) -> CheckpointInfo:
    """Return what a server says of a checkpoint; raise an error if it is no such document."""
    values = _tuples(found)
    return CheckpointInfo(**{**values, "path": place.checkpoint(values["path"])})
