"""The store: which slots exist, who may write them, and how one becomes a checkpoint.

This is the only code that names files. The protocol, with what is durable after each step:

- A slot ``.slot-<k>`` is written by the steps. No resume ever looks at it, so it may be torn.
- `commit` makes the slot's data durable, then its manifest, then its names, then renames it to
  ``step-<N>`` and makes that durable. The rename is the commit.
- `_withdraw` takes a checkpoint back for rewriting: with an exclusive lock that no reader shares,
  it renames the directory away, makes that durable, overwrites the manifest, makes that durable.
  Only then may data be written. At least one durable checkpoint is always left.

After a failed rename or sync nobody knows what is on disk, so the process recycles nothing more.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gds import Backend, StorageError
from offload.digests import DigestContext
from offload.errors import (
    CheckpointNotFoundError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from offload.free_slots import READER_POLL_S, FreeSlots, lock_existing, try_lock
from offload.layout import Layout
from offload.manifest import Manifest, reserved_bytes
from offload.opening import StoredCheckpoint, open_directory
from offload.slot import (
    TRAIN_STATE_NAME,
    Slot,
    open_slot,
    slot_sizes,
)

# A checkpoint that could not be read may carry any generation. New ones start this far above the
# highest that could be read, so that it stays older even if it becomes readable again.
_UNREADABLE_GAP = 1 << 20


_MAX_OPEN = 3
"""Checkpoints whose files are kept open: what a small keep= recycles is then ready for writing."""


class Store:
    """The one writer of a directory of checkpoints.

    Args:
        backend: Where the directory is.
        directory: Created (with parents) if missing.
        keep: Checkpoints to keep.
        fresh: Withdraw the present checkpoints once the first new one is durable.
        train_state_bytes: Reserved in each slot for the train state.
        reader_timeout_s: Seconds to wait for readers of expired checkpoints.
        allow_volatile: Accept a file system that forgets at power-off.

    Raises:
        StoreLockedError: Someone else is writing to it.
        VolatileStoreError: It would not survive a power-off.
        StoreError: It cannot be created, read or written.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        *,
        keep: int,
        fresh: bool = False,
        train_state_bytes: int,
        reader_timeout_s: float = 60.0,
        allow_volatile: bool = False,
    ) -> None:
        self.backend = backend
        self.directory = os.path.abspath(directory)
        self.keep = keep
        self._train_state_bytes = train_state_bytes
        self._reader_timeout_s = reader_timeout_s
        self._changed = threading.Condition(threading.RLock())
        self._sealing = False
        self._poison = ""
        self._poison_told = False
        opened = open_directory(backend, self.directory, allow_volatile=allow_volatile)
        self._lock = opened.lock
        self._free = FreeSlots(backend, self.directory, opened.leftover)
        self.checkpoints = opened.checkpoints
        """All that are usable, oldest first."""
        self.refused = opened.refused
        """Paths of directories that look like checkpoints but are not usable, and why."""
        newest = self.newest
        self.store_id = newest.manifest.store_id if newest else uuid.uuid4().hex
        for checkpoint in self.checkpoints:
            checkpoint.superseded = fresh
        generations = [c.manifest.generation for c in self.checkpoints]
        self._generation = max(generations, default=0) + _UNREADABLE_GAP * bool(self.refused)
        if fresh:
            self.refused = []  # nobody wants to continue from them

    @property
    def newest(self) -> StoredCheckpoint | None:
        """The valid checkpoint of highest generation, or None; not one that was given up."""
        current = [c for c in self.checkpoints if not c.superseded]
        return max(current, key=lambda c: c.manifest.generation, default=None)

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync failed, so that this process recycles nothing more."""
        return bool(self._poison)

    def find(self, which: int | str) -> StoredCheckpoint:
        """Return the checkpoint with a step number, or with a path or directory name.

        Raises:
            CheckpointNotFoundError: There is none; names those there are.
        """
        usable = [c for c in self.checkpoints if not c.superseded]
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
            self.directory,
        )

    def slot_sizes(self, layout: Layout, num_groups: int) -> dict[str, int]:
        """Return the bytes of each file of a slot for a layout."""
        return slot_sizes(
            layout,
            manifest_bytes=reserved_bytes(layout, num_groups),
            train_state_bytes=self._train_state_bytes,
        )

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check that all slots the retention policy can ever hold will fit.

        Raises:
            StoreFullError: They will not; says how much is missing.
        """
        slot_bytes = sum(self.slot_sizes(layout, num_groups).values())
        superseded = sum(c.superseded for c in self.checkpoints)
        existing = len(self.checkpoints) + len(self._free)
        missing = max(self.keep + 1 - existing, 0)
        if superseded:  # they stay until the first new checkpoint is durable
            missing = max(missing, 2 - len(self._free))
        free = self.backend.free_bytes(self.directory)
        if missing * slot_bytes > free:
            raise StoreFullError(
                errno.ENOSPC,
                f"keeping {self.keep} checkpoints needs {missing} more slots of {slot_bytes} bytes "
                f"each, {missing * slot_bytes} in all, but only {free} bytes are free; free some "
                "space, choose another directory, or pass a smaller keep=",
                self.directory,
            )

    def acquire(self, layout: Layout, num_groups: int) -> Slot:
        """Return a slot to write the next generation into.

        Waits for a seal in flight where that will free a slot, and for readers of expired
        checkpoints for a bounded time.

        Raises:
            StoreBusyError: Readers hold every expired checkpoint.
            gds.StorageError: No space.
        """
        if self._poison and not self._poison_told:
            self._poison_told = True
            warnings.warn(
                f"{self.directory}: {self._poison}. Nobody knows what is on the drive after that, "
                "so this process reuses no slot any more, and every checkpoint takes new space. "
                "Check the drive, and start a new process",
                RuntimeWarning,
                stacklevel=2,
            )
        deadline = None
        while True:
            with self._changed:
                slot = self._free_slot(layout, num_groups)
                if slot is not None:
                    self._generation += 1
                    slot.begin_generation(DigestContext(self.store_id, self._generation))
                    return slot
                if self._sealing:
                    self._changed.wait()
                    continue
                if self._withdraw_expired():
                    continue
            if deadline is None:
                deadline = time.monotonic() + self._reader_timeout_s
                warnings.warn(
                    f"{self.directory}: every expired checkpoint is being read by someone; the "
                    f"next step waits up to {self._reader_timeout_s:g} s for one of them",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if time.monotonic() > deadline:
                raise StoreBusyError(
                    errno.EBUSY,
                    f"readers still hold every expired checkpoint after {self._reader_timeout_s:g} "
                    "s; close them, or raise keep= or Options(reader_timeout_s=...)",
                    self.directory,
                )
            time.sleep(READER_POLL_S)

    def release(self, slot: Slot) -> None:
        """Take back a slot that was acquired and will not be sealed."""
        with self._changed:
            if any(checkpoint.slot is slot for checkpoint in self.checkpoints):
                return  # it has been sealed after all
            if self._poison:
                self._free.discard(slot)
            else:
                self._free.add(slot)
            self._changed.notify_all()

    def begin_seal(self) -> None:
        """Announce a seal: from now until it ends, `acquire` may wait for it."""
        with self._changed:
            self._sealing = True

    def expire(self) -> None:
        """Free a slot for the next step, if more than one checkpoint is durable."""
        with self._changed:
            if not self._free:
                self._withdraw_expired()
            self._changed.notify_all()

    def end_seal(self) -> None:
        """Announce that the seal has ended, well or badly."""
        with self._changed:
            self._sealing = False
            self._changed.notify_all()

    def commit(self, slot: Slot, manifest: Manifest, manifest_data: bytes) -> StoredCheckpoint:
        """Make a written slot the newest checkpoint. When this returns, it is durable.

        Args:
            slot: All its data has been written.
            manifest: What the checkpoint is.
            manifest_data: The same, encoded and padded to the manifest's size.

        Raises:
            StoreBusyError: Readers hold an older checkpoint of the same step.
            gds.StorageError: It could not be made durable. A later process may find it all the
                same, if nothing but the last sync failed.
        """
        path = f"{self.directory}/step-{manifest.step:08d}"
        replaced = lock_existing(self.backend, path, self._reader_timeout_s)
        try:
            with self._poison_on_error("a checkpoint could not be made durable"):
                slot.sync()
                slot.manifest.write_bytes(manifest_data, 0)
                slot.manifest.sync()
                self.backend.sync_dir(slot.path)
                with self._changed:
                    self._rename_into_place(slot, path, exchange=replaced is not None)
        finally:
            if replaced is not None:
                replaced.release()
        checkpoint = StoredCheckpoint(path, manifest, slot)
        with self._changed:
            self.checkpoints.append(checkpoint)
            self._sealing = False
            for old in self.checkpoints[:-_MAX_OPEN]:
                if old.slot is not None:  # a large keep= must not exhaust the file descriptors
                    old.slot.close()
                    old.slot = None
            # It is durable: what fails from here on is the tidying up behind it.
            with suppress(StorageError), self._poison_on_error("an old one was not withdrawn"):
                self._trim()
        return checkpoint

    def replace_train_state(self, checkpoint: StoredCheckpoint, data: bytes) -> None:
        """Replace a checkpoint's train state, atomically; durable when this returns.

        Raises:
            gds.StorageError: No space; the old one is still there.
        """
        slot = self.slot_of(checkpoint)
        file = slot.write_replacement(TRAIN_STATE_NAME, data)
        with self._poison_on_error("a train state could not be replaced"):
            slot.replace(TRAIN_STATE_NAME, file)

    def slot_of(self, checkpoint: StoredCheckpoint) -> Slot:
        """Open a checkpoint's files for reading, if they are not open already."""
        if checkpoint.slot is None:
            checkpoint.slot = self._open(checkpoint, writable=False)
        return checkpoint.slot

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw, durably, every checkpoint that is newer than the given one.

        Raises:
            StoreBusyError: One of them is being read.
            StoreError: A rename or sync has failed before in this process.
        """
        with self._changed:
            newest_first = sorted(self.checkpoints, key=lambda c: -c.manifest.generation)
            for newer in newest_first[: newest_first.index(checkpoint)]:
                if self._poison:
                    raise StoreError(
                        errno.EIO,
                        f"this checkpoint cannot be withdrawn any more: {self._poison}; check the "
                        "drive, and start a new process",
                        newer.path,
                    )
                if not self._withdraw(newer):
                    raise StoreBusyError(
                        errno.EBUSY,
                        "this checkpoint is being read and cannot be withdrawn; close its readers",
                        newer.path,
                    )
            self._drop_spare_slots()

    def close(self) -> None:
        """Close all files and let go of the lock. Idempotent."""
        with self._changed:
            self._free.close()
            for checkpoint in self.checkpoints:
                if checkpoint.slot is not None:
                    checkpoint.slot.close()
            self._lock.release()

    # Everything below runs with `_changed` held.

    def _open(self, checkpoint: StoredCheckpoint, *, writable: bool) -> Slot:
        layout = checkpoint.manifest.layout
        names = self.slot_sizes(layout, len(checkpoint.manifest.groups))
        slot = open_slot(self.backend, checkpoint.path, layout, names, writable=writable)
        manifest = checkpoint.manifest
        slot.begin_generation(DigestContext(manifest.store_id, manifest.generation))
        slot.unchecked = True
        slot.digests = {a: list(d) for a, d in checkpoint.manifest.digests.items()}
        return slot

    def _free_slot(self, layout: Layout, num_groups: int) -> Slot | None:
        sizes = self.slot_sizes(layout, num_groups)
        if not self._poison:
            with self._poison_on_error("a free slot could not be made ready"):
                slot = self._free.take(layout, sizes)
            if slot is not None:
                return slot
        held = sum(not c.superseded for c in self.checkpoints) + self._sealing
        if held < self.keep + 1 or self._poison:
            return self._free.create(layout, sizes)
        return None

    def _withdraw_expired(self) -> bool:
        """Withdraw the oldest checkpoint that retention can spare and nobody reads."""
        current = [c for c in self.checkpoints if not c.superseded]
        num_spare = len(current) + self._sealing - self.keep
        # The newest durable one always stays, also while its successor is being sealed.
        return any(self._withdraw(c) for c in current[: max(min(num_spare, len(current) - 1), 0)])

    def _trim(self) -> None:
        """After a commit: withdraw what retention no longer holds, and remove what is left over."""
        for checkpoint in [c for c in self.checkpoints if c.superseded]:
            self._withdraw(checkpoint)
        while len(self.checkpoints) > self.keep and self._withdraw_expired():
            pass
        self._drop_spare_slots()

    def _drop_spare_slots(self) -> None:
        """Leave one free slot, for the next step, and no more than retention has room for."""
        num_over = len(self._free) + len(self.checkpoints) - (self.keep + 1)
        self._free.drop(min(num_over, len(self._free) - 1))

    def _withdraw(self, checkpoint: StoredCheckpoint) -> bool:
        """Turn a checkpoint into a free slot, durably; False if a reader holds it."""
        if self._poison:
            return False
        if self.backend.stat(checkpoint.path) is None:  # somebody has removed it by hand
            self.checkpoints.remove(checkpoint)
            if checkpoint.slot is not None:
                checkpoint.slot.close()
            return True
        lock = try_lock(self.backend, checkpoint.path)
        if lock is None:
            return False
        try:
            slot = self._writable(checkpoint)
            name = self._free.unused_path()
            with self._poison_on_error("a checkpoint could not be withdrawn"):
                self.backend.rename(checkpoint.path, name)
                self.checkpoints.remove(checkpoint)
                slot.renamed(name)
                self.backend.sync_dir(self.directory)
                slot.invalidate()
            self._free.add(slot)
        finally:
            lock.release()
        return True

    def _writable(self, checkpoint: StoredCheckpoint) -> Slot:
        # What this process sealed is open for writing; what it restored from, for reading only.
        if checkpoint.slot is None or not checkpoint.slot.writable:
            if checkpoint.slot is not None:
                checkpoint.slot.close()
            checkpoint.slot = self._open(checkpoint, writable=True)
        return checkpoint.slot

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
            if old.slot is not None:
                old.slot.close()
        self.refused = [(p, reason) for p, reason in self.refused if p != path]
        self._free.add(working)

    @contextmanager
    def _poison_on_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._poison = self._poison or f"{what} ({error})"
            raise
