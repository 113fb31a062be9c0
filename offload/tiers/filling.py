"""Filling of a slot with a checkpoint from a tier: the parameters first, then the state.

Every piece is compared with its digest before it is written. A slot that an earlier download has
filled in part is compared first, and only the rest is asked for.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from gds import ALIGNMENT, Backend, Buffer, File, StorageError
from gds.waiting import Monitor
from offload.errors import TierError
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.names import MODEL_NAME, TRAIN_STATE_NAME
from offload.format.train_state import unpack_encoded
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Composition, pack_train_state
from offload.store.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import TierCopy
from offload.tiers.checking import Fetcher, nothing
from offload.tiers.contents import Chunk, file_offset, state_objects
from offload.tiers.marker import Marker
from offload.tiers.model_objects import model_object
from offload.tiers.sending import Progress
from offload.tiers.services.objects import Objects
from offload.tiers.workers import Task, run_all

GoingOn: TypeAlias = Callable[[], None]
"""Function that is called again and again, and raises an error to end early."""


class DownloadStoppedError(TierError):
    """A download was told to end. Another one goes on from the parts that it has written."""


def _nothing() -> None:
    """Let the download go on."""


class SlotUse:
    """Use of slots by the threads of a download, some of which may outlive it.

    A request that is not answered may keep its thread for long after the download has failed. By
    then the slot may belong to another download, or to a step.

    Args:
        url: URL of the copy, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._changed = Monitor()
        self._num_blocks = 0
        self._has_ended = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Use files of slots in a block, which `end` waits for.

        Raises:
            DownloadStoppedError: The use has ended.
        """
        with self._changed:
            if self._has_ended:
                raise DownloadStoppedError(errno.EINTR, "the download has ended", self._url)
            self._num_blocks += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_blocks -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Begin no further block, and wait until those that have begun have ended. Idempotent."""
        with self._changed:
            self._has_ended = True
        self._changed.wait_until(lambda: not self._num_blocks)


@dataclass(frozen=True, slots=True)
class _Range:
    """A piece with its place here and there."""

    file: File
    offset: int
    """First byte in the file."""

    name: str
    """Name of the object that has the piece."""

    start: int
    """First byte in the object."""

    chunk: Chunk


class Download:
    """Download of one checkpoint into a slot.

    `run` does all of it. A caller that needs the parameters before the rest makes the same calls:
    `reserve`, `fetch_parameters`, `fetch_state`, `publish`, and `end` if one of them failed.

    Args:
        objects: Objects of the tier.
        copy: Copy to fetch.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint on the drives of the store.
        backend: Storage backend of the store.
        num_transfers: Number of transfers at a time.
        progress: Function that is called with the bytes done and the total.
    """

    def __init__(
        self,
        objects: Objects,
        copy: TierCopy,
        marker: Marker,
        manifest: Manifest,
        backend: Backend,
        num_transfers: int,
        progress: Progress | None = None,
    ) -> None:
        self.manifest = manifest
        """Manifest of the checkpoint on the drives of the store."""
        self._marker = marker
        self._backend = backend
        self._num_transfers = num_transfers
        self._progress = progress
        self._fetcher = Fetcher(objects, copy.folder, manifest)
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._mutex = threading.Lock()
        self._use = SlotUse(copy.url)
        self._may_hold_parts = False
        self._train_state = b""
        self._total = marker.sizes[TRAIN_STATE_NAME] + sum(
            chunk.nbytes for chunk in (*self._model_pieces(), *self.state_pieces())
        )
        self.bytes_fetched = 0
        """Number of bytes fetched from the tier."""
        self.bytes_kept = 0
        """Number of bytes that the slot held already."""

    def run(self, store: Store) -> str:
        """Fill a slot of the store and publish it; the errors are those of `pull`.

        Returns:
            Path of the checkpoint.
        """
        slot = self.reserve(store)
        try:
            self.fetch_parameters(slot)
            self.fetch_state(slot)
            return self.publish(store, slot).path
        except BaseException:
            self.end()
            store.release(slot)
            raise

    def reserve(self, store: Store) -> Slot:
        """Return a slot with room for the checkpoint. It may hold parts from an earlier download.

        Raises:
            StoreFullError: There is no room. Nothing was fetched.
        """
        manifest = self.manifest
        leftover = {*store.leftovers()[0]}
        slot = store.acquire(manifest.layout, len(manifest.groups))
        self._may_hold_parts = slot.path in leftover
        slot.begin_generation(self._context)
        for array, digests in manifest.digests.items():
            slot.digests[array][:] = digests
        return slot

    def fetch_parameters(self, slot: Slot, require_going_on: GoingOn = _nothing) -> None:
        """Fetch the train state and ``model.safetensors``.

        Args:
            slot: Slot that `reserve` has returned.
            require_going_on: Function that raises an error to end early.

        Raises:
            TrainStateTooLargeError: The train state does not fit into the slot.
            DamagedError: An object is missing, or has other bytes than were sent.
            TierError: An object cannot be read.
            gds.StorageError: The slot cannot be written.
        """
        self._train_state = self._fetch_train_state(slot.train_state.size_bytes)
        slot.train_state.write_bytes(self._train_state, 0)
        ranges = (
            _Range(slot.model, offset, MODEL_NAME, offset, chunk)
            for offset, chunk in model_object(self.manifest).pieces
        )
        self._fill(ranges, self._model_pieces(), nothing, require_going_on)

    def fetch_state(
        self,
        slot: Slot,
        order: Sequence[int] | None = None,
        arrived: Callable[[int], object] = nothing,
        require_going_on: GoingOn = _nothing,
    ) -> None:
        """Fetch the optimizer state, chunk by chunk; the errors are those of `fetch_parameters`.

        Args:
            slot: Slot that `reserve` has returned.
            order: Chunks in the order in which they are needed; None for that of the files.
            arrived: Called with the index of a chunk for each piece of it, one in each state array,
                that has been compared with its digest and written.
            require_going_on: Function that raises an error to end early.
        """
        found: list[_Range] = []
        for one in state_objects(self.manifest, self._marker.object_bytes):
            for start, chunk in one.starts():
                file = slot.array(chunk.array, chunk.index)
                offset = file_offset(self.manifest.layout, chunk)
                found.append(_Range(file, offset, one.name, start, chunk))
        if order is not None:
            places = {chunk: place for place, chunk in enumerate(order)}
            found.sort(key=lambda one: places[one.chunk.index])
        self._fill(found, self.state_pieces(), arrived, require_going_on)

    def publish(self, store: Store, slot: Slot) -> StoredCheckpoint:
        """Make the filled slot a checkpoint of the store; durable on return.

        The errors are those of `offload.store.sealing.Sealing.seal`.
        """
        store.sealing.begin(self.manifest)
        try:
            composition = Composition(self.manifest, self._train_state)
            return store.sealing.seal(slot, composition, self.manifest.model_digests)
        finally:
            store.sealing.end()

    def end(self) -> None:
        """Write nothing more. On return no thread of this download uses the slot. Idempotent.

        A request that is not answered may keep its thread for long. What it brings is dropped.
        """
        self._use.end()

    def state_pieces(self) -> list[Chunk]:
        """Return the pieces of state: each chunk once for each state array that has it."""
        objects = state_objects(self.manifest, self._marker.object_bytes)
        return [chunk for one in objects for chunk in one.chunks]

    def _model_pieces(self) -> list[Chunk]:
        return [chunk for _, chunk in model_object(self.manifest).pieces]

    def _fetch_train_state(self, size_bytes: int) -> bytes:
        name = TRAIN_STATE_NAME
        data = self._fetcher.whole(name, self._marker.sizes[name], self._marker.digests[name])
        if len(data) != size_bytes:  # this store reserves another size for train states
            data = pack_train_state(unpack_encoded(data)[0], self.manifest, size_bytes)
        self._advance(self._marker.sizes[name], fetched=True)
        return data

    def _fill(
        self,
        ranges: Iterable[_Range],
        pieces: Sequence[Chunk],
        arrived: Callable[[int], object],
        require_going_on: GoingOn,
    ) -> None:
        most = max((piece.nbytes for piece in pieces), default=0)
        tasks: Iterator[Task] = (partial(self._fill_range, one, arrived) for one in ranges)
        run_all(
            tasks,
            self._num_transfers,
            lambda: self._backend.allocate(most + ALIGNMENT, "host"),
            require_going_on,
        )

    def _fill_range(self, place: _Range, arrived: Callable[[int], object], buffer: Buffer) -> None:
        """Fetch a chunk and write it, unless the slot holds it."""
        chunk = place.chunk
        into = buffer.slice(place.offset % ALIGNMENT, chunk.nbytes)
        with self._use.block():
            kept = self._may_hold_parts and self._holds(place, into)
        if not kept:
            self._fetcher.chunk(place.name, place.start, chunk, into)
            with self._use.block():
                place.file.write(into, place.offset).result()
        self._advance(chunk.nbytes, fetched=not kept)
        arrived(chunk.index)

    def _holds(self, place: _Range, into: Buffer) -> bool:
        chunk = place.chunk
        try:
            place.file.read(into, place.offset).result()
        except StorageError:
            return False  # a sector that cannot be read may well be written
        return self._context.digest(chunk.array, chunk.index, into.memoryview()) == chunk.digest

    def _advance(self, nbytes: int, *, fetched: bool) -> None:
        with self._mutex:
            if fetched:
                self.bytes_fetched += nbytes
            else:
                self.bytes_kept += nbytes
            if self._progress is not None:
                self._progress(self.bytes_fetched + self.bytes_kept, self._total)
