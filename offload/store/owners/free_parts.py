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
from offload.format.names import TABLE_NAME, owner_number, part_name
from offload.store.owners.claims import NamedParts
from offload.store.slots.folder import (
    Folder,
    adopt_folder,
    create_folder,
    directories_in,
    locked,
    remove_folder,
)
from offload.store.slots.slot import OwnerSlot
from offload.store.store_errors import Poison, naming_free_space

NOT_READY = "a free part could not be made ready"
"""Reason why a process reuses no part any more."""


class FreeParts:
    """The free parts of one owner, whose directory, ``owner-<i>``, this process has locked.

    Sealed parts of other stores are left alone. After a failed sync nothing is reused or removed.
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

        Other free parts are removed. `own` are the names of the parts that this process uses.
        """
        reused = None
        for path in [] if self._poison else self._paths(named, own):
            with locked(self._backend, path) as is_locked:
                if not is_locked:
                    continue  # a reader, or a rank of an earlier job
                with self._poison.fatal(NOT_READY):
                    folder = None
                    if reused is None:
                        folder = adopt_folder(self._backend, path, TABLE_NAME, sizes, layout)
                    if folder is None:
                        remove_folder(self._backend, path)
                        continue
            reused = self._held(folder, layout, is_new=False)
        return reused or self._created(layout, sizes, named, own)

    def remove(self, named: NamedParts, own: Collection[str]) -> list[str]:
        """Remove the parts that no checkpoint names and nobody holds; return their paths."""
        removed: list[str] = []
        for path in [] if self._poison else self._paths(named, own):
            with locked(self._backend, path) as is_locked:
                if is_locked:
                    with self._poison.fatal("a part could not be removed"):
                        remove_folder(self._backend, path)
                    removed.append(path)
        return removed

    def _created(
        self, layout: Layout, sizes: Mapping[str, int], named: NamedParts, own: Collection[str]
    ) -> OwnerSlot:
        taken = {*self._backend.list_dir(self._path), *named.of(self._owner), *own}
        name = next(part_name(k) for k in count(1) if part_name(k) not in taken)
        path = f"{self._path}/{name}"
        with naming_free_space(self._backend, path, sum(sizes.values()), "part of an owner"):
            folder = create_folder(self._backend, path, TABLE_NAME, sizes, layout)
        slot = self._held(folder, layout, is_new=True)
        if slot is None:
            raise StoreError(
                errno.EBUSY, "another process has locked this new part: start again", path
            )
        return slot

    def _held(self, folder: Folder, layout: Layout, *, is_new: bool) -> OwnerSlot | None:
        """Return a part that is ready, locked as its writer; None if another process locked it."""
        slot = OwnerSlot(layout, folder, self._leaves(folder, layout, is_new=is_new))
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

    def _leaves(self, folder: Folder, layout: Layout, *, is_new: bool) -> KnownLeaves:
        """Return what is known of the shard file of a part that was made or adopted."""
        if layout.shard is None:
            return KnownLeaves(readable=False)
        inode = folder.files[layout.model_name].inode
        known = None if is_new else self._known.get(folder.name)
        if known is None or known.inode != inode or not inode:  # another file is in its place
            known = KnownLeaves(inode, readable=not is_new)
        self._known[folder.name] = known
        return known

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
            continue
        try:
            header = look_at_part(backend, path, owner).header
        except UnreadableError:
            continue  # it is not known what it is, so it is left alone
        if header is None or (
            (header.store_id, header.owner) == (store_id, owner) and not named.unknown
        ):
            found.append(path)
    return found
