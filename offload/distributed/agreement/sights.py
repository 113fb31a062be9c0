"""Sights: what each rank sees of a store in the directories that it was given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload.distributed.agreement.peers import Json, tuples_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSight:
    """A part of an owner, as a rank sees it."""

    name: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSight:
    """A checkpoint in the first directory, as a rank sees it."""

    step: int
    generation: int
    parts: tuple[tuple[int, str, str], ...] = ()
    """Parts of owners from 1 on that the manifest names: owner, name of the part, and digest."""

    problem: str = ""
    """Why the checkpoint's own directory cannot be used, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSight:
    """What a rank sees of one store."""

    store_id: str
    place: str = ""
    """The store's first directory, in a text that is the same for two ranks if, and only if, they
    see the same directory; empty if the rank does not see it."""

    directory: str = ""
    """Path of the store's first directory, as the rank sees it; empty if it does not see it."""

    checkpoints: tuple[CheckpointSight, ...] = ()
    owners: tuple[OwnerSight, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySight:
    """A directory that a rank was given."""

    path: str
    place: str
    """Text that is the same for two ranks of one node if, and only if, they were given the same
    directory. The directory may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What one rank sees when the store is opened."""

    host: str
    new_id: str
    """A new random identity, which the store gets if it is new."""

    node: str = ""
    """Text that is the same for two ranks if, and only if, one running system has both."""

    directories: tuple[DirectorySight, ...] = ()
    fresh: bool = False
    stores: tuple[StoreSight, ...] = ()
    error: str = ""

    def as_json(self) -> Json:
        """Return the sight as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Sight:
        """Return the sight of a message."""
        fields = tuples_of(value)
        given = tuple(DirectorySight(**one) for one in fields["directories"])
        stores = tuple(_store(one) for one in fields["stores"])
        return cls(**{**fields, "directories": given, "stores": stores})


def _store(fields: dict[str, Any]) -> StoreSight:
    checkpoints = tuple(CheckpointSight(**one) for one in fields["checkpoints"])
    owners = tuple(
        OwnerSight(**{**one, "parts": tuple(PartSight(**part) for part in one["parts"])})
        for one in fields["owners"]
    )
    return StoreSight(**{**fields, "checkpoints": checkpoints, "owners": owners})
