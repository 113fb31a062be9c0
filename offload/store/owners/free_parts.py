"""Parts of an owner that no checkpoint names, and that may be written anew or removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping
from itertools import count

from gds import Backend, LockHeldError
from offload.checkpoint.owner_parts import look_at_part, part_names
from offload.errors import StoreError, UnreadableError
from offload.format.digests import KnownLeaves
from offload.format.layout import Layout
from offload.format.names import owner_number, part_name
from offload.store.full_disk import naming_free_space
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import (
    OwnerSlot,
    create_owner_slot,
    fits,
    open_owner_slot,
    remove_owner_part,
)
from offload.store.poison import Poison
from offload.store.slots.folder import directories_in
from offload.store.slots.free import try_lock

NOT_READY = "a free part could not be made ready"
"""Reason why a process reuses no part any more."""


class FreeParts:
    """The free parts of one owner, whose directory this process has locked.

    After a failed sync nothing is reused or removed; see `Poison`.

    Args:
        backend: Backend of the directory.
        path: Path that ends in ``owner-<i>``.
        owner: Number of the owner.
        store_id: Identity of the store. Sealed parts of other stores are left alone.
        poison: Whether a sync has failed in this process.
    """

    def __init__(
        self, backend: Backend, path: str, owner: int, store_id: str, poison: Poison
    ) -> None:
        self._backend = backend
        self._path = path
        self._owner = owner
        self._store_id = store_id
        self._poison = poison
        self._known: dict[str, KnownLeaves] = {}
        """Known content of the shard file of each part that this process has written."""

    def take_over(self, store_id: str) -> None:
        """Go on with another identity of the store; see `OwnerStore.take_over`."""
        self._store_id = store_id

    def acquire(
        self, layout: Layout, sizes: Mapping[str, int], named: NamedParts, own: Collection[str]
    ) -> OwnerSlot:
        """Return a part that this process holds, durably invalid: a free one, or a new one.

        Other free parts are removed.

        Args:
            layout: Layout of the part.
            sizes: Size in bytes of each of its files.
            named: Parts that any checkpoint of the store names at this moment.
            own: Names of the parts that this process uses.

        Raises:
            StoreError: Another process has locked a new part.
            gds.StorageError: There is no space, or another operation failed.
        """
        return self._reused(layout, sizes, named, own) or self._created(layout, sizes, named, own)

    def remove(self, named: NamedParts, own: Collection[str]) -> list[str]:
        """Remove the parts that no checkpoint names and nobody holds; return their paths.

        Args:
            named: Parts that any checkpoint of the store names at this moment.
            own: Names of the parts that this process uses.

        Raises:
            gds.StorageError: A part could not be removed.
        """
        removed: list[str] = []
        if self._poison:
            return removed
        for path in self._paths(named, own):
            lock = try_lock(self._backend, path)
            if lock is None:
                continue
            try:
                with self._poison.fatal("a part could not be removed"):
                    remove_owner_part(self._backend, path)
            finally:
                lock.release()
            removed.append(path)
        return removed

    def _reused(
        self, layout: Layout, sizes: Mapping[str, int], named: NamedParts, own: Collection[str]
    ) -> OwnerSlot | None:
        """Return a free part, made ready; remove free parts that do not fit or are superfluous."""
        slot = None
        for path in [] if self._poison else self._paths(named, own):
            lock = try_lock(self._backend, path)
            if lock is None:
                continue  # a reader, or a rank of an earlier job
            try:
                with self._poison.fatal(NOT_READY):
                    if slot is not None or not fits(self._backend, path, sizes):
                        remove_owner_part(self._backend, path)
                        continue
                    slot = self._invalidated(os.path.basename(path), layout)
            finally:
                lock.release()
            if not self._held(slot):
                slot = None
        return slot

    def _invalidated(self, name: str, layout: Layout) -> OwnerSlot:
        """Open a free part that fits, and make it durably invalid."""
        slot = open_owner_slot(self._backend, self._path, name, layout, writable=True)
        try:
            slot.invalidate()
            slot.write_headers()
            self._recall(slot, is_new=False)
        except BaseException:
            slot.close()
            raise
        return slot

    def _recall(self, slot: OwnerSlot, *, is_new: bool) -> None:
        """Give a part that was made or opened what is known of its shard file."""
        if slot.layout.shard is None:
            return
        stat = self._backend.stat(f"{slot.path}/{slot.layout.model_name}")
        inode = stat.inode if stat is not None else 0
        known = None if is_new else self._known.get(slot.name)
        if known is None or known.inode != inode or not inode:  # another file is in its place
            known = KnownLeaves(inode, readable=not is_new)
        slot.model_leaves = self._known[slot.name] = known

    def _held(self, slot: OwnerSlot) -> bool:
        """Lock a part as its writer; close it and return False if another process has locked it."""
        try:
            slot.hold()
        except LockHeldError:
            slot.close()
            return False
        except BaseException:
            slot.close()
            raise
        return True

    def _created(
        self, layout: Layout, sizes: Mapping[str, int], named: NamedParts, own: Collection[str]
    ) -> OwnerSlot:
        taken = {*self._backend.list_dir(self._path), *named.of(self._owner), *own}
        name = next(part_name(k) for k in count(1) if part_name(k) not in taken)
        path = f"{self._path}/{name}"
        with naming_free_space(self._backend, path, sum(sizes.values()), "part of an owner"):
            slot = create_owner_slot(self._backend, self._path, name, layout, sizes)
        self._recall(slot, is_new=True)
        if not self._held(slot):
            raise StoreError(
                errno.EBUSY, "another process has locked this new part: start again", path
            )
        return slot

    def _paths(self, named: NamedParts, own: Collection[str]) -> list[str]:
        """Return the paths of the parts that may be rewritten if nobody holds a lock on them."""
        found = unnamed_parts(self._backend, self._path, self._store_id, named)
        return [path for path in found if os.path.basename(path) not in own]


def unnamed_parts(backend: Backend, directory: str, store_id: str, named: NamedParts) -> list[str]:
    """Return the paths of an owner's parts that no checkpoint names, by rising number.

    Sealed parts of other stores and of other owners are left out, and all sealed parts if some
    checkpoint's manifest cannot be read.
    """
    owner = owner_number(os.path.basename(directory)) or 0
    found = []
    for name in part_names(backend, directory):
        path = f"{directory}/{name}"
        if name in named.of(owner) or directories_in(backend, path):
            continue  # this library makes no directory in a part, so a user has made it
        try:
            header = look_at_part(backend, path, owner).header
        except UnreadableError:
            continue  # it is not known what it is, so it is left alone
        if header is None or (
            (header.store_id, header.owner) == (store_id, owner) and not named.unknown
        ):
            found.append(path)
    return found
