"""The store: its slots, its only writer, and the protocol that turns a slot into a checkpoint.

The wing `store` is the only code that gives slots, parts and checkpoints their names. The protocol,
with what is durable after each step:

- The steps write a slot ``.slot-<k>``. No resume ever reads it, so it may be torn.
- `Store.commit` makes the slot's data durable, then its manifest, then the names of its files. Then
  it renames the slot to ``step-<N>`` and makes that name durable. The rename is the commit.
- `Withdrawal` takes a checkpoint back for rewriting. It holds an exclusive lock, which no reader
  shares. It renames the directory away, makes that durable, overwrites the manifest, and makes that
  durable. Only then may data be written. At least one durable checkpoint always remains.
- On a store of several drives, a slot has a part on each of the other drives. `Store.commit` seals
  the parts first, and `Withdrawal` overwrites their ``part.json`` last. Thus the directory's name
  on the first drive alone decides, and a part that was rewritten is recognized as such.

After a failed rename or sync the content of the drives is unknown, so the process recycles nothing
more.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from gds import Backend, StorageError
from gds.waiting import Monitor
from offload.errors import StoreBusyError, StoreError
from offload.format.digests import DigestContext
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME, checkpoint_name
from offload.format.unwritable import writing
from offload.retention.pins import drop_unfinished
from offload.retention.policy import Record, Retention
from offload.store.census import Census
from offload.store.expiry import Keeping, record_of
from offload.store.free_slots import FreeSlots, Patience, lock_existing
from offload.store.full_disk import FULL
from offload.store.identity import write_store_id
from offload.store.opening import StoredCheckpoint, find_stored, open_directories, open_stored
from offload.store.part_pool import PartLeftovers, part_bytes
from offload.store.poison import Poison
from offload.store.quarantine import Quarantine
from offload.store.slot import Slot, slot_sizes
from offload.store.space import Room, no_room, require_room
from offload.store.withdrawal import Withdrawal

# A checkpoint that could not be read may have any generation. New generations start this far above
# the highest readable one, so that this checkpoint stays older even if it becomes readable again.
_UNREADABLE_GAP = 1 << 20

_READERS: Final = "readers hold every expired checkpoint"

_MAX_OPEN = 3
"""Number of checkpoints whose files are kept open. With a small keep=, a recycled checkpoint is
then ready for writing."""


class Store:
    """The only writer of a directory of checkpoints, whose state may be spread over more drives.

    Args:
        backend: Backend of the first directory.
        directory: The store's first directory. Missing directories are created, with their parents.
        others: Backend and directory of each further drive.
        keep: Policy that selects the checkpoints to keep, besides pinned ones and the newest.
        fresh: Withdraw the present checkpoints once the first new one is durable.
        train_state_bytes: Bytes reserved in each slot for the train state.
        reader_timeout_s: Seconds to wait for readers of expired checkpoints.
        allow_volatile: Accept a file system that loses its content at power-off.
        allow_remote: Accept a file system that another machine or a program serves.

    Raises:
        StoreLockedError: Another writer has locked the store.
        VolatileStoreError: The file system of a directory loses its content at power-off.
        RemoteStoreError: Another machine or a program serves the file system of a directory.
        PinError: With `fresh`, a checkpoint is pinned.
        UnreadableError: A file or directory could not be read. No checkpoint has been changed.
        StoreError: The store cannot be created, read or written, or a directory does not fit
            the store.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        others: Sequence[tuple[Backend, str]] = (),
        *,
        keep: Retention,
        fresh: bool = False,
        train_state_bytes: int,
        reader_timeout_s: float = 60.0,
        allow_volatile: bool = False,
        allow_remote: bool = False,
    ) -> None:
        self.backend = backend
        self.directory = os.path.abspath(directory)
        self._train_state_bytes = train_state_bytes
        self._reader_timeout_s = reader_timeout_s
        self._changed = Monitor()
        self._incoming: Record | None = None
        """Record of the checkpoint that is being sealed; None if no seal is in flight."""
        self._poison = Poison(self.directory)
        self._others = [(other, os.path.abspath(path)) for other, path in others]
        drives = [(backend, self.directory), *self._others]
        opened = open_directories(
            drives,
            self._poison,
            fresh=fresh,
            allow_volatile=allow_volatile,
            allow_remote=allow_remote,
        )
        self._lock = opened.lock
        self.store_id = opened.store_id
        self._is_identified = opened.is_identified
        self._parts = opened.parts
        self._free = FreeSlots(backend, self.directory, opened.leftover, self._parts, self._poison)
        self.checkpoints = opened.checkpoints
        """All usable checkpoints, oldest first."""
        self.refused = opened.refused
        """Paths of directories that look like checkpoints but are not usable, each with the
        reason."""
        self._census = Census(backend, self.checkpoints, self.refused, self._parts, self._lock)
        self.keeping = Keeping(
            backend, self.directory, keep, self.checkpoints, self._changed, self._poison,
            self._lock, self._census,
        )  # fmt: skip
        """Retention policy and pins, which decide which checkpoints are kept."""
        self._withdrawal = Withdrawal(
            self.checkpoints, self.keeping, self._free, self._parts, self._lock, self._poison
        )
        self._quarantine = Quarantine(backend, self._poison)
        for checkpoint in self.checkpoints:
            checkpoint.superseded = fresh
        generations = [c.manifest.generation for c in self.checkpoints]
        self._generation = max(generations, default=0) + _UNREADABLE_GAP * bool(self.refused)
        if fresh:
            self.refused.clear()  # a fresh run does not continue from them
            try:
                self.keeping.require_none("fresh=True")
            except BaseException:
                self.close()
                raise

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of the store, one on each drive, in order."""
        return (self.directory, *self._parts.directories)

    @property
    def newest(self) -> StoredCheckpoint | None:
        """Usable checkpoint of the highest generation, or None; superseded ones do not count."""
        return max(self.keeping.current, key=lambda c: c.manifest.generation, default=None)

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed, so that this process recycles nothing more."""
        return bool(self._poison)

    def path_of(self, step: int) -> str:
        """Return the path that the checkpoint of a step has, or would have."""
        return f"{self.directory}/{checkpoint_name(step)}"

    def find(self, which: int | str) -> StoredCheckpoint:
        """Return the checkpoint with a step number, or with a path or directory name.

        Raises:
            CheckpointNotFoundError: No checkpoint matches. The message names the present
                checkpoints.
        """
        return find_stored(self.checkpoints, which, self.directory)

    def warn_of_lost(self) -> None:
        """Warn of checkpoints that other programs have made unusable, as far as noticed."""
        self._census.warn(refused=True)

    def look_again(self, *, warn_of_refused: bool = True) -> None:
        """Remove checkpoints that others have made unusable from `checkpoints`, and warn of each.

        Args:
            warn_of_refused: Whether to warn of checkpoints that are in `refused` now as well.

        Raises:
            gds.StorageError: A checkpoint cannot be examined at this moment.
        """
        with self._changed:
            self._census.take()
        self._census.warn(refused=warn_of_refused)

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is unchanged and not quarantined.

        Raises:
            gds.StorageError: A checkpoint cannot be examined at this moment.
        """
        with self._changed:
            self._census.take()
            return checkpoint.slot is not None and checkpoint in self.checkpoints

    def is_in_place(self, slot: Slot) -> bool:
        """Return whether a slot's open files are under its name; False if that is unknown."""
        with suppress(StorageError):
            return slot.is_in_place()
        return False

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check that the drives have room for all slots that retention is sure to need.

        Args:
            layout: Layout of the slots.
            num_groups: Number of parameter groups.

        Raises:
            StoreFullError: There is no room. The message says how much space is missing.
        """
        require_room(self._rooms(layout, num_groups), self.keeping, self.checkpoints)

    def acquire(self, layout: Layout, num_groups: int) -> Slot:
        """Return a slot to write the next generation into.

        The call waits for a seal in flight if the seal will free a slot, and up to a second for
        readers of expired checkpoints. If the readers stay, the store takes one slot more than
        retention needs, until they release their locks. If there is no room for that slot, the call
        waits for readers up to `reader_timeout_s` seconds.

        Args:
            layout: Layout of the slot.
            num_groups: Number of parameter groups.

        Raises:
            StoreBusyError: Readers hold every expired checkpoint, and there is no room for another
                slot.
            SlotFullError: There is no space. Nothing has changed.
            UnwritableError: This user may not write to the store.
            StoreError: This process may not write to the store any more, or not at this moment.
            gds.StorageError: Another operation on a file failed.
        """
        patience = Patience(self.directory, self._reader_timeout_s)
        look = partial(self._next_slot, layout, num_groups, patience)
        with writing(self.directory):
            while not isinstance(slot := self._changed.wait_until(look), Slot):
                patience.wait()
        return slot

    def release(self, slot: Slot) -> None:
        """Take back a slot that was acquired and will not be sealed."""
        with self._changed:
            if any(checkpoint.slot is slot for checkpoint in self.checkpoints):
                return  # it has been sealed after all
            if self._quarantine.has(slot) or not self._lock.is_held():
                slot.close()  # the slot is evidence of damage, or the store may be another one
                return
            if self._census.let_go(slot):
                return
            if self._poison:
                self._free.discard(slot)
            else:
                self._free.add(slot)
            self._changed.notify_all()

    def begin_seal(self, manifest: Manifest) -> None:
        """Announce a seal: from now until it ends, `acquire` may wait for it.

        Args:
            manifest: Manifest of the checkpoint that is being sealed.
        """
        with self._changed:
            self._incoming = record_of(manifest)

    def expire(self) -> None:
        """Free a slot for the next step if none is free: withdraw an expired checkpoint.

        The newest checkpoint is never withdrawn.
        """
        with self._changed:
            if not self._free:
                self._withdraw_expired()
            self._changed.notify_all()

    def end_seal(self) -> None:
        """Announce that the seal has ended, with success or with an error."""
        with self._changed:
            self._incoming = None
            self._changed.notify_all()

    def commit(self, slot: Slot, manifest: Manifest, manifest_data: bytes) -> StoredCheckpoint:
        """Make a written slot the newest checkpoint; durable on return.

        Args:
            slot: Slot to which all data has been written.
            manifest: Manifest of the checkpoint.
            manifest_data: The manifest, encoded and padded to the size of its file.

        Raises:
            StoreBusyError: Readers hold an older checkpoint of the same step.
            StoreError: Files of the slot have been replaced, or this process may not write to the
                store.
            PinError: An older checkpoint of the same step is pinned.
            gds.StorageError: The checkpoint could not be made durable. If only the last sync
                failed, a later process may find the checkpoint all the same.
        """
        self._lock.require()
        if self.backend.stat(slot.path) is None:
            slot.require_in_place()  # said before a sync fails, which would poison the store
        path = self.path_of(manifest.step)
        replaced = lock_existing(self.backend, path, self._reader_timeout_s)
        try:
            if replaced is not None:
                self.keeping.require_replaceable(path)
            with self._poison.on_error("a checkpoint could not be made durable"):
                slot.sync()
                slot.manifest.write_bytes(manifest_data, 0)
                slot.manifest.sync()
                self.backend.sync_dir(slot.path)
            with self._changed:
                self._lock.require()
                slot.require_in_place()
                with self._poison.on_error("a checkpoint could not be made durable"):
                    in_the_way = self.backend.stat(path) is not None
                    self._rename_into_place(slot, path, exchange=in_the_way)
        finally:
            if replaced is not None:
                replaced.release()
        checkpoint = StoredCheckpoint(path, manifest, slot)
        with self._changed:
            self.checkpoints.append(checkpoint)
            self._incoming = None
            for old in self.checkpoints[:-_MAX_OPEN]:
                old.close()  # a large keep= must not exhaust the file descriptors
            # The checkpoint is durable. Failures from here on only concern the cleanup after it.
            with suppress(StorageError, StoreError):
                self._trim()
        return checkpoint

    def replace_train_state(self, checkpoint: StoredCheckpoint, data: bytes) -> None:
        """Replace a checkpoint's train state atomically; durable on return.

        Args:
            checkpoint: Checkpoint to change.
            data: New content of ``train_state.safetensors``.

        Raises:
            StoreError: This process may not write to the store any more, or not at this moment.
            gds.StorageError: There is no space, and the old train state remains; or the new one
                could not be made durable.
        """
        self._replace(checkpoint, TRAIN_STATE_NAME, data)

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest atomically; durable on return.

        Args:
            checkpoint: Checkpoint to change.
            manifest: New manifest, which describes the same tensors.

        Raises:
            StoreError: This process may not write to the store any more, or not at this moment.
            gds.StorageError: There is no space, and the old manifest remains; or the new one could
                not be made durable.
        """
        size_bytes = self.slot_of(checkpoint).manifest.size_bytes
        self._replace(checkpoint, MANIFEST_NAME, manifest.encode(size_bytes))
        checkpoint.manifest = manifest

    def _replace(self, checkpoint: StoredCheckpoint, name: str, data: bytes) -> None:
        self._lock.require()
        slot = self.slot_of(checkpoint)
        file = slot.write_replacement(name, data)
        try:
            self._lock.require()
        except BaseException:
            file.close()
            raise
        with self._poison.on_error(f"{name} could not be replaced"):
            slot.replace(name, file)

    def leftovers(self) -> tuple[list[str], PartLeftovers]:
        """Return the paths of free slots, and the parts that no checkpoint names."""
        with self._changed:
            self._free.note_withdrawn()
            return self._free.paths(), self._parts.leftovers()

    def prune(self) -> None:
        """Withdraw expired checkpoints without readers, and remove leftovers; durable on return.

        Raises:
            StoreError: This process may not write to the store any more, or not at this moment.
            gds.StorageError: A file could not be removed, or a checkpoint could not be withdrawn
                durably.
        """
        with self._changed:
            self._lock.require()
            while self._withdraw_expired():
                pass
            self._free.note_withdrawn()  # those included that have just been withdrawn
            self._parts.remove_leftovers()  # before the slots, whose manifests identify some parts
            self._free.drop(len(self._free))
            drop_unfinished(self.backend, self.directory)
            self.backend.sync_dir(self.directory)

    def slot_of(self, checkpoint: StoredCheckpoint) -> Slot:
        """Return a checkpoint's open files; open them for reading if they are not open."""
        return open_stored(self.backend, checkpoint, self._parts, writable=False)

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a damaged checkpoint from use, by this process and by later ones.

        The checkpoint is marked durably, no longer counts as a checkpoint, and is otherwise left as
        it is. If it cannot be marked, there is a warning: a later process may then have to find the
        damage again.

        Args:
            checkpoint: One of `checkpoints`.
            reason: Description of the damage.

        Raises:
            StoreError: This process may not write to the store any more, or not at this moment.
        """
        with self._changed:
            self._lock.require()
            self.checkpoints.remove(checkpoint)
            self.refused.append((checkpoint.path, reason))
            self._parts.claim(checkpoint.path, checkpoint.manifest)
            self._quarantine.add(checkpoint, reason)

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw, durably, every checkpoint that is newer than the given one.

        Raises:
            PinError: A newer checkpoint is pinned.
            StoreBusyError: A newer checkpoint is being read.
            StoreError: A rename or sync has failed before in this process, or it may not write any
                more.
            gds.StorageError: A checkpoint could not be withdrawn durably.
        """
        with self._changed:
            newest_first = sorted(self.checkpoints, key=lambda c: -c.manifest.generation)
            self.keeping.require_none_after(checkpoint)
            for newer in newest_first[: newest_first.index(checkpoint)]:
                self._poison.require_none(newer.path)
                if not self._withdrawal.withdraw(newer):
                    raise StoreBusyError(
                        errno.EBUSY,
                        "this checkpoint is being read and cannot be withdrawn; close its readers",
                        newer.path,
                    )
            with suppress(StorageError):
                self._drop_spare_slots()

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        with self._changed:
            self._free.close()
            self._quarantine.close()
            self._census.close()
            for checkpoint in self.checkpoints:
                if checkpoint.slot is not None:
                    checkpoint.slot.close()
            self._lock.release()

    # All methods below are called with `_changed` held.

    def _next_slot(self, layout: Layout, num_groups: int, patience: Patience) -> Slot | str | None:
        """Return a slot that is ready to be written, or what to wait for.

        The result is `_READERS` if only readers can free a slot, and None if a seal in flight may
        free one. Raises the errors of `acquire`.
        """
        self._lock.require()  # in each turn: the directory may be moved during a wait
        self._lock.warn_once()
        self._poison.warn_once()
        slot = self._free_slot(layout, num_groups)
        while slot is None and self._incoming is None:
            if self._withdraw_expired():
                slot = self._free_slot(layout, num_groups)
                continue
            if patience.is_tried:
                slot = self._spare_slot(layout, num_groups)
            break
        if slot is None:
            return _READERS if self._incoming is None else None
        self._require_place_of(slot)
        self._generation += 1
        slot.begin_generation(DigestContext(self.store_id, self._generation))
        return slot

    def _require_place_of(self, slot: Slot) -> None:
        """Check that a slot, which was opened by its path, is in the locked directory.

        If the slot may be in another directory, it is closed and left. From here on the slot is
        written through its file descriptors, wherever its directory is moved.
        """
        try:
            self._lock.require()
        except BaseException:
            slot.close()
            self._parts.put_back(slot.parts)
            raise

    def _free_slot(self, layout: Layout, num_groups: int) -> Slot | None:
        sizes = slot_sizes(layout, num_groups, train_state_bytes=self._train_state_bytes)
        try:
            if not self._poison:
                self._identify()
                slot = self._free.take(layout, sizes)
                if slot is not None:
                    return slot
                if self.keeping.expired(self._incoming):
                    return None  # an expired checkpoint is the next slot, once withdrawn
            return self._free.create(layout, sizes)
        except StorageError as error:
            if error.errno not in FULL:
                raise
            raise no_room(error, self._rooms(layout, num_groups), self.keeping) from error

    def _spare_slot(self, layout: Layout, num_groups: int) -> Slot | None:
        """Create one slot more than retention needs.

        Returns:
            The slot; None if the store has such a slot already, or if there is no room.
        """
        if len(self.checkpoints) + len(self._free) > self.keeping.num_slots():
            return None
        sizes = slot_sizes(layout, num_groups, train_state_bytes=self._train_state_bytes)
        return self._free.create_spare(layout, sizes, self._rooms(layout, num_groups))

    def _rooms(self, layout: Layout, num_groups: int) -> list[Room]:
        sizes = slot_sizes(layout, num_groups, train_state_bytes=self._train_state_bytes)
        rooms = [Room(self.backend, self.directory, len(self._free), sum(sizes.values()))]
        for drive, (backend, directory) in enumerate(self._others, 1):
            num_free = self._parts.num_free(drive)
            rooms.append(Room(backend, directory, num_free, part_bytes(layout, drive)))
        return rooms

    def _identify(self) -> None:
        """Make the store's identity durable before the first part of it is written."""
        if not self._is_identified:
            write_store_id(self.backend, self.directory, self.store_id, self._poison)
            self._is_identified = True

    def _withdraw_expired(self) -> bool:
        """Withdraw the oldest expired checkpoint without readers; return whether there was one."""
        # The newest durable checkpoint always stays, also while its successor is being sealed. The
        # successor displaces no checkpoint by its metrics before it is durable.
        incoming = self._incoming and replace(self._incoming, metrics={})
        if not self.keeping.expired(incoming):
            return False
        self._census.take()  # so that only checkpoints that still exist make others expire
        newest = self.newest
        return any(
            self._withdrawal.withdraw(c) for c in self.keeping.expired(incoming) if c is not newest
        )

    def _trim(self) -> None:
        """After a commit, withdraw superseded and expired checkpoints, and remove spare slots."""
        for checkpoint in [c for c in self.checkpoints if c.superseded]:
            self._withdrawal.withdraw(checkpoint)
        while self._withdraw_expired():
            pass
        self._drop_spare_slots()

    def _drop_spare_slots(self) -> None:
        """Remove free slots that retention has no room for, but keep one for the next step."""
        if not self._lock.is_held():
            return  # by their paths they may be somebody else's
        most = self.keeping.num_slots()
        self._free.drop(min(len(self._free) + len(self.checkpoints) - most, len(self._free) - 1))
        self._parts.trim(most)

    def _rename_into_place(self, slot: Slot, path: str, *, exchange: bool) -> None:
        """Rename a sealed slot to its name as a checkpoint, durably.

        Args:
            slot: Slot to rename.
            path: New path of the slot.
            exchange: Whether another checkpoint has this path. Its directory becomes a free slot.
        """
        working = slot.path
        slot.in_doubt = True
        if not exchange:
            self.backend.rename(working, path)
            slot.renamed(path)
            self.backend.sync_dir(self.directory)
            slot.in_doubt = False
            return
        # A checkpoint of the same step exists: it belongs to an abandoned history, has an older
        # layout, or is damaged. Exchanging the two names leaves no instant without a checkpoint.
        self.backend.exchange(working, path)
        slot.renamed(path)
        replaced = [c for c in self.checkpoints if c.path == path]
        for old in replaced:
            old.path = working
        self.backend.sync_dir(self.directory)
        slot.in_doubt = False
        for old in replaced:
            self.checkpoints.remove(old)
            self._withdrawal.gone(old)
        self._parts.release_claim(path)
        self.refused[:] = [(p, reason) for p, reason in self.refused if p != path]
        self._free.add(working)
