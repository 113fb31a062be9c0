"""Sights: what each rank sees of a store in the directories that it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from offload.distributed.agreement.messages import Json, MessageError, check_fields
from offload.format.strict_json import short

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSight:
    """A part of an owner, as a rank sees it."""

    name: str
    """Name of the part's directory: ``part-2``."""

    digest: str = ""
    """Digest that identifies the part's content; a manifest names it. Empty if it has none."""

    problem: str = ""
    """Why the part cannot be used, in words: it is invalid, or marked as damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSight:
    """The directory of an owner of parts, as a rank sees it."""

    owner: int
    """Number of the owner, from 1. Owner 0 is the first directory, which `StoreSight` describes."""

    place: str
    """Text that is the same for two ranks if, and only if, they see the same directory."""

    directory: str = ""
    """Path of the directory of the store that has the owner's directory, as the rank sees it."""

    parts: tuple[PartSight, ...] = ()
    """All parts in the directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSight:
    """A checkpoint in the first directory, as a rank sees it."""

    step: int
    """Number of optimizer steps."""

    generation: int
    """Generation of the state; higher is newer."""

    parts: tuple[tuple[int, str, str], ...] = ()
    """Parts of owners from 1 on that the manifest names: owner, name of the part, and digest."""

    problem: str = ""
    """Why the checkpoint's own directory cannot be used, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSight:
    """What a rank sees of one store."""

    store_id: str
    """Identity of the store."""

    place: str = ""
    """The store's first directory, in a text that is the same for two ranks if, and only if, they
    see the same directory; empty if the rank does not see it."""

    directory: str = ""
    """Path of the store's first directory, as the rank sees it; empty if it does not see it."""

    checkpoints: tuple[CheckpointSight, ...] = ()
    """Checkpoints in the first directory."""

    owners: tuple[OwnerSight, ...] = ()
    """Owners whose directories the rank sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySight:
    """A directory that a rank was given."""

    path: str
    """Absolute path of the directory."""

    place: str
    """Text that is the same for two ranks of one node if, and only if, they were given the same
    directory. The directory may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What one rank sees when the store is opened."""

    host: str
    """Name of the rank's host, for messages."""

    new_id: str
    """A new random identity, which the store gets if it is new."""

    node: str = ""
    """Text that is the same for two ranks if, and only if, one running system has both."""

    directories: tuple[DirectorySight, ...] = ()
    """Directories that the rank was given, in their order."""

    fresh: bool = False
    """Whether the caller asked to start over."""

    stores: tuple[StoreSight, ...] = ()
    """Stores of which something is in the directories that the rank was given."""

    error: str = ""
    """Why this rank cannot open its directories, in words."""

    def as_json(self) -> Json:
        """Return the sight as JSON."""
        return _as_json(self)

    @classmethod
    def from_json(cls, value: Json, sender: str) -> Sight:
        """Return the sight of a message."""
        return _sight(value, f"{sender}: what it sees")


_SIGHTS = (Sight, DirectorySight, StoreSight, CheckpointSight, OwnerSight, PartSight)


def _as_json(value: object) -> Json:
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    if isinstance(value, _SIGHTS):
        return {name: _as_json(getattr(value, name)) for name in value.__slots__}
    return value


def _each(value: Json, make: Callable[[Json, str], T], where: str) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise MessageError(f"{where} is {short(value)}, expected a list")
    return tuple(make(one, where) for one in value)


def _sight(value: Json, where: str) -> Sight:
    types = {
        "host": str, "new_id": str, "node": str, "directories": list,
        "fresh": bool, "stores": list, "error": str,
    }  # fmt: skip
    found = check_fields(value, types, where)
    directories = _each(found["directories"], _directory, where)
    stores = _each(found["stores"], _store, where)
    return Sight(**{**found, "directories": directories, "stores": stores})


def _directory(value: Json, where: str) -> DirectorySight:
    return DirectorySight(**check_fields(value, {"path": str, "place": str}, where))


def _store(value: Json, where: str) -> StoreSight:
    types = {
        "store_id": str, "place": str, "directory": str, "checkpoints": list, "owners": list,
    }  # fmt: skip
    found = check_fields(value, types, where)
    checkpoints = _each(found["checkpoints"], _checkpoint, where)
    owners = _each(found["owners"], _owner, where)
    return StoreSight(**{**found, "checkpoints": checkpoints, "owners": owners})


def _checkpoint(value: Json, where: str) -> CheckpointSight:
    types = {"step": int, "generation": int, "parts": list, "problem": str}
    found = check_fields(value, types, where)
    return CheckpointSight(**{**found, "parts": _each(found["parts"], _named_part, where)})


def _named_part(value: Json, where: str) -> tuple[int, str, str]:
    if not isinstance(value, list) or [type(one) for one in value] != [int, str, str]:
        raise MessageError(f"{where} has the part {short(value)}, expected owner, name and digest")
    return (value[0], value[1], value[2])


def _owner(value: Json, where: str) -> OwnerSight:
    types = {"owner": int, "place": str, "directory": str, "parts": list}
    found = check_fields(value, types, where)
    return OwnerSight(**{**found, "parts": _each(found["parts"], _part, where)})


def _part(value: Json, where: str) -> PartSight:
    return PartSight(**check_fields(value, {"name": str, "digest": str, "problem": str}, where))
