"""The parts on a store's further drives: which ones are taken, and which ones may be rewritten.

All parts of one slot have the same number: ``part-<k>`` in every directory but the first. A number
is *taken* while it belongs to a checkpoint, to a slot of this process, or to an unusable directory
that is named like a checkpoint. All other parts may be rewritten, except sealed parts that

- belong to another store, or
- may belong to a directory that is named like a checkpoint and has an unreadable manifest. As long
  as such a directory exists, no sealed part is rewritten.

An unsealed part may always be rewritten, because no manifest matches it.

Pruning removes fewer parts than training may rewrite: see `PartPool.leftovers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from gds import Backend
from offload.checkpoint.reading import read_part
from offload.errors import CheckpointError, UnreadableError
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import PART_FILE_NAME, part_name, part_number
from offload.format.part_file import SealedPart, part_sizes
from offload.store.file_identity import FileIds, ids_in
from offload.store.full_disk import naming_free_space
from offload.store.owners.claims import OwnerClaims
from offload.store.poison import Poison
from offload.store.slots.folder import directories_in
from offload.store.slots.part import Part, adopt_part, create_part, open_part, remove_part

Claims = Mapping[str, frozenset[int] | None]
"""Numbers of the parts that an unusable checkpoint's manifest names, by path of the checkpoint's
directory. The value is None if the manifest cannot be read, so that the numbers are unknown."""


@dataclass(frozen=True, slots=True)
class PartLeftovers:
    """Parts that no checkpoint names, in the groups that pruning distinguishes."""

    removable: list[tuple[Backend, str]] = field(default_factory=list)
    """Backends and paths of the parts that are unsealed, or that belonged to a withdrawn checkpoint
    of this store. No checkpoint needs these parts, even if the first directory is a copy."""

    unnamed: list[str] = field(default_factory=list)
    """Paths of the parts that are sealed for this store although no checkpoint here names them. The
    parts may belong to a store that this one is a copy of."""

    generations: dict[str, int] = field(default_factory=dict)
    """Generation of every part that is sealed for this store, by path, except parts of withdrawn
    checkpoints. Empty if the generation of some checkpoint cannot be read."""


class PartPool:
    """The parts of a store; empty if the store has only one directory.

    Not thread-safe: the store holds its own lock around every call.

    Args:
        drives: Backend and directory of every drive but the first, in order.
        store_id: Identity of the store. Sealed parts of other stores are left alone.
        manifests: Manifests of the store's checkpoints.
        claims: Part numbers that belong to unusable checkpoints.
        poison: Poison of the store. It is set if preparing a free part fails. Once it is set, no
            free part is reused or removed.
        owners: Parts of owners that unusable checkpoints name.
    """

    def __init__(
        self,
        drives: Sequence[tuple[Backend, str]],
        store_id: str,
        manifests: Iterable[Manifest],
        claims: Claims,
        poison: Poison,
        owners: OwnerClaims | None = None,
    ) -> None:
        self._drives = tuple(drives)
        self._store_id = store_id
        self._taken = set[int]().union(*map(part_numbers, manifests))
        self._claims = dict(claims)
        self._poison = poison
        self.owners = owners or OwnerClaims()
        """Parts of the store's other owners that are claimed like the store's own parts."""
        self._withdrawn: set[str] = set()
        """Digests of the parts that withdrawn slots still name."""

    def take_over(self, store_id: str) -> None:
        """Treat sealed parts of another store as the pool's own; see `Store.take_over`."""
        self._store_id = store_id

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of the further drives, in order."""
        return tuple(directory for _, directory in self._drives)

    def num_free(self, drive: int) -> int:
        """Return how many parts on a drive may be rewritten; drives count from 1."""
        return len(self._free()[drive - 1])

    def leftovers(self) -> PartLeftovers:
        """Find the parts that no checkpoint of the store names.

        A process that trains may rewrite all of them, because the user gave it the directories. A
        process that prunes removes only the parts that provably belong to no checkpoint.

        Raises:
            UnreadableError: A part's ``part.json`` could not be read.
        """
        found = PartLeftovers()
        for (backend, directory), free in zip(self._drives, self._free(), strict=True):
            for number in sorted(_numbers(backend, directory)):
                path = f"{directory}/{part_name(number)}"
                sealed = _sealed(backend, path)
                if sealed is None or sealed.digest in self._withdrawn:
                    if number in free:
                        found.removable.append((backend, path))
                elif sealed.store_id == self._store_id:
                    if number in free:
                        found.unnamed.append(path)
                    if None not in self._claims.values():
                        found.generations[path] = sealed.generation
        return found

    def foreign(self) -> list[str]:
        """Return the paths of sealed parts that belong to other stores.

        Raises:
            UnreadableError: A part's ``part.json`` could not be read.
        """
        return [
            f"{directory}/{part_name(number)}"
            for backend, directory in self._drives
            for number in _numbers(backend, directory)
            if (sealed := _sealed(backend, f"{directory}/{part_name(number)}")) is not None
            and sealed.store_id != self._store_id
        ]

    def take(self, layout: Layout) -> tuple[Part, ...]:
        """Return parts for a slot that is about to be written, one on each further drive.

        A slot that several ranks write has none.

        A free part is reused if it fits the layout, and replaced by a new part if it does not.

        Args:
            layout: Layout of the slot.

        Raises:
            gds.StorageError: A part could not be made ready, for example because there is no space.
                Parts created by this call are removed.
        """
        if not self._drives or len(layout.shares) == 1:
            return ()
        free = self._free()
        # A number may lack its part on some drives; prefer the number with the most parts.
        candidates = set[int]().union(*free) - self._not_rewritable(free)
        if candidates and not self._poison:
            number = min(candidates, key=lambda n: (-sum(n in numbers for numbers in free), n))
        else:
            number = self._unused_number()
        parts: list[Part] = []
        made: list[Part] = []
        try:
            for drive, (backend, directory) in enumerate(self._drives, 1):
                name = part_name(number)
                part = None
                if number in free[drive - 1]:
                    with self._poison.fatal("a free part could not be made ready"):
                        part = adopt_part(backend, directory, name, layout, drive)
                        if part is None:  # the part does not fit the layout, or has hard links
                            remove_part(backend, f"{directory}/{name}")
                if part is None:
                    path = f"{directory}/{name}"
                    needed_bytes = part_bytes(layout, drive)
                    with naming_free_space(backend, path, needed_bytes, "part of a slot"):
                        part = create_part(backend, directory, name, layout, drive)
                    made.append(part)
                parts.append(part)
        except BaseException:
            for part in parts:
                if part in made:
                    part.remove()
                else:
                    part.close()
            raise
        self._taken.add(number)
        return tuple(parts)

    def open(self, manifest: Manifest, *, writable: bool) -> tuple[Part, ...]:
        """Open the parts of one of the store's checkpoints, in the order of the drives.

        Raises:
            gds.StorageError: A file cannot be opened. No file is left open.
        """
        parts: list[Part] = []
        try:
            for drive, ((backend, directory), part) in enumerate(
                zip(self._drives_of(manifest), manifest.parts, strict=True), 1
            ):
                parts.append(
                    open_part(
                        backend, directory, part.name, manifest.layout, drive, writable=writable
                    )
                )
        except BaseException:
            for opened in parts:
                opened.close()
            raise
        return tuple(parts)

    def all_exist(self, manifest: Manifest) -> bool:
        """Return whether all parts of a checkpoint exist; a user may have removed one by hand."""
        return all(
            backend.stat(f"{directory}/{part.name}/{PART_FILE_NAME}") is not None
            for (backend, directory), part in zip(
                self._drives_of(manifest), manifest.parts, strict=True
            )
        )

    def ids(self, manifest: Manifest) -> FileIds:
        """Return the inodes and sizes of the files in a checkpoint's parts now, by path.

        Raises:
            gds.StorageError: The files cannot be examined at this moment.
        """
        found: FileIds = {}
        drives = zip(self._drives_of(manifest), manifest.parts, strict=True)
        for drive, ((backend, directory), part) in enumerate(drives, 1):
            path = f"{directory}/{part.name}"
            in_part = ids_in(backend, path, part_sizes(manifest.layout, drive))
            found |= {f"{path}/{name}": known for name, known in in_part.items()}
        return found

    def put_back(self, parts: Sequence[Part]) -> None:
        """Close parts that were taken but not written, and mark them as free."""
        for part in parts:
            part.close()
        self._taken -= _numbers_of(part.name for part in parts)

    def remove(self, parts: Sequence[Part]) -> None:
        """Remove the parts of a slot that was never sealed or has been withdrawn."""
        for part in parts:
            part.remove()
        self._taken -= _numbers_of(part.name for part in parts)

    def release(self, manifest: Manifest) -> None:
        """Mark the parts of a former checkpoint as free."""
        self._taken -= part_numbers(manifest)

    def note_withdrawn(self, manifest: Manifest) -> None:
        """Record that the parts in a withdrawn slot's manifest belong to no checkpoint."""
        self._withdrawn |= {part.digest for part in manifest.parts}

    def claim(self, path: str, manifest: Manifest, found: Manifest | None = None) -> None:
        """Record that a checkpoint is no longer usable; its parts are kept as long as it exists."""
        self.release(manifest)
        self.owners.claim(path, [manifest, *([found] if found else [])])
        self._claims[path] = part_numbers(manifest) | (part_numbers(found) if found else set())

    def release_claim(self, path: str) -> None:
        """Record that the unusable checkpoint at a path no longer exists."""
        self._claims.pop(path, None)
        self.owners.release(path)

    def trim(self, num_slots: int) -> None:
        """Remove free parts that will not be needed, unless the store is poisoned.

        Args:
            num_slots: Largest number of slots that the store will have, including slots that have
                no parts yet.
        """
        if self._poison:
            return
        keep = num_slots - len(self._taken)
        for (backend, directory), numbers in zip(self._drives, self._free(), strict=True):
            for number in sorted(numbers)[max(keep, 0) :]:
                remove_part(backend, f"{directory}/{part_name(number)}")

    def remove_leftovers(self) -> None:
        """Remove the parts that provably belong to no checkpoint, unless the store is poisoned.

        `leftovers` finds these parts.
        """
        if not self._poison:
            for backend, path in self.leftovers().removable:
                remove_part(backend, path)

    def _drives_of(self, manifest: Manifest) -> Sequence[tuple[Backend, str]]:
        """Return the drives that a checkpoint has parts on; none if several ranks have made it."""
        return () if manifest.owners else self._drives

    def _free(self) -> list[set[int]]:
        """Return, for each further drive, the part numbers that may be rewritten on it."""
        claimed = self._taken.union(*(numbers or () for numbers in self._claims.values()))
        unknown = None in self._claims.values()
        out = []
        for backend, directory in self._drives:
            free = set()
            for number in _numbers(backend, directory) - claimed:
                path = f"{directory}/{part_name(number)}"
                if directories_in(backend, path):
                    continue  # this library makes no directory in a part, so a user has made it
                try:
                    sealed = _sealed(backend, path)
                except UnreadableError:
                    continue  # its owner is unknown, so it is left alone
                owner = sealed and sealed.store_id
                if owner is None or (owner == self._store_id and not unknown):
                    free.add(number)
            out.append(free)
        return out

    def _not_rewritable(self, free: Sequence[set[int]]) -> set[int]:
        """Return the part numbers that may not be rewritten on at least one drive."""
        found = [_numbers(backend, directory) for backend, directory in self._drives]
        return set[int]().union(*(a - b for a, b in zip(found, free, strict=True)))

    def _unused_number(self) -> int:
        """Return the smallest part number that no slot, checkpoint or file name uses."""
        names = {
            name for backend, directory in self._drives for name in backend.list_dir(directory)
        }
        claimed = self._taken.union(*(numbers or () for numbers in self._claims.values()))
        return next(n for n in count(1) if n not in claimed and part_name(n) not in names)


def part_numbers(manifest: Manifest) -> frozenset[int]:
    """Return the numbers of a checkpoint's parts."""
    return frozenset(_numbers_of(part.name for part in manifest.parts))


def part_bytes(layout: Layout, drive: int) -> int:
    """Return the size in bytes of a part on a drive."""
    return sum(part_sizes(layout, drive).values())


def _numbers(backend: Backend, directory: str) -> set[int]:
    """Return the numbers of the parts in a directory."""
    found = set()
    for name in backend.list_dir(directory):
        number = part_number(name)
        if number is not None:
            stat = backend.stat(f"{directory}/{name}")
            if stat is not None and stat.kind == "directory":
                found.add(number)
    return found


def _numbers_of(names: Iterable[str]) -> set[int]:
    return {number for name in names if (number := part_number(name)) is not None}


def _sealed(backend: Backend, path: str) -> SealedPart | None:
    """Return the content of a part's ``part.json``, or None if the part is not sealed."""
    try:
        return read_part(backend, path)
    except CheckpointError:
        return None
