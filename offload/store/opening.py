"""Opening a store: lock its directories, and find their checkpoints, slots and parts.

A rename that is visible may still exist only in the page cache. The names in the first directory
say which slots are checkpoints, so that directory is synced before anything in it is trusted. A
directory that has the name of a checkpoint but is not usable is left alone and reported. A read
error stops the opening, because the checkpoint that could not be read may be the newest.
"""

from __future__ import annotations

import errno
import os
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from gds import Backend
from gds.waiting import Monitor
from offload.checkpoint.file_check import kind_of
from offload.checkpoint.owner_parts import owner_directories
from offload.checkpoint.reading import (
    check_name,
    checkpoint_paths,
    decode_manifest,
)
from offload.errors import CheckpointError, CheckpointNotFoundError, MismatchError, StoreError
from offload.format.digests import KnownLeaves
from offload.format.manifest import Manifest
from offload.format.names import (
    MANIFEST_NAME,
    TRAIN_STATE_NAME,
    is_slot_name,
    owner_name,
)
from offload.format.unreadable import as_unreadable
from offload.journal import Journal
from offload.retention.policy import Record
from offload.store.claims import Claims
from offload.store.directories import (
    check_directories,
    make_directories,
    require_number_of_directories,
)
from offload.store.shared import SharedStore
from offload.store.slots.folder import FileIds, ids_in
from offload.store.slots.part_pool import PartPool
from offload.store.slots.slot import Slot, open_slot
from offload.store.store_errors import NOTHING_CHANGED, Poison, as_store_errors
from offload.store.store_id import read_identity
from offload.store.writer_lock import WriterLock


@dataclass(slots=True, eq=False)
class StoredCheckpoint:
    """A sealed slot of a store, as the store's writer knows it."""

    path: str
    """Path of the checkpoint's directory."""

    manifest: Manifest
    """Manifest of the checkpoint, as it was last read or written."""

    slot: Slot | None
    """Open files of the checkpoint; None if this process does not have them open."""

    superseded: bool = False
    """Whether the checkpoint belongs to a history that `fresh=True` has abandoned."""

    model_leaves: KnownLeaves | None = None
    """Known content of the model file at the time the checkpoint's files were last closed."""

    known_ids: FileIds = field(default_factory=dict)
    """Inodes and sizes of the checkpoint's files when they were last closed or examined."""

    folder_times: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Inode of each directory of the checkpoint, and time of the last change of names in it, when
    its files were last found unchanged; empty if such a time is not known."""

    _record: tuple[Manifest, Record] | None = None

    @property
    def record(self) -> Record:
        """Record of the checkpoint that a retention policy decides by, without its pins."""
        if self._record is None or self._record[0] is not self.manifest:
            self._record = self.manifest, record_of(self.manifest)
        return self._record[1]

    @property
    def ids(self) -> FileIds:
        """Inodes and sizes of the checkpoint's files: by name, and those of its parts by path."""
        return self.known_ids if self.slot is None else self.slot.ids

    @property
    def tensor_bytes(self) -> int:
        """Size in bytes of the tensor files on all drives, without the train state."""
        layout = self.manifest.layout
        return sum(sum(layout.file_sizes(drive).values()) for drive in range(len(layout.shares)))

    def close(self) -> None:
        """Close the files if they are open, and keep what is known of them. Idempotent."""
        if self.slot is not None:
            self.known_ids = self.slot.ids
            self.model_leaves = self.slot.model_leaves
            self.slot.close()
            self.slot = None


def record_of(manifest: Manifest) -> Record:
    """Return the record of a checkpoint that a retention policy decides by, without its pins."""
    return Record(
        manifest.step,
        manifest.generation,
        manifest.created,
        manifest.metrics,
        has_state=manifest.has_state,
    )


@dataclass(frozen=True, slots=True)
class StoreContent:
    """An open store: its directories, what was found in them, and what guards changes of it.

    All that works on one store shares this object. Its lists change with the store.
    """

    drives: Sequence[tuple[Backend, str]]
    """Backend and directory of each drive."""

    lock: WriterLock
    """Lock on each directory of the store."""

    poison: Poison
    """Set if a rename or sync fails."""

    store_id: str
    """Identity of the store when it was opened, as 32 hexadecimal digits."""

    is_identified: bool
    """Whether ``store.json`` need not be written, because it holds `store_id` already or because
    the store has only one directory and one owner."""

    taken_over: int
    """Generation that the next history has to begin after, because a checkpoint of this identity
    was about to arrive from elsewhere; 0 if there was none."""

    parts: PartPool
    """Parts on the store's further drives."""

    checkpoints: list[StoredCheckpoint]
    """Usable checkpoints, oldest generation first."""

    refused: list[tuple[str, str]]
    """Paths of directories named like checkpoints that are not usable, each with the reason."""

    shared: SharedStore
    """Owners of state that other ranks serve; none in a store of one process."""

    leftover: list[str]
    """Paths of slots that are not checkpoints. Earlier processes left them; they may be
    rewritten."""

    changed: Monitor = field(default_factory=Monitor)
    """Monitor that is held while the lists change, and while a pin is made."""

    journal: Journal = field(default_factory=Journal)
    """Events that are logged when this process holds none of the store's locks."""

    @property
    def backend(self) -> Backend:
        """Backend of the first directory."""
        return self.drives[0][0]

    @property
    def directory(self) -> str:
        """Path of the first directory."""
        return self.drives[0][1]


def open_directories(
    drives: Sequence[tuple[Backend, str]],
    *,
    fresh: bool,
    allow_volatile: bool,
    allow_remote: bool,
    shared: SharedStore | None,
    store_id: str | None,
) -> StoreContent:
    """Open a store for writing; nothing is created before all directories have been checked."""
    check_directories(drives, fresh=fresh)
    make_directories(drives, allow_volatile=allow_volatile, allow_remote=allow_remote)
    lock = WriterLock()
    try:
        for backend, directory in drives:
            with as_store_errors(backend, directory):
                lock.take(backend, directory)
        with as_unreadable(NOTHING_CHANGED):
            # Names in the other directories become durable when a part is sealed. Until then, no
            # such name is trusted.
            drives[0][0].sync_dir(drives[0][1])
            return _read_content(drives, lock, shared, store_id, fresh=fresh)
    except BaseException:
        lock.release()
        raise


def find_stored(
    checkpoints: Sequence[StoredCheckpoint], which: int | str, directory: str
) -> StoredCheckpoint:
    """Return the checkpoint with a step number, or a path or name; not a superseded one."""
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


def require_state(checkpoint: StoredCheckpoint) -> None:
    """Refuse to go on from a checkpoint of which only the parameters are left.

    Raises:
        MismatchError: The checkpoint has no state.
    """
    if checkpoint.manifest.has_state:
        return
    path = checkpoint.path
    raise MismatchError(
        f"{path}: parameters only, because keep= gave up its state, so no training can go on from "
        f"it. To start new state from its parameters, call offload.load_parameters(model, "
        f"{path!r}), and then make the optimizer with another directory=, or with fresh=True, "
        "which gives up the checkpoints here"
    )


def open_stored(
    backend: Backend, checkpoint: StoredCheckpoint, parts: PartPool, *, writable: bool
) -> Slot:
    """Open a checkpoint's files if they are not open already, and keep them open."""
    if checkpoint.slot is not None and (checkpoint.slot.writable or not writable):
        return checkpoint.slot
    checkpoint.close()
    manifest = checkpoint.manifest
    slot = open_slot(backend, checkpoint.path, manifest.layout, writable=writable)
    try:
        slot.add_parts(parts.open(manifest, writable=writable))
    except BaseException:
        slot.close()
        raise
    slot.opened_sealed(manifest)
    known = checkpoint.model_leaves
    if known is not None and known.inode == slot.model_leaves.inode != 0:
        slot.model_leaves = known
    checkpoint.slot = slot
    return slot


def ids_at(backend: Backend, path: str, manifest: Manifest, parts: PartPool) -> FileIds:
    """Return the inodes and sizes of a checkpoint's files on the drives now; see `Slot.ids`."""
    names = (*manifest.layout.file_sizes(), TRAIN_STATE_NAME, MANIFEST_NAME)
    return ids_in(backend, path, names) | parts.ids(manifest)


def _read_content(
    drives: Sequence[tuple[Backend, str]],
    lock: WriterLock,
    shared: SharedStore | None,
    wanted_id: str | None,
    *,
    fresh: bool,
) -> StoreContent:
    """Read the content of a store whose directories are locked."""
    (backend, directory), *others = drives
    poison, known = Poison(directory), shared or SharedStore()
    other_directories = [path for _, path in others]
    checkpoints, refused = [], []
    claims = Claims()
    for path in checkpoint_paths(backend, directory):
        claims.claim_unknown(path)
        try:
            manifest = decode_manifest(backend, path)
            check_name(path, manifest)
            claims.claim(path, [manifest])
            if manifest.owners and not fresh:
                if shared is None:
                    _require_owners_here(drives, manifest)
                known.require_parts(path, manifest)
            require_number_of_directories(manifest, directory, len(drives))
            known.check_files(backend, path, manifest, other_directories)
        except CheckpointError as error:
            refused.append((path, str(error)))
        else:
            backend.sync_dir(path)  # a process may have died after it replaced the train state
            checkpoints.append(StoredCheckpoint(path, manifest, None))
            claims.release(path)
    checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.generation)
    has_parts = bool(others) or shared is not None  # sealed elsewhere before any checkpoint is
    recorded = read_identity(backend, directory, durable=True) if has_parts else None
    recorded_id = None if recorded is None else recorded.store_id
    if checkpoints:
        store_id = checkpoints[-1].manifest.store_id
    else:
        store_id = wanted_id or recorded_id or uuid.uuid4().hex
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
    return StoreContent(
        drives=drives,
        lock=lock,
        poison=poison,
        store_id=store_id,
        is_identified=recorded_id == store_id or not has_parts,
        taken_over=recorded.taken_over if recorded is not None and recorded_id == store_id else 0,
        parts=parts,
        checkpoints=checkpoints,
        refused=refused,
        shared=known,
        leftover=_leftover_slots(backend, directory),
    )


def _require_owners_here(drives: Sequence[tuple[Backend, str]], manifest: Manifest) -> None:
    """Check that a process that is alone has the directories of all owners of a checkpoint."""
    here = {owner for drive in drives for owner in owner_directories(*drive)}
    missing = [owner_name(one.owner) for one in manifest.owners if one.owner not in here]
    if missing:
        raise StoreError(
            errno.ENOENT,
            f"step {manifest.step} of this store was made by {len(manifest.owners) + 1} ranks, and "
            f"{', '.join(missing)} with parts of its state "
            f"{'is' if len(missing) == 1 else 'are'} not here. Mount the drive, name all "
            "directories that the ranks had in directory=[...], or start all ranks with torchrun, "
            "as before. fresh=True starts over",
            drives[0][1],
        )


def _leftover_slots(backend: Backend, directory: str) -> list[str]:
    """Return the paths of slots that may be rewritten.

    Anything else that has the name of a slot is left alone, with a warning.
    """
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
