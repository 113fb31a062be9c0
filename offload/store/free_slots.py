"""The slots of a store that hold nothing anybody needs, and may be rewritten."""

from __future__ import annotations

import errno
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from gds import Backend, LockHeldError, StorageError
from gds.contract import Lock
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError, StoreBusyError
from offload.format.layout import Layout
from offload.format.names import slot_name
from offload.store.full_disk import FULL, saying_what_is_free
from offload.store.part_pool import PartPool
from offload.store.poison import Poison
from offload.store.slot import Slot, adopt_slot, create_slot, directories_in, remove_slot
from offload.store.space import Room, has_room

_log = logging.getLogger("offload")

_NOT_READY = "a free slot could not be made ready"

READER_POLL_S = 0.05
"""Seconds between looks at whether a reader has let go."""


SPARE_AFTER_S = 1.0
"""Seconds that a step waits for readers before it takes one slot more, where there is room."""


class FreeSlots:
    """Free slots: open ones of this process, and directories that earlier ones left behind.

    Not safe to use from several threads; the store holds its own lock around every call.

    Args:
        backend: Where they are.
        directory: The store.
        leftover: Paths of directories that an earlier process left.
        parts: What slots have on other drives. An open slot has parts of its own; a directory
            gets some when it is opened.
        poison: Taken note of where free slots are made ready.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        leftover: Sequence[str],
        parts: PartPool,
        poison: Poison,
    ) -> None:
        self.backend = backend
        self.directory = directory
        self._parts = parts
        self._poison = poison
        self._slots: list[Slot | str] = [*leftover]

    def __len__(self) -> int:
        return len(self._slots)

    def paths(self) -> list[str]:
        """Return where they are."""
        return [slot.path if isinstance(slot, Slot) else slot for slot in self._slots]

    def note_withdrawn(self) -> None:
        """Find slots whose withdrawal was not finished: the parts they name belong to nothing.

        Raises:
            UnreadableError: One could not be read.
        """
        for path in self.paths() if self._parts.directories else ():
            with suppress(CheckpointError):  # as of every slot whose withdrawal was finished
                self._parts.note_withdrawn(decode_manifest(self.backend, path))

    def add(self, slot: Slot | str) -> None:
        """Take in a slot, open or by its path, that nobody needs any more.

        It may be one that is here already: whoever is interrupted while giving it back does so
        again. It must not be lent to two, for one of them would write into the other's checkpoint.
        """
        if slot not in self._slots:
            self._slots.append(slot)

    def take(self, layout: Layout, sizes: Mapping[str, int]) -> Slot | None:
        """Return a slot of a layout to write into, or None; those that do not fit are removed.

        Args:
            layout: What it must be laid out for.
            sizes: Bytes of each of its files, by name.

        Raises:
            gds.StorageError: Among others, no space for what it is to have on other drives.
        """
        for candidate in reversed(self._slots):
            if isinstance(candidate, Slot):
                in_place = candidate.is_in_place()
                self._slots.remove(candidate)
                if candidate.layout == layout and candidate.sizes == sizes and in_place:
                    return candidate
                with self._poison.on_error(_NOT_READY):
                    self.discard(candidate)
                continue
            if self.backend.stat(candidate) is None:
                self._slots.remove(candidate)  # somebody has removed it by hand
                continue
            if self._set_aside(candidate):
                continue
            with self._locked(candidate) as lock:
                if lock is None:
                    continue  # a reader still holds what it was
                parts = self._parts.take(layout)
                self._slots.remove(candidate)
                adopted = None
                try:
                    with self._poison.on_error(_NOT_READY):
                        adopted = adopt_slot(self.backend, candidate, layout, sizes)
                        if adopted is None:
                            remove_slot(self.backend, candidate)
                finally:
                    if adopted is None:
                        self._parts.put_back(parts)
                if adopted is not None:
                    adopted.parts = parts
                    return adopted
        return None

    def create(self, layout: Layout, sizes: Mapping[str, int]) -> Slot:
        """Make a new slot, for the caller; raises `gds.StorageError` if there is no space."""
        parts = self._parts.take(layout)
        try:
            path = self.unused_path()
            with saying_what_is_free(self.backend, path, sum(sizes.values()), "a slot"):
                slot = create_slot(self.backend, path, layout, sizes)
        except BaseException:
            self._parts.remove(parts)
            raise
        slot.parts = parts
        return slot

    def create_spare(
        self, layout: Layout, sizes: Mapping[str, int], rooms: Sequence[Room]
    ) -> Slot | None:
        """Make a slot beside those that readers hold; None if the drives have no room for it.

        Args:
            layout: What it must be laid out for.
            sizes: Bytes of each of its files, by name.
            rooms: The directories that it is made in.

        Raises:
            gds.StorageError: Another failure than a full disk.
        """
        if not has_room(rooms):
            return None
        try:
            slot = self.create(layout, sizes)
        except StorageError as error:
            if error.errno not in FULL:
                raise
            return None  # somebody else has been quicker
        _log.warning(
            "%s: readers hold every expired checkpoint, so the store has one slot more (%.1f MiB) "
            "until they let go",
            self.directory,
            sum(room.slot_bytes for room in rooms) / (1 << 20),
        )
        return slot

    def unused_path(self) -> str:
        """Return a path that a slot can be given."""
        taken = set(self.backend.list_dir(self.directory))
        k = 1
        while slot_name(k) in taken:
            k += 1
        return f"{self.directory}/{slot_name(k)}"

    def drop(self, num: int) -> None:
        """Remove that many of the free slots from the drive, the oldest first."""
        for spare in self._slots[: max(num, 0)]:
            if isinstance(spare, Slot):
                self._slots.remove(spare)
                self.discard(spare)
                continue
            if self._set_aside(spare):
                continue
            with self._locked(spare) as lock:
                if lock is not None:  # else a reader still holds what it was
                    self._slots.remove(spare)
                    remove_slot(self.backend, spare)

    def discard(self, slot: Slot) -> None:
        """Remove a slot, unless it may be a checkpoint by now: then a later process decides.

        If other files are at its path, they are left alone. Somebody has put them there; or
        somebody has removed the slot, and its name is that of another one by now.
        """
        at_path = slot.is_at_path()
        slot.close()
        if not at_path:
            self._parts.put_back(slot.parts)
            return
        if not slot.in_doubt:
            remove_slot(self.backend, slot.path)
            self._parts.remove(slot.parts)

    def close(self) -> None:
        """Close those that are open."""
        for slot in self._slots:
            if isinstance(slot, Slot):
                slot.close()

    def _set_aside(self, path: str) -> bool:
        """Leave what cannot be a slot alone, for somebody to look at; return whether it is such."""
        stat = self.backend.stat(path)
        if stat is None:
            return False
        inside = directories_in(self.backend, path) if stat.kind == "directory" else []
        if stat.kind == "directory" and not inside:
            return False
        self._slots.remove(path)
        what = f"it holds the directory {inside[0]!r}" if inside else "it is not a directory"
        warnings.warn(
            f"{path}: not used, and left alone: {what}, and no slot is such. Remove it",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    @contextmanager
    def _locked(self, path: str) -> Iterator[Lock | None]:
        lock = try_lock(self.backend, path)
        try:
            yield lock
        finally:
            if lock is not None:
                lock.release()


class Patience:
    """Waits for readers of expired checkpoints: a moment, and a while longer after a warning.

    Args:
        directory: The store, for messages.
        timeout_s: How long in all.
    """

    def __init__(self, directory: str, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._began: float | None = None
        self._warned = False

    @property
    def is_tried(self) -> bool:
        """Whether it is time to take one slot more, instead of waiting for a reader to finish."""
        return self._waited_s() >= min(SPARE_AFTER_S, self._timeout_s / 2)

    def _waited_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def wait(self) -> None:
        """Wait a little; warns where there was no room for one slot more.

        Raises:
            StoreBusyError: It has been long enough.
        """
        if self.is_tried and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._directory}: every expired checkpoint is being read by someone, and the "
                f"store can have no slot more; the next step waits up to {self._timeout_s:g} s for "
                "one of them",
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


def try_lock(backend: Backend, path: str) -> Lock | None:
    """Lock a directory for rewriting; None if a reader holds it."""
    try:
        return backend.lock(path)
    except LockHeldError:
        return None


def lock_existing(backend: Backend, path: str, timeout_s: float) -> Lock | None:
    """Lock what a path names, waiting for its readers; None if there is nothing.

    Nor is a link, a pipe or a device locked: nobody reads one as a checkpoint.

    Raises `StoreBusyError` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while (stat := backend.stat(path)) is not None and stat.kind != "other":
        lock = try_lock(backend, path)
        if lock is not None:
            return lock
        if time.monotonic() > deadline:
            raise StoreBusyError(
                errno.EBUSY,
                f"it is still being read after {timeout_s:g} s, and must be replaced; close its "
                "readers",
                path,
            )
        time.sleep(READER_POLL_S)
    return None
