"""Opening a store: lock its directories, and find what is in them.

A rename that is visible may still be only in the page cache, so the first directory, whose names
decide, is synced before anything in it is trusted. What was read, looks like a checkpoint and is
not one is left alone and reported. What could not be read stops the opening: it may be the newest.
"""

from __future__ import annotations

import errno
import os
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from gds import Backend
from offload.checkpoint.reading import (
    check_files,
    check_name,
    checkpoint_paths,
    decode_manifest,
    kind_of,
)
from offload.errors import CheckpointError, CheckpointNotFoundError
from offload.format.digests import DigestContext
from offload.format.known_leaves import KnownLeaves
from offload.format.manifest import Manifest
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME, is_slot_name
from offload.format.unreadable import stopping
from offload.store.identity import read_store_id
from offload.store.in_place import FileIds, ids_in
from offload.store.part_pool import PartPool, part_numbers
from offload.store.places import (
    NOTHING_CHANGED,
    make_directories,
    require_number,
    survey,
    using,
)
from offload.store.poison import Poison
from offload.store.slot import Slot, open_slot
from offload.store.writer_lock import WriterLock


@dataclass(slots=True, eq=False)
class StoredCheckpoint:
    """A sealed slot of a store, as its writer sees it."""

    path: str
    manifest: Manifest
    slot: Slot | None
    """Its open files, where this process has them open."""

    superseded: bool = False
    """Whether it belongs to a history that `fresh=True` has given up."""

    model_leaves: KnownLeaves | None = None
    """What was known of its model file when its files were last closed."""

    known_ids: FileIds = field(default_factory=dict)
    """By what its files were known when they were last closed, or looked at."""

    @property
    def ids(self) -> FileIds:
        """By what its files are known: by name, and those of its parts by path."""
        return self.known_ids if self.slot is None else self.slot.ids

    def close(self) -> None:
        """Close its files, where they are open, and keep what is known of them. Idempotent."""
        if self.slot is not None:
            self.known_ids = self.slot.ids
            self.model_leaves = self.slot.model_leaves
            self.slot.close()
            self.slot = None


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """What was found in a store when it was opened."""

    lock: WriterLock
    """On each of its directories."""

    store_id: str

    is_identified: bool
    """Whether a new process would find the same `store_id`, if there were no checkpoint."""

    parts: PartPool
    """What there is on drives other than the first."""

    checkpoints: list[StoredCheckpoint]
    """Usable ones, oldest generation first."""

    refused: list[tuple[str, str]]
    """Paths of those that are not usable, and why."""

    leftover: list[str]
    """Paths of slots that are not checkpoints: of an earlier process, free to be rewritten."""


def open_directories(
    drives: Sequence[tuple[Backend, str]],
    poison: Poison,
    *,
    fresh: bool = False,
    allow_volatile: bool = False,
    allow_remote: bool = False,
) -> OpenedDirectory:
    """Open a store for writing. Nothing is made before every directory is known to be right.

    Args:
        drives: Backend and absolute path of each directory; created, with parents, if missing.
        poison: Of the store.
        fresh: Whether the checkpoints in it are to be given up.
        allow_volatile: Accept a file system that forgets at power-off.
        allow_remote: Accept a file system that another machine or a program serves.

    Raises:
        StoreLockedError: Someone else is writing to one of them.
        VolatileStoreError: One would not survive a power-off.
        RemoteStoreError: One is served from elsewhere.
        UnreadableError: Something could not be read, so that nothing is known of it; what is on
            the drives is what it was.
        StoreError: One cannot be created or written, or is not what it was given for; or the store
            has another number of directories.
    """
    survey(drives, fresh=fresh)
    make_directories(drives, allow_volatile=allow_volatile, allow_remote=allow_remote)
    lock = WriterLock()
    try:
        for backend, directory in drives:
            with using(backend, directory):
                lock.take(backend, directory)
        with stopping(NOTHING_CHANGED):
            # Names in the others are made durable when a part is sealed; until then none is
            # trusted.
            drives[0][0].sync_dir(drives[0][1])
            return _look_around(drives, lock, poison)
    except BaseException:
        lock.release()
        raise


def find_stored(
    checkpoints: Sequence[StoredCheckpoint], which: int | str, directory: str
) -> StoredCheckpoint:
    """Return the checkpoint of a store with a step number, or with a path or directory name.

    Raises:
        CheckpointNotFoundError: There is none; names those there are.
    """
    usable = [c for c in checkpoints if not c.superseded]
    for checkpoint in usable:
        if isinstance(which, int):
            if checkpoint.manifest.step == which:
                return checkpoint
        elif os.path.abspath(which) == checkpoint.path or (
            which == os.path.basename(checkpoint.path)
        ):
            return checkpoint
    names = ", ".join(os.path.basename(c.path) for c in usable) or "none"
    raise CheckpointNotFoundError(
        errno.ENOENT,
        f"no usable checkpoint {which!r} in this store (it has: {names})",
        directory,
    )


def open_stored(
    backend: Backend, checkpoint: StoredCheckpoint, parts: PartPool, *, writable: bool
) -> Slot:
    """Open a checkpoint's files, if they are not open already, and keep them open.

    What this process sealed is open for writing; what it restored from, for reading only.
    """
    if checkpoint.slot is not None and (checkpoint.slot.writable or not writable):
        return checkpoint.slot
    checkpoint.close()
    manifest = checkpoint.manifest
    slot = open_slot(backend, checkpoint.path, manifest.layout, writable=writable)
    try:
        slot.parts = parts.open(manifest, writable=writable)
    except BaseException:
        slot.close()
        raise
    slot.begin_generation(DigestContext(manifest.store_id, manifest.generation))
    slot.unchecked = True
    slot.digests = {name: list(digests) for name, digests in manifest.digests.items()}
    known = checkpoint.model_leaves
    if known is not None and known.inode == slot.model_leaves.inode != 0:
        slot.model_leaves = known
    checkpoint.slot = slot
    return slot


def ids_at(backend: Backend, path: str, manifest: Manifest, parts: PartPool) -> FileIds:
    """Return by what the files of a checkpoint are known now: by name, those of parts by path.

    Args:
        backend: Where it is.
        path: Its directory.
        manifest: Says which files it has.
        parts: Of its store.

    Raises:
        gds.StorageError: It cannot be told at this moment.
    """
    names = (*manifest.layout.file_sizes(), TRAIN_STATE_NAME, MANIFEST_NAME)
    return ids_in(backend, path, names) | parts.ids(manifest)


def _look_around(
    drives: Sequence[tuple[Backend, str]], lock: WriterLock, poison: Poison
) -> OpenedDirectory:
    (backend, directory), *others = drives
    other_directories = [path for _, path in others]
    checkpoints, refused = [], []
    claims: dict[str, frozenset[int] | None] = {}
    for path in checkpoint_paths(backend, directory):
        claims[path] = None
        try:
            manifest = decode_manifest(backend, path)
            check_name(path, manifest)
            claims[path] = part_numbers(manifest)
            require_number(manifest, directory, len(drives))
            check_files(backend, path, manifest, other_directories)
        except CheckpointError as error:
            refused.append((path, str(error)))
        else:
            backend.sync_dir(path)  # a train state may just have been replaced in it
            checkpoints.append(StoredCheckpoint(path, manifest, None))
            del claims[path]
    checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.generation)
    recorded = read_store_id(backend, directory, durable=True) if others else None
    store_id = checkpoints[-1].manifest.store_id if checkpoints else recorded or uuid.uuid4().hex
    parts = PartPool(others, store_id, [c.manifest for c in checkpoints], claims, poison)
    for checkpoint in checkpoints:
        checkpoint.known_ids = ids_at(backend, checkpoint.path, checkpoint.manifest, parts)
    if foreign := parts.foreign():
        warnings.warn(
            f"{', '.join(foreign)}: sealed for another store, and left alone. If that store is "
            "gone, remove them: they take space",
            RuntimeWarning,
            stacklevel=2,
        )
    leftover = _leftover_slots(backend, directory)
    return OpenedDirectory(
        lock=lock,
        store_id=store_id,
        is_identified=recorded == store_id or not others,
        parts=parts,
        checkpoints=checkpoints,
        refused=refused,
        leftover=leftover,
    )


def _leftover_slots(backend: Backend, directory: str) -> list[str]:
    """Return the slots that may be rewritten; what only has such a name is left alone."""
    found = []
    for path in (f"{directory}/{n}" for n in backend.list_dir(directory) if is_slot_name(n)):
        stat = backend.stat(path)
        if stat is not None and stat.kind == "directory":
            found.append(path)
        elif stat is not None:
            warnings.warn(
                f"{path}: {kind_of(stat)}, expected a directory: not used, and left alone. Remove "
                "it",
                RuntimeWarning,
                stacklevel=2,
            )
    return found
