"""The parts of one owner of state, and the only process that writes them.

If several ranks write one store, the first directory belongs to owner 0 and is a `Store`. Each
other owner has a directory ``owner-<i>``, which the rank that serves the owner opens as an
`OwnerStore`. A part lives like this:

- `OwnerStore.ready` chooses a part that no checkpoint names and nobody holds, and makes it durably
  invalid. Only then may data be written.
- `OwnerStore.prepare` makes the part's data durable, then its table, then its names. Its result
  goes into the manifest.
- The writer of the manifest decides. After `OwnerStore.published` the part belongs to a checkpoint.
  After `OwnerStore.aborted` it may be written again. If the decision is not known,
  `OwnerStore.abandon` gives the part up: this process never writes it again.

A process holds a shared lock on the part that it writes. So a process that was left over from an
earlier job keeps every later one from adopting the part that it may still write.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import count

from gds import Backend, LockHeldError, StorageError
from offload.checkpoint.owner_parts import (
    check_owner_part,
    look_at_part,
    owner_directories,
    part_names,
)
from offload.errors import OffloadError, StoreError, StoreLockedError, UnreadableError, writing
from offload.format._manifest_fields import ScalarValue
from offload.format.boxes import Box
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import Manifest
from offload.format.names import TABLE_NAME, owner_name, part_name
from offload.format.shares.owners import MAX_OWNERS, ModelBox, OwnerReference
from offload.format.shares.part_table import OwnerTable, owner_sizes
from offload.format.unreadable import as_unreadable
from offload.store.claims import NamedParts, unnamed_parts
from offload.store.directories import make_directories
from offload.store.quarantine import try_to_mark
from offload.store.slots.folder import (
    Folder,
    adopt_folder,
    create_folder,
    locked,
    open_folder,
    remove_folder,
)
from offload.store.slots.slot import OwnerSlot, SlotState
from offload.store.store_errors import NOTHING_CHANGED, Poison, as_store_errors, naming_free_space
from offload.store.writer_lock import WriterLock

_NOT_DURABLE = "a part could not be made durable"

_NOT_READY = "a free part could not be made ready"


class OwnerStore:
    """The only writer of the parts of one owner.

    Calls for different slots may overlap, so that a seal runs beside the steps. Calls for one slot
    must not.

    Args:
        backend: Backend of the directory.
        directory: The store's directory on this node. It is created if it is missing, with its
            parents.
        owner: Number of the owner, from 1.
        store_id: Identity of the store. Sealed parts of other stores are left alone.
        allow_volatile: Accept a file system that loses its content at power-off.
        allow_remote: Accept a file system that another machine or a program serves.

    The errors are those of `offload.store.store.Store`.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        owner: int,
        *,
        store_id: str,
        allow_volatile: bool = False,
        allow_remote: bool = False,
    ) -> None:
        if not 1 <= owner < MAX_OWNERS:
            raise ValueError(f"owner is {owner}, expected 1 to {MAX_OWNERS - 1}")
        self.backend = backend
        self.directory = os.path.abspath(directory)
        self.owner = owner
        self.path = f"{self.directory}/{owner_name(owner)}"
        self.store_id = store_id
        self._poison = Poison(self.path)
        self._lock = WriterLock()
        self._slots: list[OwnerSlot] = []
        """Slots that the caller has; also those that were abandoned."""
        self._leaves: dict[str, KnownLeaves] = {}
        """Known content of the shard file of each part that this process has written, by name."""
        make_directories(
            [(backend, self.path)], allow_volatile=allow_volatile, allow_remote=allow_remote
        )
        try:
            with as_store_errors(backend, self.path):
                self._lock.take(backend, self.path)
            with as_unreadable(NOTHING_CHANGED):
                # A name that is seen may exist only in the page cache.
                backend.sync_dir(self.path)
            self._warn_of_foreign()
        except BaseException:
            self._lock.release()
            raise

    @property
    def poisoned(self) -> bool:
        """Whether a sync has failed, so that this process reuses and removes no part."""
        return bool(self._poison)

    def take_over(self, store_id: str) -> None:
        """Go on with the identity of a store whose checkpoint is about to arrive from elsewhere.

        What the ranks have written under another identity is removed, so that nobody takes it for a
        second store later.
        """
        if store_id != self.store_id:
            self.remove_unnamed(NamedParts({}))
            self.store_id = store_id

    def ready(
        self,
        layout: Layout,
        generation: int,
        named: NamedParts,
        *,
        written: Iterable[tuple[str, Box]] | None = None,
    ) -> OwnerSlot:
        """Return a part to write the next generation into; it is durably invalid.

        A part is rewritten only if no checkpoint names it and no process holds a lock on it. Other
        parts that nobody needs are removed, so that an owner has one part more than checkpoints.

        Args:
            layout: Layout of the part.
            generation: Generation of the checkpoint that the part is written for.
            named: Parts that any checkpoint of the store names at this moment.
            written: Tensors of the model, with the box of each that the owner will write; None for
                the parameters of the layout.

        Raises:
            StoreLockedError: Another process has locked the owner's directory, or may have.
            StoreError: The directory is not the one that was opened.
            UnwritableError: This user may not write to the directory.
            gds.StorageError: There is no space, or another operation failed. No checkpoint has been
                changed.
        """
        self._poison.warn_once()
        boxes = None if written is None else list(written)
        sizes = owner_sizes(layout, boxes)
        with writing(self.path):
            self._lock.require()
            slot = self._free_part(layout, sizes, named) or self._new_part(layout, sizes, named)
        try:
            self._lock.require()  # the part was opened by its path
        except BaseException:
            slot.close()
            raise
        slot.begin_generation(DigestContext(self.store_id, generation))
        self._slots.append(slot)
        return slot

    def prepare(
        self,
        slot: OwnerSlot,
        scalars: Sequence[tuple[ScalarValue, ...] | None],
        model_boxes: Sequence[ModelBox] = (),
    ) -> OwnerReference:
        """Make a written part durable: its data, then its table, then its names.

        Whoever has written the boxes of the model has made them durable before.

        Args:
            slot: Result of `ready`, to which all chunks have been written.
            scalars: Scalar state of each parameter, in the order of the layout.
            model_boxes: Boxes of the model that the owner has written, with their digests.

        Returns:
            Reference to the part, which must not be written before the decision is known.

        Raises:
            OffloadError: The scalar state does not fit into the table.
            StoreError: Files of the part have been replaced, or this process may not write.
            gds.StorageError: The part could not be made durable. It is given up.
        """
        self._require(slot, SlotState.WORKING)
        table = OwnerTable(
            store_id=slot.context.store_id,
            generation=slot.context.generation,
            owner=self.owner,
            layout=slot.layout,
            scalars=tuple(scalars),
            digests={name: tuple(values) for name, values in slot.digests.items()},
            model_boxes=tuple(model_boxes),
        )
        encoded = table.encode(slot.folder.document.size_bytes)
        self._lock.require()
        slot.require_in_place()
        try:
            with self._poison.fatal(_NOT_DURABLE):
                slot.folder.seal(encoded)
        except BaseException:
            self.abandon(slot)
            raise
        slot.state = SlotState.IN_DOUBT
        header = table.header
        return OwnerReference(
            self.owner, self.directory, slot.name, header.generation, header.digest
        )

    def published(self, slot: OwnerSlot) -> None:
        """Record that the checkpoint that names a part is durable.

        The slot stays open, as the source of the next step, until `release`.
        """
        self._require(slot, SlotState.IN_DOUBT)
        slot.published()

    def aborted(self, slot: OwnerSlot) -> None:
        """Record that the checkpoint was aborted before its rename: the part may be written again.

        The part is durably invalid on return; if that fails, it is given up.
        """
        self._require(slot, SlotState.IN_DOUBT)
        try:
            with self._poison.fatal(_NOT_READY):
                slot.folder.invalidate()
        except BaseException:
            self.abandon(slot)
            raise
        slot.state = SlotState.WORKING

    def abandon(self, slot: OwnerSlot) -> None:
        """Give up a part of which it is not known whether a checkpoint names it.

        Its files are closed. This process never writes it again and never removes it. Idempotent.
        """
        if slot.state is not SlotState.SEALED:
            slot.state = SlotState.ABANDONED
            slot.close()

    def release(self, slot: OwnerSlot) -> None:
        """Close a part that the caller no longer needs.

        A part that was reported and not decided is given up instead; see `abandon`. Idempotent.
        """
        if slot.state is SlotState.IN_DOUBT:
            self.abandon(slot)
        if slot.state is not SlotState.ABANDONED:
            slot.close()
            if slot in self._slots:
                self._slots.remove(slot)

    def open(self, reference: OwnerReference, manifest: Manifest) -> OwnerSlot:
        """Open the part of a checkpoint as the source of the next step, for reading only.

        Args:
            reference: The manifest's reference to the part of this owner.
            manifest: Manifest of the checkpoint; the owner's node need not see its file.

        Raises:
            CheckpointError: The part is missing, damaged, or not that of the checkpoint. The
                message names it.
            UnreadableError: The part could not be read.
            gds.StorageError: A file cannot be opened.
        """
        path = f"{self.path}/{reference.name}"
        table = check_owner_part(self.backend, path, manifest, reference)
        layout = table.layout
        names = [*map(array_file_name, layout.array_names), TABLE_NAME]
        if layout.shard is not None:
            names.append(layout.model_name)
        folder = open_folder(self.backend, path, TABLE_NAME, names, writable=False)
        slot = OwnerSlot(layout, folder, KnownLeaves(readable=False))
        slot.opened_sealed(table)
        self._slots.append(slot)
        return slot

    def quarantine(self, slot: OwnerSlot, reason: str) -> None:
        """Mark a part whose data was found damaged by two reads; durable on return.

        No later process uses a checkpoint that names the part. If it cannot be marked, there is a
        warning.
        """
        self._lock.require()
        try_to_mark(self.backend, slot.path, reason, self._poison)

    def remove_unnamed(self, named: NamedParts) -> None:
        """Remove the parts that no checkpoint names and nobody holds."""
        self._lock.require()
        for path in self._unnamed(named):
            with locked(self.backend, path) as is_locked:
                if is_locked:
                    with self._poison.fatal("a part could not be removed"):
                        remove_folder(self.backend, path)

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        for slot in self._slots:
            slot.close()
        self._lock.release()

    def _free_part(
        self, layout: Layout, sizes: Mapping[str, int], named: NamedParts
    ) -> OwnerSlot | None:
        """Return a free part, durably invalid and held, or None; other free parts are removed."""
        reused = None
        for path in self._unnamed(named):
            with locked(self.backend, path) as is_locked:
                if not is_locked:
                    continue  # a reader, or a rank of an earlier job
                with self._poison.fatal(_NOT_READY):
                    folder = None
                    if reused is None:
                        folder = adopt_folder(self.backend, path, TABLE_NAME, sizes, layout)
                    if folder is None:
                        remove_folder(self.backend, path)
                        continue
            reused = self._held(folder, layout, is_new=False)
        return reused

    def _new_part(self, layout: Layout, sizes: Mapping[str, int], named: NamedParts) -> OwnerSlot:
        taken = {*self.backend.list_dir(self.path), *named.of(self.owner), *self._own_names()}
        name = next(part_name(k) for k in count(1) if part_name(k) not in taken)
        path = f"{self.path}/{name}"
        with naming_free_space(self.backend, path, sum(sizes.values()), "part of an owner"):
            folder = create_folder(self.backend, path, TABLE_NAME, sizes, layout)
        slot = self._held(folder, layout, is_new=True)
        if slot is None:
            raise StoreError(
                errno.EBUSY, "another process has locked this new part: start again", path
            )
        return slot

    def _held(self, folder: Folder, layout: Layout, *, is_new: bool) -> OwnerSlot | None:
        """Return a part that is ready, locked as its writer; None if another process locked it."""
        slot = OwnerSlot(layout, folder, self._leaves_of(folder, layout, is_new=is_new))
        try:
            folder.hold()
            slot.require_in_place()
        except LockHeldError:
            slot.close()
            return None
        except BaseException:
            slot.close()
            raise
        return slot

    def _leaves_of(self, folder: Folder, layout: Layout, *, is_new: bool) -> KnownLeaves:
        """Return what is known of the shard file of a part that was made or adopted."""
        if layout.shard is None:
            return KnownLeaves(readable=False)
        inode = folder.files[layout.model_name].inode
        known = None if is_new else self._leaves.get(folder.name)
        if known is None or known.inode != inode or not inode:  # another file is in its place
            known = KnownLeaves(inode, readable=not is_new)
        self._leaves[folder.name] = known
        return known

    def _unnamed(self, named: NamedParts) -> list[str]:
        """Return the paths of the parts that may be rewritten if nobody holds a lock on them."""
        if self._poison:
            return []
        own = self._own_names()
        found = unnamed_parts(self.backend, self.path, self.store_id, named)
        return [path for path in found if os.path.basename(path) not in own]

    def _require(self, slot: OwnerSlot, state: SlotState) -> None:
        if slot.state is not state:
            raise RuntimeError(f"{slot.path} is {slot.state.value}, expected {state.value}")

    def _own_names(self) -> set[str]:
        """Return the names of the parts that the caller has, or that were abandoned."""
        return {slot.name for slot in [*self._slots]}  # another thread may release one meanwhile

    def _warn_of_foreign(self) -> None:
        foreign = []
        for path in (f"{self.path}/{name}" for name in part_names(self.backend, self.path)):
            try:
                part = look_at_part(self.backend, path, self.owner)
            except UnreadableError:
                continue  # it is not known what it is
            if part.header is not None and part.header.store_id != self.store_id:
                foreign.append(path)
        if foreign:
            warnings.warn(
                f"{', '.join(foreign)}: sealed for another store, and left alone. If that store is "
                "gone, remove them: they take space",
                RuntimeWarning,
                stacklevel=3,
            )


def remove_unnamed_parts(
    backend: Backend,
    directory: str,
    *,
    store_id: str,
    named: NamedParts,
    served: Collection[int],
) -> None:
    """Remove the parts of owners that no rank serves and no checkpoint names.

    Owners whose directory another process has locked are passed over.
    """
    for owner in owner_directories(backend, directory):
        if owner in served or owner >= MAX_OWNERS:
            continue
        try:
            opened = OwnerStore(
                backend, directory, owner,
                store_id=store_id, allow_volatile=True, allow_remote=True,
            )  # fmt: skip
        except StoreLockedError:
            continue
        with closing(opened):
            opened.remove_unnamed(named)


def remove_parts_of_former_owners(
    backend: Backend,
    directory: str,
    store_id: str,
    named: NamedParts,
    served: Collection[int] = (),
) -> None:
    """Remove the parts of owners that no rank serves any more, and that no checkpoint names.

    Parts that cannot be removed now stay; the next call tries it again.
    """
    with suppress(StorageError, OffloadError):
        remove_unnamed_parts(backend, directory, store_id=store_id, named=named, served=served)
