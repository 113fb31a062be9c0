"""The store: its slots, its only writer, and the protocol that turns a slot into a checkpoint.

The wing `store` is the only code that gives slots, parts and checkpoints their names. The protocol,
with what is durable after each step:

- The steps write a slot ``.slot-<k>``. No resume ever reads it, so it may be torn.
- `Sealing.prepare` makes the slot's data durable, then its manifest, then the names of its files.
- `Sealing.publish` renames the slot to ``step-<N>`` and makes that name durable. The rename is the
  commit.
- `Withdrawal` takes a checkpoint back for rewriting. It holds an exclusive lock, which no reader
  shares. It renames the directory away, makes that durable, overwrites the manifest, and makes that
  durable. Only then may data be written. At least one durable checkpoint always remains.
- `StateRemoval` takes the state of a checkpoint that keeps its parameters. A manifest without state
  replaces that of the checkpoint, durably, before any file of state leaves its directory.
- On a store of several drives, a slot has a part on each of the other drives. `Sealing.prepare`
  seals the parts first, and `Withdrawal` overwrites their ``part.json`` last. Thus only the name of
  the directory on the first drive says whether a slot is a checkpoint, and a rewritten part is
  recognized by its ``part.json``.

After a failed rename or sync the content of the drives is unknown, so this process recycles no
checkpoint any more.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from gds import Backend, StorageError
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.recut.source import Recode, RecutSource
from offload.errors import StoreBusyError, StoreError
from offload.format.boxes import Cut
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME
from offload.format.part_file import part_sizes
from offload.format.train_state import EncodedState
from offload.retention.pins import drop_unfinished
from offload.retention.policy import Retention
from offload.store.census import Census
from offload.store.claims import NamedParts
from offload.store.expiry import Keeping
from offload.store.opening import StoredCheckpoint, find_stored, open_directories, open_stored
from offload.store.owner_store import remove_parts_of_former_owners
from offload.store.quarantine import try_to_mark
from offload.store.sealing import Sealing, pack_train_state
from offload.store.shared import SharedStore
from offload.store.slots.free import FreeSlots
from offload.store.slots.part_pool import PartLeftovers
from offload.store.slots.slot import Slot
from offload.store.slots.supply import SlotSupply
from offload.store.space import (
    available_bytes,
    require_on_drives,
)
from offload.store.store_errors import FULL
from offload.store.withdrawal import Withdrawal


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
        shared: Owners of state that other ranks serve; None for a store of one process. This
            process then is the owner 0 of the state.
        store_id: Identity that the store gets if it has no checkpoints; None for a new one.

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
        shared: SharedStore | None = None,
        store_id: str | None = None,
    ) -> None:
        self.backend = backend
        self.directory = os.path.abspath(directory)
        self._is_shared = shared is not None
        further = [(other, os.path.abspath(path)) for other, path in others]
        opened = open_directories(
            [(backend, self.directory), *further],
            fresh=fresh,
            allow_volatile=allow_volatile,
            allow_remote=allow_remote,
            shared=shared,
            store_id=store_id,
        )
        for checkpoint in opened.checkpoints:
            checkpoint.superseded = fresh
        self._drives = opened.drives
        self._lock = opened.lock
        self._poison = opened.poison
        self._changed = opened.changed
        self.store_id = opened.store_id
        self._parts = opened.parts
        self._free = FreeSlots(opened)
        self.checkpoints = opened.checkpoints
        """All usable checkpoints, oldest first."""
        self.refused = opened.refused
        """Paths of directories that look like checkpoints but are not usable, each with the
        reason."""
        self._census = Census(opened)
        self.keeping = Keeping(opened, keep, self._census)
        """Retention policy and pins, which decide which checkpoints are kept."""
        self.journal = opened.journal
        """Events that are logged when this process holds none of the store's locks."""
        self._withdrawal = Withdrawal(opened, self.keeping, self._census, self._free)
        self.sealing = Sealing(
            opened, self.keeping, self._withdrawal, self._free, reader_timeout_s=reader_timeout_s
        )
        """Object that turns written slots into checkpoints."""
        self._supply = SlotSupply(
            opened, self._free, self.keeping, self._withdrawal, self.sealing,
            train_state_bytes=train_state_bytes, reader_timeout_s=reader_timeout_s,
            owners=tuple(shared.directories.values()) if shared is not None else (),
        )  # fmt: skip
        self._is_tidy = False
        """Whether this process has removed what earlier ones left in checkpoints without state."""
        self._damaged: list[StoredCheckpoint] = []
        """Checkpoints that this process has found damaged."""
        if fresh:
            self.refused.clear()  # a fresh run does not continue from them
            try:
                self.keeping.require_no_pins("fresh=True")
            except BaseException:
                self.close()
                raise

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of the store, one on each drive, in order."""
        return (self.directory, *self._parts.directories)

    @property
    def state_directories(self) -> tuple[str, ...]:
        """Directories that have the state of this process, one on each drive: all of them."""
        return self.directories

    @property
    def newest(self) -> StoredCheckpoint | None:
        """Usable checkpoint with state of the highest generation, or None; see `Keeping.newest`."""
        return self.keeping.newest

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed, so that this process recycles no checkpoint."""
        return bool(self._poison)

    def find(self, which: int | str) -> StoredCheckpoint:
        """Return the checkpoint with a step number, or with a path or directory name."""
        return find_stored(self.checkpoints, which, self.directory)

    def warn_of_lost(self) -> None:
        """Warn of checkpoints that earlier checks have found unusable because of other programs."""
        self._census.warn(refused=True)

    def refresh(self, *, warn_of_refused: bool = True) -> None:
        """Compare `checkpoints` with the drives, and warn of those that others made unusable."""
        with self._changed:
            self._census.update()
        self._census.warn(refused=warn_of_refused)

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is unchanged and not quarantined."""
        with self._changed:
            if checkpoint in self.checkpoints:
                self._census.update([checkpoint])
            return checkpoint.slot is not None and checkpoint in self.checkpoints

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check that the drives have room for all slots that retention is sure to need."""
        self._supply.require_space(layout, num_groups)

    @property
    def served(self) -> Store:
        """The store: this process writes all of it."""
        return self

    def take_over(self, store_id: str, generation: int, owners: Sequence[str] = ()) -> None:
        """Go on with the identity of a store whose checkpoint is about to arrive from elsewhere.

        The next slot that is acquired is for that checkpoint, and has at least its generation.

        Args:
            store_id: Identity of that store.
            generation: Generation of its checkpoint.
            owners: For each owner that made it, but the first, the directory that gets its part.
        """
        with self._changed:
            if self.checkpoints or self.refused:
                raise StoreError(
                    errno.EEXIST,
                    "the store has checkpoints, so that none can be taken from elsewhere",
                    self.directory,
                )
            self.store_id = store_id
            self._parts.take_over(store_id)
            self._supply.take_over(store_id, generation, owners)

    def acquire(self, layout: Layout, num_groups: int, *, is_new: bool = False) -> Slot:
        """Return a slot to write the next generation into.

        The call waits for a seal in flight if the seal will free a slot, and up to a second for
        readers of expired checkpoints. If the readers stay, the store takes one slot more than
        retention needs, until they release their locks. If there is no room for that slot, the call
        waits for readers up to `reader_timeout_s` seconds.

        Raises:
            StoreBusyError: Readers hold every expired checkpoint, and there is no room for another
                slot.
            SlotFullError: There is no space. Nothing has changed.
            UnwritableError: This user may not write to the store.
            StoreError: This process may not write to the store any more, or not at this moment.
        """
        del is_new
        if not self._is_tidy:
            with self._changed, suppress(StorageError):  # it only takes space
                self._withdrawal.remove_dropped()
            self._is_tidy = True
        if self._is_shared and self._parts.directories:
            with self._changed:  # what one process had on further drives before there were ranks
                self._free.note_withdrawn()
                self._parts.remove_leftovers()
        elif not self._is_shared:
            named = self.named_parts()
            for backend, directory in self._drives:
                remove_parts_of_former_owners(backend, directory, self.store_id, named)
        return self._supply.acquire(layout, num_groups)

    def slot_bytes(self, layout: Layout, num_groups: int) -> int:
        """Return the size in bytes of a slot in the first directory."""
        return self._supply.slot_bytes(layout, num_groups)

    def lasting_parts(self) -> NamedParts:
        """Return the parts of other owners that checkpoints name which do not expire now."""
        with self._changed:
            expired = [checkpoint.path for checkpoint in self.keeping.expired()]
            return self.named_parts(leaving_out=expired)

    def available_bytes(self) -> int:
        """Return the bytes that the next slot may take on the drive of the first directory."""
        with self._changed:
            expired = [checkpoint.path for checkpoint in self.keeping.expired()]
            return available_bytes(
                self.backend,
                self.directory,
                self.store_id,
                self.named_parts(leaving_out=expired),
                [*self._free.paths(), *expired],
            )

    def fits(self, checkpoint: StoredCheckpoint, cuts: Mapping[str, Cut] | None) -> bool:
        """Return whether the state of a checkpoint lies in the cut of this process, as a whole."""
        return cuts is None and not checkpoint.manifest.owners

    def seen_state(self, checkpoint: StoredCheckpoint) -> Collection[int]:
        """Return nothing: one process sees everything, or cannot use the checkpoint."""
        del checkpoint
        return ()

    def recut(
        self,
        checkpoint: StoredCheckpoint,
        cuts: Mapping[str, Cut] | None,
        *,
        with_state: Collection[int] = (),
        recode: Recode | None = None,
        shares: Sequence[int] = (1,),
    ) -> RecutSource:
        """Return the state of a checkpoint of several ranks as one process has it."""
        del with_state
        path, manifest = checkpoint.path, checkpoint.manifest
        further = self.directories[1:]
        return RecutSource(
            self.backend, path, manifest, cuts, further, recode=recode, shares=shares
        )

    def require_recut_room(self, layout: Layout, num_groups: int) -> None:
        """Check that there is room for the first slot of another cut."""
        named, rooms = self.lasting_parts(), []
        for drive, (backend, directory) in enumerate(self._drives):
            if drive:
                needed = sum(part_sizes(layout, drive).values())
                available = available_bytes(backend, directory, self.store_id, named, ())
            else:
                needed, available = self.slot_bytes(layout, num_groups), self.available_bytes()
            free = backend.free_bytes(directory)
            rooms.append((directory, needed, free, max(available - free, 0)))
        require_on_drives(rooms)

    def release(self, slot: Slot) -> None:
        """Take back a slot that was acquired and will not be sealed."""
        with self._changed:
            if self.checkpoint_of(slot) is not None:
                return  # the slot has been sealed meanwhile
            if any(c.slot is slot for c in self._damaged) or not self._lock.is_held():
                slot.close()  # not reused: it is damaged, or the store may have another writer
                return
            if self._census.release(slot):
                return
            if self._poison:
                self._free.discard(slot)
            else:
                self._free.add(slot)
            self._changed.notify_all()

    def expire(self) -> None:
        """Free a slot for the next step if none is free: withdraw an expired checkpoint."""
        with self._changed:
            if not self._free:
                try:
                    self._withdrawal.withdraw_expired(self.sealing.incoming)
                except StorageError as error:
                    if error.errno not in FULL:
                        raise  # of a full disk, the next step says more
            self._changed.notify_all()

    def replace_train_state(self, checkpoint: StoredCheckpoint, train_state: EncodedState) -> None:
        """Replace a checkpoint's train state atomically; durable on return."""
        size_bytes = self.slot_of(checkpoint).train_state.size_bytes
        packed = pack_train_state(train_state, checkpoint.manifest, size_bytes)
        self._replace(checkpoint, TRAIN_STATE_NAME, packed)

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest by one of the same tensors, atomically and durably."""
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
        with self._poison.fatal(f"{name} could not be replaced"):
            slot.replace(name, file)

    def named_parts(self, *, leaving_out: Collection[str] = ()) -> NamedParts:
        """Return the parts of other owners that any checkpoint of the store names at this moment.

        Every other part of an owner may be rewritten. For a forecast, the checkpoints at the paths
        `leaving_out` do not count.
        """
        with self._changed:
            kept = [c for c in self.checkpoints if c.path not in leaving_out]
            return self._parts.claims.named(c.manifest for c in kept)

    def leftovers(self) -> tuple[list[str], PartLeftovers]:
        """Return the paths of free slots, and the parts that no checkpoint names."""
        with self._changed:
            self._free.note_withdrawn()
            return self._free.paths(), self._parts.leftovers()

    def prune(self) -> None:
        """Withdraw expired checkpoints without readers, and remove leftovers; durable on return."""
        with self._changed:
            self._lock.require()
            self._withdrawal.withdraw_all_expired(self.sealing.incoming)
            self._withdrawal.remove_dropped()
            self._free.note_withdrawn()  # including the slots that have just been withdrawn
            self._parts.remove_leftovers()  # before the slots, whose manifests identify some parts
            self._free.drop(len(self._free))
            drop_unfinished(self.backend, self.directory)
            self.backend.sync_dir(self.directory)

    def checkpoint_of(self, slot: Slot) -> StoredCheckpoint | None:
        """Return the usable checkpoint that a slot is; None if it is none."""
        return next((c for c in self.checkpoints if c.slot is slot), None)

    def reader_of(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        """Return a checkpoint as readers see it."""
        parts = self.directories[1:]
        return Checkpoint(self.backend, checkpoint.path, checkpoint.manifest, parts)

    def slot_of(self, checkpoint: StoredCheckpoint) -> Slot:
        """Return a checkpoint's open files; open them for reading if they are not open."""
        return open_stored(self.backend, checkpoint, self._parts, writable=False)

    def fetch(self, checkpoint: StoredCheckpoint) -> None:
        """Do nothing: this process sees the whole checkpoint."""

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a damaged checkpoint from use, by this process and by later ones.

        It is marked durably, and otherwise left as it is. If it cannot be marked, there is a
        warning: a later process may then have to find the damage again.
        """
        with self._changed:
            self._lock.require()
            self._exclude(checkpoint, reason)
            self._damaged.append(checkpoint)
            try_to_mark(self.backend, checkpoint.path, reason, self._poison)

    def refuse(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a checkpoint from use by this process, as a rank cannot use its part of it."""
        with self._changed:
            self._exclude(checkpoint, reason)
            checkpoint.close()

    def _exclude(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Count a checkpoint as unusable, and keep its parts."""
        self.checkpoints.remove(checkpoint)
        self.refused.append((checkpoint.path, reason))
        self._parts.claim(checkpoint.path, checkpoint.manifest)

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw, durably, what going on from the given checkpoint gives up."""
        with self._changed:
            self.keeping.require_no_newer_pins(checkpoint)
            for newer in self.keeping.given_up_for(checkpoint):
                self._poison.require_healthy(newer.path)
                if not self._withdrawal.withdraw(newer):
                    raise StoreBusyError(
                        errno.EBUSY,
                        "this checkpoint is being read and cannot be withdrawn; close its readers",
                        newer.path,
                    )
            with suppress(StorageError):
                self._withdrawal.drop_spare_slots()

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        with self._changed:
            self._free.close()
            self._census.close()
            for checkpoint in (*self.checkpoints, *self._damaged):
                if checkpoint.slot is not None:
                    checkpoint.slot.close()
            self._lock.release()
