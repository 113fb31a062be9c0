"""Copying of ranges of a tier's objects into files of slots, compared before they are written.

The bytes that an earlier download has left in a file are compared first. Only the others are
fetched.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

from gds import ALIGNMENT, Backend, Buffer, File, StorageError
from gds.waiting import Monitor
from offload.errors import TierError
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.names import TRAIN_STATE_NAME
from offload.format.train_state import unpack_encoded
from offload.store.sealing import pack_train_state
from offload.tiers.catalog import TierCopy
from offload.tiers.checking import Fetcher, nothing
from offload.tiers.contents import ModelRun
from offload.tiers.marker import Marker
from offload.tiers.sending import Progress, Task, run_all
from offload.tiers.services.objects import Objects

GoingOn: TypeAlias = Callable[[], None]
"""Function that is called again and again, and raises an error to end early."""


class DownloadStoppedError(TierError):
    """A download was told to end. Another one goes on from the parts that it has written."""


def go_on() -> None:
    """Let the download go on."""


class Range(NamedTuple):
    """Consecutive bytes of a file here, from an offset, and of an object there."""

    file: File
    offset: int
    name: str
    run: ModelRun

    may_be_there: bool
    """Whether an earlier download may have written them."""


class RangeFilling:
    """Ranges of one copy that are fetched by several threads, some of which may outlive it.

    A request that is not answered may keep its thread for long after the download has failed. By
    then the slot may belong to another download, or to a step. So files are used in blocks, for
    which `end` waits, and after which none begins.
    """

    def __init__(
        self,
        objects: Objects,
        copy: TierCopy,
        manifest: Manifest,
        backend: Backend,
        num_transfers: int,
        progress: Progress | None = None,
    ) -> None:
        self._manifest = manifest
        self._backend = backend
        self._num_transfers = num_transfers
        self._progress = progress
        self._fetcher = Fetcher(objects, copy.folder, manifest)
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._mutex = threading.Lock()
        self._url = copy.url
        self._changed = Monitor()
        self._num_blocks = 0
        self._has_ended = False
        self.expected = 0
        """Number of bytes that are going to be fetched or found, for the progress."""
        self.bytes_fetched = 0
        self.bytes_kept = 0
        """Number of bytes that the files held already."""

    def fill(
        self,
        ranges: Sequence[Range],
        arrived: Callable[[int], object] = nothing,
        require_going_on: GoingOn = go_on,
    ) -> None:
        """Fetch ranges, in their order, and write them.

        `arrived` is called with the index of each chunk that has been compared with its digest and
        is in its file.
        """
        most = max((one.run.nbytes for one in ranges), default=0)
        tasks: Iterator[Task] = (partial(self._fill_range, one, arrived) for one in ranges)
        run_all(
            tasks,
            self._num_transfers,
            lambda: self._backend.allocate(most + ALIGNMENT, "host"),
            require_going_on,
        )

    def train_state(self, marker: Marker, size_bytes: int) -> bytes:
        """Fetch the train state, packed for a slot, which may reserve another size for it."""
        name = TRAIN_STATE_NAME
        data = self._fetcher.whole(name, marker.sizes[name], marker.digests[name])
        if len(data) != size_bytes:
            data = pack_train_state(unpack_encoded(data)[0], self._manifest, size_bytes)
        self._advance(marker.sizes[name], fetched=True)
        return data

    def end(self) -> None:
        """Write nothing more. On return no thread uses a file of a range. Idempotent."""
        with self._changed:
            self._has_ended = True
        self._changed.wait_until(lambda: not self._num_blocks)

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Use files of ranges in a block, which `end` waits for."""
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

    def _fill_range(self, one: Range, arrived: Callable[[int], object], buffer: Buffer) -> None:
        """Fetch a range and write it, unless the file holds it."""
        into = buffer.slice(one.offset % ALIGNMENT, one.run.nbytes)
        with self._use():
            kept = one.may_be_there and self._holds(one, into)
        if not kept:
            self._fetcher.run(one.name, one.run, into)
            with self._use():
                one.file.write(into, one.offset).result()
        self._advance(one.run.nbytes, fetched=not kept)
        for chunk in one.run.chunks:
            arrived(chunk.index)

    def _holds(self, one: Range, into: Buffer) -> bool:
        try:
            one.file.read(into, one.offset).result()
        except StorageError:
            return False  # a sector that cannot be read may well be written
        start = 0
        for chunk in one.run.chunks:
            view = into.slice(start, chunk.nbytes).memoryview()
            if self._context.digest(chunk.array, chunk.index, view) != chunk.digest:
                return False
            start += chunk.nbytes
        return True

    def _advance(self, nbytes: int, *, fetched: bool) -> None:
        with self._mutex:
            if fetched:
                self.bytes_fetched += nbytes
            else:
                self.bytes_kept += nbytes
            if self._progress is not None:
                self._progress(self.bytes_fetched + self.bytes_kept, self.expected)
