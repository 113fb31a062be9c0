"""Which parts on a store's other drives belong to a checkpoint, and which may be rewritten.

All parts of one slot have the same number: ``part-<k>`` in every directory but the first. A number
is *taken* while a checkpoint, a slot of this process, or a directory that only looks like a
checkpoint has it. What is left over on the drives may be rewritten, but for sealed parts that

- belong to another store, or
- may belong to a directory named like a checkpoint whose manifest cannot be read: as long as there
  is one, no sealed part is touched.

A part that is not sealed is of no use to anybody: no manifest agrees with it.

Who only prunes removes less: see `PartPool.leftovers`.
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
from offload.store.full_disk import saying_what_is_free
from offload.store.in_place import FileIds, ids_in
from offload.store.part import Part, adopt_part, create_part, open_part, remove_part
from offload.store.poison import Poison
from offload.store.slot import directories_in

Claims = Mapping[str, frozenset[int] | None]
"""By path of a directory named like a checkpoint that is not usable: the numbers that its manifest
names, or None if that cannot be read."""


@dataclass(frozen=True, slots=True)
class PartLeftovers:
    """What parts there are, as somebody who prunes has to know them."""

    removable: list[tuple[Backend, str]] = field(default_factory=list)
    """Backends and paths of those that are not sealed, or that a checkpoint of this store had that
    has been withdrawn: so they belong to nothing, whatever directory is the first one."""

    unnamed: list[str] = field(default_factory=list)
    """Paths of those that are sealed for this store, but of which no checkpoint is here. They may
    belong to a store that this one is a copy of."""

    generations: dict[str, int] = field(default_factory=dict)
    """By path: of all that are sealed for this store, but for those that are `removable`. Empty if
    there is a checkpoint whose own generation cannot be read."""


class PartPool:
    """The parts of a store; empty for a store with one directory.

    Not safe to use from several threads; the store holds its own lock around every call.

    Args:
        drives: Backend and directory of every drive but the first, in order.
        store_id: Parts of other stores are left alone.
        manifests: Of the store's checkpoints.
        claims: Of the directories that are not usable.
        poison: Taken note of where free parts are made ready, and heeded.
    """

    def __init__(
        self,
        drives: Sequence[tuple[Backend, str]],
        store_id: str,
        manifests: Iterable[Manifest],
        claims: Claims,
        poison: Poison,
    ) -> None:
        self._drives = tuple(drives)
        self._store_id = store_id
        self._taken = set[int]().union(*map(part_numbers, manifests))
        self._claims = dict(claims)
        self._poison = poison
        self._withdrawn: set[str] = set()
        """Digests of the parts that slots still name."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Of the drives, in order."""
        return tuple(directory for _, directory in self._drives)

    def num_free(self, drive: int) -> int:
        """Return how many parts on a drive may be rewritten; drives count from 1."""
        return len(self._free()[drive - 1])

    def leftovers(self) -> PartLeftovers:
        """Find the parts that no checkpoint of the store names.

        A process that trains in the directories may rewrite all of them: they were given to it. One
        that prunes removes only those that provably belong to nothing.

        Raises:
            UnreadableError: One could not be read.
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
        """Return the paths of sealed parts that belong to other stores."""
        return [
            f"{directory}/{part_name(number)}"
            for backend, directory in self._drives
            for number in _numbers(backend, directory)
            if (sealed := _sealed(backend, f"{directory}/{part_name(number)}")) is not None
            and sealed.store_id != self._store_id
        ]

    def take(self, layout: Layout) -> tuple[Part, ...]:
        """Return parts for a slot that is about to be written, one on each drive.

        Free ones are taken if they fit the layout and made anew if they do not.

        Args:
            layout: Of the slot.

        Raises:
            gds.StorageError: Among others, no space; what had been made is removed.
        """
        if not self._drives:
            return ()
        free = self._free()
        # Parts of a number may be missing on some drives; prefer the most complete one.
        candidates = set[int]().union(*free) - self._kept(free)
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
                    with self._poison.on_error("a free part could not be made ready"):
                        part = adopt_part(backend, directory, name, layout, drive)
                        if part is None:  # it was made for another layout
                            remove_part(backend, f"{directory}/{name}")
                if part is None:
                    path = f"{directory}/{name}"
                    needed_bytes = part_bytes(layout, drive)
                    with saying_what_is_free(backend, path, needed_bytes, "part of a slot"):
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
        """Open the parts of one of the store's checkpoints."""
        parts: list[Part] = []
        try:
            for drive, ((backend, directory), part) in enumerate(
                zip(self._drives, manifest.parts, strict=True), 1
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

    def are_there(self, manifest: Manifest) -> bool:
        """Return whether nobody has removed a checkpoint's parts by hand."""
        return all(
            backend.stat(f"{directory}/{part.name}/{PART_FILE_NAME}") is not None
            for (backend, directory), part in zip(self._drives, manifest.parts, strict=True)
        )

    def ids(self, manifest: Manifest) -> FileIds:
        """Return by what the files of a checkpoint's parts are known now: by path."""
        found: FileIds = {}
        drives = zip(self._drives, manifest.parts, strict=True)
        for drive, ((backend, directory), part) in enumerate(drives, 1):
            path = f"{directory}/{part.name}"
            in_part = ids_in(backend, path, part_sizes(manifest.layout, drive))
            found |= {f"{path}/{name}": known for name, known in in_part.items()}
        return found

    def put_back(self, parts: Sequence[Part]) -> None:
        """Close parts that were taken and not written; they are free again."""
        for part in parts:
            part.close()
        self._taken -= _numbers_of(part.name for part in parts)

    def remove(self, parts: Sequence[Part]) -> None:
        """Remove the parts of a slot that was never sealed, or has been withdrawn."""
        for part in parts:
            part.remove()
        self._taken -= _numbers_of(part.name for part in parts)

    def release(self, manifest: Manifest) -> None:
        """Note that a checkpoint is none any more: its parts are free."""
        self._taken -= part_numbers(manifest)

    def note_withdrawn(self, manifest: Manifest) -> None:
        """Note that a slot still names parts: they belong to nothing since it was withdrawn."""
        self._withdrawn |= {part.digest for part in manifest.parts}

    def claim(self, path: str, manifest: Manifest, found: Manifest | None = None) -> None:
        """Note that a checkpoint is not usable any more; its parts are kept as long as it is.

        Args:
            path: Where it is.
            manifest: What it is, or was.
            found: What its path says of it now, where that is something else: those parts are
                kept as well.
        """
        self.release(manifest)
        self._claims[path] = part_numbers(manifest) | (part_numbers(found) if found else set())

    def release_claim(self, path: str) -> None:
        """Note that what was not usable at a path is not there any more."""
        self._claims.pop(path, None)

    def trim(self, num_slots: int) -> None:
        """Remove free parts that will not be needed.

        Args:
            num_slots: Most that the store is to have, those included that have no parts yet.
        """
        if self._poison:
            return
        keep = num_slots - len(self._taken)
        for (backend, directory), numbers in zip(self._drives, self._free(), strict=True):
            for number in sorted(numbers)[max(keep, 0) :]:
                remove_part(backend, f"{directory}/{part_name(number)}")

    def remove_leftovers(self) -> None:
        """Remove the parts that provably belong to nothing; see `leftovers`."""
        if not self._poison:
            for backend, path in self.leftovers().removable:
                remove_part(backend, path)

    def _free(self) -> list[set[int]]:
        """Return the numbers on each drive that may be rewritten there."""
        claimed = self._taken.union(*(numbers or () for numbers in self._claims.values()))
        unknown = None in self._claims.values()
        out = []
        for backend, directory in self._drives:
            free = set()
            for number in _numbers(backend, directory) - claimed:
                path = f"{directory}/{part_name(number)}"
                if directories_in(backend, path):
                    continue  # nothing here makes such: it is left alone
                try:
                    sealed = _sealed(backend, path)
                except UnreadableError:
                    continue  # nobody knows whose it is: it is left alone
                owner = sealed and sealed.store_id
                if owner is None or (owner == self._store_id and not unknown):
                    free.add(number)
            out.append(free)
        return out

    def _kept(self, free: Sequence[set[int]]) -> set[int]:
        """Return the numbers that must be left alone on some drive."""
        found = [_numbers(backend, directory) for backend, directory in self._drives]
        return set[int]().union(*(a - b for a, b in zip(found, free, strict=True)))

    def _unused_number(self) -> int:
        names = {
            name for backend, directory in self._drives for name in backend.list_dir(directory)
        }
        claimed = self._taken.union(*(numbers or () for numbers in self._claims.values()))
        return next(n for n in count(1) if n not in claimed and part_name(n) not in names)


def part_numbers(manifest: Manifest) -> frozenset[int]:
    """Return the numbers of a checkpoint's parts."""
    return frozenset(_numbers_of(part.name for part in manifest.parts))


def part_bytes(layout: Layout, drive: int) -> int:
    """Return the bytes that a part on a drive takes."""
    return sum(part_sizes(layout, drive).values())


def _numbers(backend: Backend, directory: str) -> set[int]:
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
    """Return what a part says of itself; None if it is not sealed.

    Raises:
        UnreadableError: It could not be read.
    """
    try:
        return read_part(backend, path)
    except CheckpointError:
        return None
