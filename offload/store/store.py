"""The store: which slots exist, who may write them, and how one becomes a checkpoint.

This is the only code that names files. The protocol, with what is durable after each step:

- A slot ``.slot-<k>`` is written by the steps. No resume ever looks at it, so it may be torn.
- `commit` makes the slot's data durable, then its manifest, then its names, then renames it to
  ``step-<N>`` and makes that durable. The rename is the commit.
- `Withdrawal` takes a checkpoint back for rewriting: with an exclusive lock that no reader shares,
  it renames the directory away, makes that durable, overwrites the manifest, makes that durable.
  Only then may data be written. At least one durable checkpoint is always left.
- On a store of several drives a slot has a part on each of the others. `commit` seals the parts
  first, and `Withdrawal` overwrites what they say of themselves last, so that the directory's name
  in the first drive alone decides, and a part that was rewritten is known as such.

After a failed rename or sync nobody knows what is on disk, so the process recycles nothing more.
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

# A checkpoint that could not be read may carry any generation. New ones start this far above the
# highest that could be read, so that it stays older even if it becomes readable again.
_UNREADABLE_GAP = 1 << 20

_READERS: Final = "readers hold every expired checkpoint"

_MAX_OPEN = 3
"""Checkpoints whose files are kept open: what a small keep= recycles is then ready for writing."""


class Store:
    """The one writer of a directory of checkpoints, whose state may be spread over more drives.

    Args:
        backend: Where the directory is.
        directory: Created (with parents) if missing, as are the others.
        others: Backend and directory of each further drive.
        keep: Which checkpoints to keep, besides those that are pinned and the newest.
        fresh: Withdraw the present checkpoints once the first new one is durable.
        train_state_bytes: Reserved in each slot for the train state.
        reader_timeout_s: Seconds to wait for readers of expired checkpoints.
        allow_volatile: Accept a file system that forgets at power-off.
        allow_remote: Accept a file system that another machine or a program serves.

    Raises:
        StoreLockedError: Someone else is writing to it.
        VolatileStoreError: It would not survive a power-off.
        RemoteStoreError: It is served from elsewhere.
        PinError: With `fresh`, some checkpoint is pinned.
        UnreadableError: Something in it could not be read; nothing has been changed.
        StoreError: It cannot be created, read or written, or is not what it was given for.
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
        """Of the checkpoint that is being sealed."""
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
        """All that are usable, oldest first."""
        self.refused = opened.refused
        """Paths of directories that look like checkpoints but are not usable, and why."""
        self._census = Census(backend, self.checkpoints, self.refused, self._parts, self._lock)
        self.keeping = Keeping(
            backend, self.directory, keep, self.checkpoints, self._changed, self._poison,
            self._lock, self._census,
        )  # fmt: skip
        """Which of them are kept."""
        self._withdrawal = Withdrawal(
            self.checkpoints, self.keeping, self._free, self._parts, self._lock, self._poison
        )
        self._quarantine = Quarantine(backend, self._poison)
        for checkpoint in self.checkpoints:
            checkpoint.superseded = fresh
        generations = [c.manifest.generation for c in self.checkpoints]
        self._generation = max(generations, default=0) + _UNREADABLE_GAP * bool(self.refused)
        if fresh:
            self.refused.clear()  # nobody wants to continue from them
            try:
                self.keeping.require_none("fresh=True")
            except BaseException:
                self.close()
                raise

    @property
    def directories(self) -> tuple[str, ...]:
        """One on each drive, in order."""
        return (self.directory, *self._parts.directories)

    @property
    def newest(self) -> StoredCheckpoint | None:
        """The valid checkpoint of highest generation, or None; not one that was given up."""
        return max(self.keeping.current, key=lambda c: c.manifest.generation, default=None)

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync failed, so that this process recycles nothing more."""
        return bool(self._poison)

    def path_of(self, step: int) -> str:
        """Return where a checkpoint of a step is, or would be."""
        return f"{self.directory}/{checkpoint_name(step)}"

    def find(self, which: int | str) -> StoredCheckpoint:
        """Return the checkpoint with a step number, or with a path or directory name.

        Raises:
            CheckpointNotFoundError: There is none; names those there are.
        """
        return find_stored(self.checkpoints, which, self.directory)

    def warn_of_lost(self) -> None:
        """Warn of checkpoints that others have made unusable, as far as that has been noticed."""
        self._census.warn(refused=True)

    def look_again(self, *, warn_of_refused: bool = True) -> None:
        """Take out of `checkpoints` what others have made unusable, with a warning for each.

        Args:
            warn_of_refused: Warn also of what is in `refused` now.

        Raises:
            gds.StorageError: It cannot be told at this moment.
        """
        with self._changed:
            self._census.take()
        self._census.warn(refused=warn_of_refused)

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is still the one on the drive, and unmarked.

        Raises:
            gds.StorageError: It cannot be told at this moment.
        """
        with self._changed:
            self._census.take()
            return checkpoint.slot is not None and checkpoint in self.checkpoints

    def is_in_place(self, slot: Slot) -> bool:
        """Return whether a slot's open files are under its name; False if it cannot be told."""
        with suppress(StorageError):
            return slot.is_in_place()
        return False

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check that all slots that the retention policy is sure to need will fit.

        Raises:
            StoreFullError: They will not; says how much is missing.
        """
        require_room(self._rooms(layout, num_groups), self.keeping, self.checkpoints)

    def acquire(self, layout: Layout, num_groups: int) -> Slot:
        """Return a slot to write the next generation into.

        Waits for a seal in flight where that will free a slot, and a second for readers of expired
        checkpoints. If they stay, the store takes one slot more than retention needs, until they
        let go; only where it cannot, readers are waited for as long as was asked.

        Raises:
            StoreBusyError: Readers hold every expired checkpoint, and there is no room.
            SlotFullError: No space; nothing has changed.
            UnwritableError: This user may not write to the store.
            StoreError: This process may not write to the store any more, or not at this moment.
            gds.StorageError: Another failure.
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
                slot.close()  # nobody writes into evidence, nor into what may be another store
                return
            if self._census.let_go(slot):
                return
            if self._poison:
                self._free.discard(slot)
            else:
                self._free.add(slot)
            self._changed.notify_all()

    def begin_seal(self, manifest: Manifest) -> None:
        """Announce a seal: from now until it ends, `acquire` may wait for it."""
        with self._changed:
            self._incoming = record_of(manifest)

    def expire(self) -> None:
        """Free a slot for the next step, if more than one checkpoint is durable."""
        with self._changed:
            if not self._free:
                self._withdraw_expired()
            self._changed.notify_all()

    def end_seal(self) -> None:
        """Announce that the seal has ended, well or badly."""
        with self._changed:
            self._incoming = None
            self._changed.notify_all()

    def commit(self, slot: Slot, manifest: Manifest, manifest_data: bytes) -> StoredCheckpoint:
        """Make a written slot the newest checkpoint. When this returns, it is durable.

        Args:
            slot: All its data has been written.
            manifest: What the checkpoint is.
            manifest_data: The same, encoded and padded to the manifest's size.

        Raises:
            StoreBusyError: Readers hold an older checkpoint of the same step.
            StoreError: Somebody has replaced files of the slot.
            PinError: An older checkpoint of the same step is pinned.
            gds.StorageError: It could not be made durable. A later process may find it all the
                same, if nothing but the last sync failed.
        """
        self._lock.require()
        if self.backend.stat(slot.path) is None:
            slot.require_in_place()  # said before a sync fails, which would end all reuse of slots
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
            # It is durable: what fails from here on is the tidying up behind it.
            with suppress(StorageError, StoreError):
                self._trim()
        return checkpoint

    def replace_train_state(self, checkpoint: StoredCheckpoint, data: bytes) -> None:
        """Replace a checkpoint's train state, atomically; durable when this returns.

        Raises:
            gds.StorageError: No space; the old one is still there.
        """
        self._replace(checkpoint, TRAIN_STATE_NAME, data)

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest by one of the same tensors; as `replace_train_state`."""
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
        """Withdraw what nothing keeps and nobody reads, and remove leftovers; durable.

        Raises:
            gds.StorageError: Something could not be removed, or not be withdrawn durably.
        """
        with self._changed:
            self._lock.require()
            while self._withdraw_expired():
                pass
            self._free.note_withdrawn()  # those included that have just been withdrawn
            self._parts.remove_leftovers()  # before the slots, by which some of them are known
            self._free.drop(len(self._free))
            drop_unfinished(self.backend, self.directory)
            self.backend.sync_dir(self.directory)

    def slot_of(self, checkpoint: StoredCheckpoint) -> Slot:
        """Open a checkpoint's files for reading, if they are not open already."""
        return open_stored(self.backend, checkpoint, self._parts, writable=False)

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Give up a checkpoint whose content is damaged, also for later processes.

        It is marked durably, counts as a checkpoint no more, and is left as it is otherwise. Where
        it cannot be marked this warns: a later process may then have to find the damage again.

        Args:
            checkpoint: One of `checkpoints`.
            reason: What is wrong with it.
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
            StoreBusyError: One of them is being read.
            StoreError: A rename or sync has failed before in this process.
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
        """Close all files and let go of the lock. Idempotent."""
        with self._changed:
            self._free.close()
            self._quarantine.close()
            self._census.close()
            for checkpoint in self.checkpoints:
                if checkpoint.slot is not None:
                    checkpoint.slot.close()
            self._lock.release()

    # Everything below runs with `_changed` held.

    def _next_slot(self, layout: Layout, num_groups: int, patience: Patience) -> Slot | str | None:
        """Return a slot, or `_READERS` if one may wait for those only; None while a seal may help.

        The first as `acquire` does, ready to be written.
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
        """Check that a slot, which was opened by its path, is in the directory that is locked.

        If it may be in another one, it is closed and left there. From here on it is written to
        through its descriptors, wherever the directory is moved.
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
                    return None  # one of them is the next slot, as soon as it may be had
            return self._free.create(layout, sizes)
        except StorageError as error:
            if error.errno not in FULL:
                raise
            raise no_room(error, self._rooms(layout, num_groups), self.keeping) from error

    def _spare_slot(self, layout: Layout, num_groups: int) -> Slot | None:
        """Make one slot more than retention needs, if it is the first and the drives have room."""
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
        """Withdraw the oldest checkpoint that retention can spare and nobody reads."""
        # The newest durable one always stays, also while its successor is being sealed. That one
        # displaces nobody by its metrics before it is durable, either.
        incoming = self._incoming and replace(self._incoming, metrics={})
        if not self.keeping.expired(incoming):
            return False
        self._census.take()  # so that it is spared for what is there, and not for what was there
        newest = self.newest
        return any(
            self._withdrawal.withdraw(c) for c in self.keeping.expired(incoming) if c is not newest
        )

    def _trim(self) -> None:
        """After a commit: withdraw what retention no longer holds, and remove what is left over."""
        for checkpoint in [c for c in self.checkpoints if c.superseded]:
            self._withdrawal.withdraw(checkpoint)
        while self._withdraw_expired():
            pass
        self._drop_spare_slots()

    def _drop_spare_slots(self) -> None:
        """Leave one free slot, for the next step, and no more than retention has room for."""
        if not self._lock.is_held():
            return  # by their paths they may be somebody else's
        most = self.keeping.num_slots()
        self._free.drop(min(len(self._free) + len(self.checkpoints) - most, len(self._free) - 1))
        self._parts.trim(most)

    def _rename_into_place(self, slot: Slot, path: str, *, exchange: bool) -> None:
        working = slot.path
        slot.in_doubt = True
        if not exchange:
            self.backend.rename(working, path)
            slot.renamed(path)
            self.backend.sync_dir(self.directory)
            slot.in_doubt = False
            return
        # A checkpoint of the same step is there: of a history given up, of an older layout, or
        # damaged. Exchanging the two names leaves no instant without a checkpoint.
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
