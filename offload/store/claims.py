"""Parts that checkpoints name, usable or not, so that they must not be rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gds import Backend
from offload.checkpoint.owner_parts import look_at_part, part_names
from offload.errors import UnreadableError
from offload.format.manifest import Manifest
from offload.format.names import owner_number
from offload.store.slots.folder import directories_in


@dataclass(frozen=True, slots=True)
class NamedParts:
    """Parts of owners that the checkpoints of a store name."""

    names: Mapping[int, frozenset[str]]
    """Names of parts, by number of the owner. An owner that is missing has no named part."""

    unknown: tuple[str, ...] = ()
    """Paths of checkpoints whose manifest cannot be read, so that they may name any part."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for a message to other ranks."""
        names = {str(owner): sorted(names) for owner, names in self.names.items()}
        return {"names": names, "unknown": list(self.unknown)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NamedParts:
        """Invert `to_json`."""
        names = {int(owner): frozenset(found) for owner, found in values["names"].items()}
        return cls(names, tuple(values["unknown"]))

    def of(self, owner: int) -> frozenset[str]:
        """Return the names of the parts of one owner that checkpoints name."""
        return self.names.get(owner, frozenset())


class Claims:
    """Checkpoints that are not in the store's list, and whose parts are kept all the same.

    Not thread-safe: the store holds its own lock around every call.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, tuple[Manifest, ...] | None] = {}
        """Manifests of unusable checkpoints by path; None if the manifest cannot be read."""
        self._leaving: list[Manifest] = []
        """Manifests of checkpoints whose withdrawal is not known to be durable."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Paths of unusable checkpoints that may name any part."""
        return tuple(path for path, claim in self._by_path.items() if claim is None)

    def claim(self, path: str, manifests: Iterable[Manifest]) -> None:
        """Record that the unusable checkpoint at a path names the parts in some manifests."""
        self._by_path[path] = tuple(manifests)

    def claim_unknown(self, path: str) -> None:
        """Record that the manifest of the checkpoint at a path cannot be read."""
        self._by_path[path] = None

    def release(self, path: str) -> None:
        """Record that the unusable checkpoint at a path no longer exists."""
        self._by_path.pop(path, None)

    @contextmanager
    def leaving(self, manifest: Manifest) -> Iterator[None]:
        """Keep the parts of a checkpoint until its withdrawal, the block, is durable.

        If the block fails, the parts are kept as long as this process lives.
        """
        self._leaving.append(manifest)
        yield
        self._leaving.remove(manifest)

    def part_names(self) -> set[str]:
        """Return the names of the claimed parts on further drives."""
        return {part.name for manifest in self._manifests() for part in manifest.parts}

    def named(self, manifests: Iterable[Manifest]) -> NamedParts:
        """Return the parts of owners that checkpoints name: usable ones, and claimed ones."""
        found: dict[int, set[str]] = {}
        for manifest in (*manifests, *self._manifests()):
            for reference in manifest.owners:
                found.setdefault(reference.owner, set()).add(reference.name)
        return NamedParts(
            {owner: frozenset(names) for owner, names in sorted(found.items())}, self.unknown
        )

    def _manifests(self) -> Iterator[Manifest]:
        for claim in self._by_path.values():
            yield from claim or ()
        yield from self._leaving


def unnamed_parts(backend: Backend, directory: str, store_id: str, named: NamedParts) -> list[str]:
    """Return the paths of an owner's parts that no checkpoint names, by rising number.

    Sealed parts of other stores and of other owners are left out, and all sealed parts if some
    checkpoint's manifest cannot be read.
    """
    owner = owner_number(os.path.basename(directory)) or 0
    found = []
    for name in part_names(backend, directory):
        path = f"{directory}/{name}"
        if name in named.of(owner) or directories_in(backend, path):
            continue
        try:
            header = look_at_part(backend, path, owner).header
        except UnreadableError:
            continue  # it is not known what it is, so it is left alone
        if header is None or (
            (header.store_id, header.owner) == (store_id, owner) and not named.unknown
        ):
            found.append(path)
    return found
