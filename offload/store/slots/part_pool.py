"""The parts on a store's further drives: which ones are taken, and which ones may be rewritten.

All parts of one slot have the same name, ``part-<k>``, in every directory but the first. A part
belongs to the checkpoint whose manifest names it. A name is *taken* while it belongs to a
checkpoint, to a slot of this process, or to an unusable directory that is named like a checkpoint.
All other parts may be rewritten, except sealed parts that

- belong to another store, or
- may belong to a directory that is named like a checkpoint and has an unreadable manifest. As long
  as such a directory exists, no sealed part is rewritten.

An unsealed part may always be rewritten, because no manifest matches it.

Pruning removes fewer parts than training may rewrite: see `PartPool.leftovers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from gds import Backend
from offload.checkpoint.reading import read_part
from offload.errors import CheckpointError, UnreadableError
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import PART_FILE_NAME, part_name, part_number
from offload.format.part_file import SealedPart, part_sizes
from offload.store.claims import Claims
from offload.store.slots.folder import (
    FileIds,
    Folder,
    adopt_folder,
    create_folder,
    directories_in,
    ids_in,
    open_folder,
    remove_folder,
)
from offload.store.store_errors import Poison, naming_free_space


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

    Not thread-safe: the store holds its own lock around every call. Once the store is poisoned, for
    example by preparing a free part that fails, no free part is reused or removed.
    """

    def __init__(
        self,
        drives: Sequence[tuple[Backend, str]],
        store_id: str,
        manifests: Sequence[Manifest],
        claims: Claims,
        poison: Poison,
    ) -> None:
        self._drives = tuple(drives)
        self._store_id = store_id
        self._taken = {part.name for manifest in manifests for part in manifest.parts}
        self.claims = claims
        self._poison = poison
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
        """
        found = PartLeftovers()
        for (backend, directory), free in zip(self._drives, self._free(), strict=True):
            for name in _parts_in(backend, directory):
                path = f"{directory}/{name}"
                sealed = _sealed(backend, path)
                if sealed is None or sealed.digest in self._withdrawn:
                    if name in free:
                        found.removable.append((backend, path))
                elif sealed.store_id == self._store_id:
                    if name in free:
                        found.unnamed.append(path)
                    if not self.claims.unknown:
                        found.generations[path] = sealed.generation
        return found

    def foreign(self) -> list[str]:
        """Return the paths of sealed parts that belong to other stores."""
        return [
            path
            for backend, directory in self._drives
            for path in (f"{directory}/{name}" for name in _parts_in(backend, directory))
            if (sealed := _sealed(backend, path)) is not None and sealed.store_id != self._store_id
        ]

    def take(self, layout: Layout) -> tuple[Folder, ...]:
        """Return parts for a slot that is about to be written, one on each further drive.

        A slot that several ranks write has none. A free part is reused if it fits the layout, and
        replaced by a new part if it does not. If that fails, the parts that were made are removed.
        """
        if not self._drives or len(layout.shares) == 1:
            return ()
        free = self._free()
        name = self._chosen(free)
        parts: list[Folder] = []
        made: list[Folder] = []
        try:
            for drive, (backend, directory) in enumerate(self._drives, 1):
                path, sizes, part = f"{directory}/{name}", part_sizes(layout, drive), None
                if name in free[drive - 1]:
                    with self._poison.fatal("a free part could not be made ready"):
                        part = adopt_folder(backend, path, PART_FILE_NAME, sizes, layout, drive)
                        if part is None:
                            remove_folder(backend, path)
                if part is None:
                    with naming_free_space(backend, path, sum(sizes.values()), "part of a slot"):
                        part = create_folder(backend, path, PART_FILE_NAME, sizes, layout, drive)
                    made.append(part)
                parts.append(part)
        except BaseException:
            for part in parts:
                part.close()
                if part in made:
                    remove_folder(part.backend, part.path)
            raise
        self._taken.add(name)
        return tuple(parts)

    def _chosen(self, free: Sequence[Sequence[str]]) -> str:
        """Return the name of the parts for the next slot: free ones, or one that nothing uses."""
        found = [_parts_in(backend, directory) for backend, directory in self._drives]
        candidates = set[str]().union(*free)
        for on_drive, rewritable in zip(found, free, strict=True):
            candidates -= {*on_drive} - {*rewritable}
        if candidates and not self._poison:
            # A name may lack its part on some drives; prefer the name with the most parts.
            return min(candidates, key=lambda n: (-sum(n in names for names in free), _number(n)))
        used = self._taken | self.claims.part_names()
        for backend, directory in self._drives:
            used |= {*backend.list_dir(directory)}
        return next(name for name in map(part_name, count(1)) if name not in used)

    def open(self, manifest: Manifest, *, writable: bool) -> tuple[Folder, ...]:
        """Open the parts of one of the store's checkpoints, in the order of the drives."""
        parts: list[Folder] = []
        try:
            for drive, (backend, path) in enumerate(self._of(manifest), 1):
                names = part_sizes(manifest.layout, drive)
                parts.append(open_folder(backend, path, PART_FILE_NAME, names, writable=writable))
        except BaseException:
            for opened in parts:
                opened.close()
            raise
        return tuple(parts)

    def all_exist(self, manifest: Manifest) -> bool:
        """Return whether all parts of a checkpoint exist; a user may have removed one by hand."""
        return all(
            backend.stat(f"{path}/{PART_FILE_NAME}") is not None
            for backend, path in self._of(manifest)
        )

    def ids(self, manifest: Manifest) -> FileIds:
        """Return the inodes and sizes of the files in a checkpoint's parts now, by path."""
        found: FileIds = {}
        for drive, (backend, path) in enumerate(self._of(manifest), 1):
            in_part = ids_in(backend, path, part_sizes(manifest.layout, drive))
            found |= {f"{path}/{name}": known for name, known in in_part.items()}
        return found

    def put_back(self, parts: Sequence[Folder]) -> None:
        """Close parts that were taken but not written, and mark them as free."""
        for part in parts:
            part.close()
        self._taken -= {part.name for part in parts}

    def remove(self, parts: Sequence[Folder]) -> None:
        """Remove the parts of a slot that was never sealed or has been withdrawn."""
        for part in parts:
            part.close()
            remove_folder(part.backend, part.path)
        self._taken -= {part.name for part in parts}

    def release(self, manifest: Manifest) -> None:
        """Mark the parts of a former checkpoint as free."""
        self._taken -= {part.name for part in manifest.parts}

    def note_withdrawn(self, manifest: Manifest) -> None:
        """Record that the parts in a withdrawn slot's manifest belong to no checkpoint."""
        self._withdrawn |= {part.digest for part in manifest.parts}

    def claim(self, path: str, *manifests: Manifest) -> None:
        """Record that a checkpoint is no longer usable; its parts are kept as long as it exists.

        `manifests` are its manifest as this process has known it, and as it is now.
        """
        self.release(manifests[0])
        self.claims.claim(path, manifests)

    def trim(self, num_slots: int) -> None:
        """Remove free parts that a store of so many slots will not need, unless it is poisoned."""
        if self._poison:
            return
        keep = num_slots - len(self._taken)
        for (backend, directory), names in zip(self._drives, self._free(), strict=True):
            for name in names[max(keep, 0) :]:
                remove_folder(backend, f"{directory}/{name}")

    def remove_leftovers(self) -> None:
        """Remove the parts that `leftovers` finds removable, unless the store is poisoned."""
        if not self._poison:
            for backend, path in self.leftovers().removable:
                remove_folder(backend, path)

    def _of(self, manifest: Manifest) -> Iterator[tuple[Backend, str]]:
        """Yield backend and path of each part of a checkpoint.

        There is none if several ranks made it, or if it has parameters only.
        """
        drives = self._drives if manifest.parts else ()
        for (backend, directory), part in zip(drives, manifest.parts, strict=True):
            yield backend, f"{directory}/{part.name}"

    def _free(self) -> list[list[str]]:
        """Return, for each further drive, the parts that may be rewritten, by rising number."""
        taken = self._taken | self.claims.part_names()
        out: list[list[str]] = []
        for backend, directory in self._drives:
            out.append([])
            for name in _parts_in(backend, directory):
                path = f"{directory}/{name}"
                if name in taken or directories_in(backend, path):
                    continue
                try:
                    sealed = _sealed(backend, path)
                except UnreadableError:
                    continue  # it is not known what it is, so it is left alone
                if sealed is None or (
                    sealed.store_id == self._store_id and not self.claims.unknown
                ):
                    out[-1].append(name)
        return out


def _parts_in(backend: Backend, directory: str) -> list[str]:
    """Return the names of the parts in a directory, by rising number."""
    found = []
    for name in backend.list_dir(directory):
        if part_number(name) is not None:
            stat = backend.stat(f"{directory}/{name}")
            if stat is not None and stat.kind == "directory":
                found.append(name)
    return sorted(found, key=_number)


def _number(name: str) -> int:
    return part_number(name) or 0


def _sealed(backend: Backend, path: str) -> SealedPart | None:
    """Return the content of a part's ``part.json``, or None if the part is not sealed."""
    try:
        return read_part(backend, path)
    except CheckpointError:
        return None
