"""Supply of slots to write into: free slots, slots of expired checkpoints, and new slots."""

from __future__ import annotations

import errno
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from gds import StorageError
from offload.errors import StoreBusyError, writing
from offload.format.digests import DigestContext
from offload.format.layout import Layout
from offload.format.manifest import slot_sizes
from offload.format.part_file import part_sizes
from offload.journal import log_event
from offload.store.expiry import Keeping
from offload.store.opening import StoreContent
from offload.store.sealing import Sealing
from offload.store.slots.folder import READER_POLL_S
from offload.store.slots.free import FreeSlots
from offload.store.slots.slot import Slot
from offload.store.space import Room, file_bytes, has_room, no_room, require_room
from offload.store.store_errors import FULL
from offload.store.store_id import StoreIdentity, write_store_id
from offload.store.withdrawal import Withdrawal
from offload.units import size

# A checkpoint that could not be read may have any generation. New generations start this far above
# the highest readable one, so that this checkpoint stays older even if it becomes readable again.
_UNREADABLE_GAP = 1 << 20

_READERS: Final = "readers hold every expired checkpoint"

_SPARE_AFTER_S = 1.0
"""Seconds that a step waits for readers before it takes one additional slot, if there is room."""

_log = logging.getLogger("offload")


class SlotSupply:
    """Gives out slots for new generations of a store's state.

    Once the store is poisoned, every slot is a new one. `owners` has the store's directory on the
    node of each owner of state besides the first.
    """

    def __init__(
        self,
        opened: StoreContent,
        free: FreeSlots,
        keeping: Keeping,
        withdrawal: Withdrawal,
        sealing: Sealing,
        *,
        train_state_bytes: int,
        reader_timeout_s: float,
        owners: Sequence[str] = (),
    ) -> None:
        self._backend = opened.backend
        self._directory = opened.directory
        self._others = opened.drives[1:]
        self._lock = opened.lock
        self._store_id = opened.store_id
        self._is_identified = opened.is_identified
        self._taken_over = opened.taken_over
        self._is_arriving = False
        """Whether the next slot is for the checkpoint that was taken over."""
        self._arriving_owners: Sequence[str] = ()
        """For each owner that made that checkpoint, but the first, the directory of its part."""
        self._checkpoints = opened.checkpoints
        self._parts = opened.parts
        self._free = free
        self._keeping = keeping
        self._withdrawal = withdrawal
        self._sealing = sealing
        self._poison = opened.poison
        self._changed = opened.changed
        self._train_state_bytes = train_state_bytes
        self._reader_timeout_s = reader_timeout_s
        self._owners = owners
        generations = [c.manifest.generation for c in opened.checkpoints]
        self._generation = max(generations, default=0) + _UNREADABLE_GAP * bool(opened.refused)

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check that there is room for all slots that are sure to be needed; see `Store`."""
        require_room(self._rooms(layout, num_groups), self._keeping, self._checkpoints)

    def take_over(self, store_id: str, generation: int, owners: Sequence[str]) -> None:
        """Go on with another identity, and a generation; see `Store.take_over`."""
        is_known = store_id == self._store_id and generation <= self._taken_over
        if not is_known and (self._others or self._owners):
            self._is_identified = False
        self._taken_over = max(generation, self._taken_over if store_id == self._store_id else 0)
        self._store_id = store_id
        self._generation = max(self._generation, generation - 1)
        self._is_arriving, self._arriving_owners = True, owners

    def slot_bytes(self, layout: Layout, num_groups: int) -> int:
        """Return the size in bytes of a slot in the first directory."""
        return sum(self._sizes(layout, num_groups).values())

    def acquire(self, layout: Layout, num_groups: int) -> Slot:
        """Return a slot to write the next generation into; see `Store.acquire`."""
        reader_wait = ReaderWait(self._directory, self._reader_timeout_s)
        look = partial(self._next_slot, layout, num_groups, reader_wait)
        with writing(self._directory):
            while not isinstance(slot := self._changed.wait_until(look), Slot):
                reader_wait.wait()
        return slot

    # All methods below, except `_rooms`, are called with `_changed` held.

    def _next_slot(
        self, layout: Layout, num_groups: int, reader_wait: ReaderWait
    ) -> Slot | str | None:
        """Return a slot that is ready to be written, or `_READERS` or None if the caller must wait.

        The result is `_READERS` if only readers can free a slot, and None if a seal in flight may.
        """
        self._lock.require()  # after each wait again: the directory may be moved
        self._lock.warn_once()
        self._poison.warn_once()
        slot = self._free_slot(layout, num_groups)
        while slot is None and self._sealing.incoming is None:
            with self._naming_room(layout, num_groups):
                withdrawn = self._withdrawal.withdraw_expired(self._sealing.incoming)
            if withdrawn:
                slot = self._free_slot(layout, num_groups)
                continue
            if self._is_expired_leaving():
                slot = self._slot_beside_leaving(layout, num_groups)
                if slot is None and self._withdrawal.withdraw_expired(even_leaving=True):
                    slot = self._free_slot(layout, num_groups)
                    continue
            if slot is None and reader_wait.is_spare_due:
                slot = self._spare_slot(layout, num_groups, for_tier=False)
            break
        if slot is None:
            return _READERS if self._sealing.incoming is None else None
        self._secure(slot)
        if not self._is_arriving:
            self._generation = max(self._generation, self._taken_over)
        self._is_arriving = False
        self._generation += 1
        slot.begin_generation(DigestContext(self._store_id, self._generation))
        return slot

    def _secure(self, slot: Slot) -> None:
        """Check that a slot, which was opened by its path, is in the locked directory; lock it.

        If that fails, the slot is closed and not used. After this check the slot is written through
        its file descriptors, even if its directory is moved.
        """
        try:
            self._lock.require()
            if self._owners:
                slot.folder.hold()
        except BaseException:
            slot.close()
            self._parts.put_back(slot.parts)
            raise

    def _free_slot(self, layout: Layout, num_groups: int) -> Slot | None:
        sizes, keeping = self._sizes(layout, num_groups), self._keeping
        with self._naming_room(layout, num_groups):
            if not self._poison:
                self._identify()
                slot = self._free.take(layout, sizes)
                if slot is not None:
                    return slot
                incoming = self._sealing.incoming
                if keeping.expired(incoming) or keeping.reducible(incoming):
                    return None  # an expired checkpoint is the next slot, once withdrawn
            return self._free.create(layout, sizes)

    @contextmanager
    def _naming_room(self, layout: Layout, num_groups: int) -> Iterator[None]:
        """Say how much space the next slot needs if there is too little for the block."""
        try:
            yield
        except StorageError as error:
            if error.errno not in FULL:
                raise
            raise no_room(error, self._rooms(layout, num_groups), self._keeping) from error

    def _spare_slot(self, layout: Layout, num_groups: int, *, for_tier: bool) -> Slot | None:
        """Create one slot more than retention needs, beside those that readers or uploads hold."""
        if len(self._checkpoints) + len(self._free) > self._keeping.num_slots():
            return None
        rooms = self._rooms(layout, num_groups)
        if not has_room(rooms):
            return None
        try:
            slot = self._free.create(layout, self._sizes(layout, num_groups))
        except StorageError as error:
            if error.errno not in FULL:
                raise
            return None  # another program has taken the space
        slot_bytes = sum(room.slot_bytes for room in rooms)
        if for_tier:
            log_event(
                f"{self._directory}: an expired checkpoint is leaving for the tier, so the store "
                f"has one more slot ({size(slot_bytes)}) until its copy is verified"
            )
        else:
            _log.warning(
                "%s: readers hold every expired checkpoint, so the store has one more slot "
                "(%.1f MiB) until they close",
                self._directory,
                slot_bytes / (1 << 20),
            )
        return slot

    def _is_expired_leaving(self) -> bool:
        """Return whether an expired checkpoint is being copied to a tier, or waits for it."""
        leaving = self._keeping.leaving
        return any(leaving.stage_of(c.manifest.generation) for c in self._keeping.expired())

    def _slot_beside_leaving(self, layout: Layout, num_groups: int) -> Slot | None:
        """Create one slot more than retention needs, so that no upload has to give way."""
        is_room = self._have_owners_room(layout, num_groups)
        slot = self._spare_slot(layout, num_groups, for_tier=True) if is_room else None
        self._keeping.leaving.found_room(slot is not None)
        return slot

    def _have_owners_room(self, layout: Layout, num_groups: int) -> bool:
        """Return whether all owners of state surely have room for one more part of theirs.

        It is known only if all of them have their parts in the first directory.
        """
        if not self._owners:
            return True
        if {*self._owners} != {self._directory}:
            return False
        needed = [
            sum(
                file_bytes(self._backend, reference.path_in(self._directory))
                for reference in checkpoint.manifest.owners
            )
            for checkpoint in self._checkpoints
        ]
        own = sum(self._sizes(layout, num_groups).values())
        return self._backend.free_bytes(self._directory) >= own + max(needed, default=0)

    def _rooms(self, layout: Layout, num_groups: int) -> list[Room]:
        sizes = self._sizes(layout, num_groups)
        rooms = [Room(self._backend, self._directory, len(self._free), sum(sizes.values()))]
        of_slot = self._others[: len(layout.shares) - 1]  # none, if several ranks write the slot
        for drive, (backend, directory) in enumerate(of_slot, 1):
            num_free = self._parts.num_free(drive)
            rooms.append(
                Room(backend, directory, num_free, sum(part_sizes(layout, drive).values()))
            )
        return rooms

    def _sizes(self, layout: Layout, num_groups: int) -> dict[str, int]:
        owners = self._owners
        if self._is_arriving and len(self._arriving_owners) > len(owners):
            owners = self._arriving_owners  # its manifest has a reference to each
        return slot_sizes(
            layout, num_groups, train_state_bytes=self._train_state_bytes, owners=owners
        )

    def _identify(self) -> None:
        """Make the store's identity durable before the first part of it is written."""
        if not self._is_identified:
            identity = StoreIdentity(self._store_id, self._taken_over)
            write_store_id(self._backend, self._directory, identity, self._poison)
            self._is_identified = True


class ReaderWait:
    """Waits for readers of expired checkpoints: briefly at first, and longer after a warning."""

    def __init__(self, directory: str, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._began: float | None = None
        self._warned = False

    @property
    def is_spare_due(self) -> bool:
        """Whether to take one additional slot now, instead of waiting longer for a reader."""
        return self._waited_s() >= min(_SPARE_AFTER_S, self._timeout_s / 2)

    def _waited_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def wait(self) -> None:
        """Sleep for a moment; warn once if the store has no room for an additional slot."""
        if self.is_spare_due and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._directory}: every expired checkpoint is being read, and the store cannot "
                f"have another slot; the next step waits up to {self._timeout_s:g} s for one of "
                "them",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._waited_s() > self._timeout_s:
            raise StoreBusyError(
                errno.EBUSY,
                f"readers still hold every expired checkpoint after {self._timeout_s:g} "
                "s; close them, or raise keep= or Options(reader_timeout_s=...)",
                self._directory,
            )
        if self._began is None:
            self._began = time.monotonic()
        time.sleep(READER_POLL_S)
