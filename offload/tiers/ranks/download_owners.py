"""Download of a checkpoint that several ranks made: all of it, into a store of owners on one host.

Each owner gets its part back as it was sealed. So ranks continue from the checkpoint as from one of
their own, with as many ranks as made it or with another number.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from gds import ALIGNMENT, Backend, Buffer, File, StorageError
from offload.checkpoint.owner_parts import part_names
from offload.errors import CheckpointError, StoreError
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.names import MODEL_NAME, TRAIN_STATE_NAME
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import OwnerTable
from offload.store.owners.slot import OwnerSlot
from offload.store.owners.store import OwnerStore
from offload.store.sealing import Composition
from offload.store.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import TierCopy, read_tables
from offload.tiers.checking import Fetcher
from offload.tiers.contents import (
    Chunk,
    ModelRun,
    file_offset,
    model_runs,
    state_objects,
)
from offload.tiers.marker import Marker
from offload.tiers.sending import Progress
from offload.tiers.services.objects import Objects
from offload.tiers.workers import Task, run_all


@dataclass(frozen=True, slots=True)
class _Owner:
    """An owner besides the first: its parts, the one that is filled, and what that will hold."""

    store: OwnerStore
    part: OwnerSlot
    table: OwnerTable
    may_hold_parts: bool
    """Whether an earlier download may have filled some of the part."""


class _Range(NamedTuple):
    """Consecutive bytes of a file here and of an object there."""

    file: File
    offset: int
    name: str
    start: int
    chunks: tuple[Chunk, ...]
    may_be_there: bool


class OwnersDownload:
    """Download of a checkpoint of several ranks.

    Args:
        objects: Objects of the tier.
        copy: Copy to fetch.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint.
        backend: Storage backend of the store.
        num_transfers: Number of transfers at a time.
        progress: Function that is called with the bytes done and the total.

    Raises:
        DamagedError: A table is missing, or is another one than was sent.
        TierError: A table cannot be read.
    """

    def __init__(
        self,
        objects: Objects,
        copy: TierCopy,
        marker: Marker,
        manifest: Manifest,
        backend: Backend,
        num_transfers: int,
        progress: Progress | None,
    ) -> None:
        self._marker = marker
        self._manifest = manifest
        self._tables = read_tables(objects, copy, manifest)
        self._backend = backend
        self._num_transfers = num_transfers
        self._progress = progress
        self._fetcher = Fetcher(objects, copy.folder, manifest)
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._mutex = threading.Lock()
        self._total = 0
        self.bytes_fetched = 0
        """Number of bytes fetched from the tier."""
        self.bytes_kept = 0
        """Number of bytes that the store held already."""

    def run(self, store: Store, *, allow_volatile: bool, allow_remote: bool) -> str:
        """Fill a slot and a part for each owner, and publish them as one checkpoint.

        Args:
            store: Store of the first directory, which has been told of its owners.
            allow_volatile: Accept a file system that loses its content at power-off.
            allow_remote: Accept a file system that another machine or a program serves.

        Returns:
            Path of the checkpoint.

        The errors are those of `offload.tiers.download.pull`.
        """
        with ExitStack() as resources:
            leftover = {*store.leftovers()[0]}
            slot = store.acquire(self._manifest.layout, len(self._manifest.groups))
            try:
                slot.begin_generation(self._context)
                owners = [
                    self._open(resources, store, table, allow_volatile, allow_remote)
                    for table in self._tables
                ]
                ranges = [*self._ranges(slot, owners, may_hold_parts=slot.path in leftover)]
                train_state = self._fill(slot, ranges)
                return self._publish(store, slot, owners, train_state)
            except BaseException:
                store.sealing.end()
                if store.checkpoint_of(slot) is None:
                    store.release(slot)
                raise

    def _open(
        self,
        resources: ExitStack,
        store: Store,
        table: OwnerTable,
        allow_volatile: bool,
        allow_remote: bool,
    ) -> _Owner:
        """Reserve the part of an owner."""
        opened = resources.enter_context(
            closing(
                OwnerStore(
                    self._backend,
                    store.directory,
                    table.owner,
                    store_id=self._manifest.store_id,
                    allow_volatile=allow_volatile,
                    allow_remote=allow_remote,
                )
            )
        )
        before = {*part_names(self._backend, opened.path)}
        boxes = [(one.name, one.box) for one in table.model_boxes]
        part = opened.ready(
            table.layout, self._manifest.generation, store.named_parts(), written=boxes
        )
        return _Owner(opened, part, table, part.name in before)

    def _ranges(
        self, slot: Slot, owners: Sequence[_Owner], *, may_hold_parts: bool
    ) -> Iterator[_Range]:
        """Yield everything that has digests: the model, then the state of each owner."""
        for run in model_runs(self._manifest, self._tables):
            yield _Range(slot.model, run.offset, MODEL_NAME, run.offset, run.chunks, may_hold_parts)
        filled: list[tuple[Manifest | OwnerTable, Slot | OwnerSlot, bool]] = [
            (self._manifest, slot, may_hold_parts),
            *((one.table, one.part, one.may_hold_parts) for one in owners),
        ]
        for sealed, into, may_hold in filled:
            for wanted in state_objects(sealed, self._marker.object_bytes):
                for start, chunk in wanted.starts():
                    file = into.array(chunk.array, chunk.index)
                    offset = file_offset(sealed.layout, chunk)
                    yield _Range(file, offset, wanted.name, start, (chunk,), may_hold)

    def _fill(self, slot: Slot, ranges: Sequence[_Range]) -> bytes:
        """Fetch all tensors, then the train state, which is returned."""
        name = TRAIN_STATE_NAME
        sizes = [sum(chunk.nbytes for chunk in one.chunks) for one in ranges]
        self._total = sum(sizes) + self._marker.sizes[name]
        most = max(sizes, default=0)
        tasks: Iterator[Task] = (partial(self._fill_range, one) for one in ranges)
        run_all(
            tasks, self._num_transfers, lambda: self._backend.allocate(most + ALIGNMENT, "host")
        )
        data = self._fetcher.whole(name, self._marker.sizes[name], self._marker.digests[name])
        if len(data) != slot.train_state.size_bytes:
            raise CheckpointError(
                f"{slot.path}: the train state has {len(data)} bytes, and the slot "
                f"{slot.train_state.size_bytes}"
            )
        self._advance(len(data), fetched=True)
        return data

    def _fill_range(self, one: _Range, buffer: Buffer) -> None:
        """Fetch a range and write it, unless the file holds it."""
        nbytes = sum(chunk.nbytes for chunk in one.chunks)
        into = buffer.slice(one.offset % ALIGNMENT, nbytes)
        if one.may_be_there and self._holds(one, into):
            self._advance(nbytes, fetched=False)
            return
        if one.name == MODEL_NAME:
            data = self._fetcher.run(one.name, ModelRun(one.start, one.chunks))
        else:
            data = self._fetcher.chunk(one.name, one.start, one.chunks[0])
        into.memoryview()[:] = memoryview(data)
        one.file.write(into, one.offset).result()
        self._advance(nbytes, fetched=True)

    def _holds(self, one: _Range, into: Buffer) -> bool:
        try:
            one.file.read(into, one.offset).result()
        except StorageError:
            return False  # a sector that cannot be read may well be written
        start = 0
        for chunk in one.chunks:
            view = into.slice(start, chunk.nbytes).memoryview()
            if self._context.digest(chunk.array, chunk.index, view) != chunk.digest:
                return False
            start += chunk.nbytes
        return True

    def _publish(
        self, store: Store, slot: Slot, owners: Sequence[_Owner], train_state: bytes
    ) -> str:
        """Make everything durable, the parts of the owners first, and publish the checkpoint."""
        for array, digests in self._manifest.digests.items():
            slot.digests[array][:] = digests
        references: list[OwnerReference] = []
        for one, expected in zip(owners, self._manifest.owners, strict=True):
            for array, digests in one.table.digests.items():
                one.part.digests[array][:] = digests
            reference = one.store.prepare(one.part, one.table.scalars, one.table.model_boxes)
            if reference.digest != expected.digest:
                raise StoreError(
                    errno.EIO,
                    f"the table of owner {reference.owner} has the digest {reference.digest} after "
                    f"the download, expected {expected.digest}: report this as a bug",
                    one.part.path,
                )
            references.append(reference)
        manifest = replace(self._manifest, owners=tuple(references))
        store.sealing.begin(manifest)
        with store.sealing.prepare(
            slot,
            Composition(manifest, train_state),
            (),
            owners=references,
            model_boxes=self._manifest.model_boxes,
        ) as prepared:
            stored = store.sealing.publish(prepared)
        for one in owners:
            one.store.published(one.part)
        return stored.path

    def _advance(self, nbytes: int, *, fetched: bool) -> None:
        with self._mutex:
            if fetched:
                self.bytes_fetched += nbytes
            else:
                self.bytes_kept += nbytes
            if self._progress is not None:
                self._progress(self.bytes_fetched + self.bytes_kept, self._total)


def owners_in(manifest: Manifest, directory: str | os.PathLike[str]) -> dict[int, str]:
    """Return the directory of each owner besides the first, if all are in one directory."""
    path = os.path.abspath(os.fspath(directory))
    return {reference.owner: path for reference in manifest.owners}
