"""The newest checkpoint of a tier on its way into an empty store, in two parts.

The parameters are fetched while the caller waits, which is 2 bytes per parameter of a 16-bit model.
The state follows on a thread, in the order in which the first step needs it. When all of it is
there, the slot is published like every other checkpoint. Until then it is none.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from gds import Backend
from gds.waiting import start
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import (
    DamagedError,
    OffloadError,
    StorageError,
    StoreError,
    TierError,
    reason_of,
)
from offload.format.manifest import Manifest
from offload.store.arrivals import Arrivals
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import find_newest_whole, newest_generation
from offload.tiers.download import on_drives
from offload.tiers.filling import Download
from offload.tiers.range_filling import DownloadStoppedError, RangeFilling
from offload.tiers.sending import NUM_TRANSFERS
from offload.tiers.services.address import parse_address
from offload.tiers.services.opening import (
    DEFAULT_RETRY_S,
    DEFAULT_TIMEOUT_S,
    note_damaged,
    open_objects,
)

_RETRY_S = DEFAULT_RETRY_S
"""Seconds for which a request that failed is tried again."""

_THREAD = "offload-arrival"


class Incoming:
    """A checkpoint of a tier that a store is about to get.

    Args:
        download: Download of the checkpoint.
        url: URL of the copy.
        newest: Newest generation in the tier, which the next history has to begin after.
        backend: Backend of the store.
        resources: Connection to the tier, which `close` closes.
    """

    def __init__(
        self, download: Download, url: str, newest: int, backend: Backend, resources: ExitStack
    ) -> None:
        self._download = download
        self._newest = newest
        self._backend = backend
        self._resources = resources
        self._is_stopped = threading.Event()
        self.url = url
        """URL of the copy."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the checkpoint on the drives of the store."""
        return self._download.manifest

    @property
    def bytes_fetched(self) -> int:
        """Number of bytes fetched from the tier so far."""
        return self._download.filling.bytes_fetched

    @property
    def bytes_kept(self) -> int:
        """Number of bytes that an earlier download of this checkpoint had left in the slot."""
        return self._download.filling.bytes_kept

    def reserve(self, store: Store) -> Slot:
        """Make the store one of this checkpoint's, and return a slot with room for it.

        Raises:
            StoreError: The store has checkpoints.
            StoreFullError: There is no room.
        """
        store.take_over(self.manifest.store_id, max(self.manifest.generation, self._newest))
        return self._download.reserve(store)

    def fetch_parameters(self, slot: Slot) -> Checkpoint:
        """Fetch the train state and the parameters; see `Download.fetch_parameters`.

        Returns:
            The checkpoint as a reader of the slot sees it. Its train state has been read.
        """
        self._download.fetch_parameters(slot, self._require_going_on)
        checkpoint = Checkpoint(self._backend, slot.path, self.manifest)
        _ = checkpoint.train_state
        return checkpoint

    def begin_state(
        self,
        store: Store,
        slot: Slot,
        order: Sequence[int],
        ended: Callable[[StoredCheckpoint | OffloadError], object],
    ) -> None:
        """Fetch the state on a thread, and make the slot a checkpoint of the store after that.

        From now on the slot makes readers wait for each chunk.

        Args:
            store: Store of the slot.
            slot: Slot that `reserve` has returned, with its parameters.
            order: Chunks in the order in which they are needed.
            ended: Called on the thread with the checkpoint, or with the error.
        """
        arrivals = Arrivals(piece.index for piece in self._download.state_pieces())
        slot.arriving(arrivals)
        run = partial(self._run, store, slot, order, arrivals, ended)
        start(threading.Thread(target=run, name=_THREAD, daemon=True))

    def _run(
        self,
        store: Store,
        slot: Slot,
        order: Sequence[int],
        arrivals: Arrivals,
        ended: Callable[[StoredCheckpoint | OffloadError], object],
    ) -> None:
        found: StoredCheckpoint | OffloadError
        try:
            self._download.fetch_state(slot, order, arrivals.add, self._require_going_on)
            found = self._download.publish(store, slot)
        except BaseException as error:  # noqa: BLE001  (raised by those who wait)
            if isinstance(error, DamagedError):
                note_damaged(store.directory, parse_address(self.url).url, self.url, str(error))
            own = isinstance(error, StoreError) or not isinstance(error, StorageError)
            found = error if own and isinstance(error, OffloadError) else self._failure(error)
            if found is not error:
                found.__cause__ = error
            self._download.end()
            arrivals.fail(found)
        self.close()
        ended(found)

    def _failure(self, error: BaseException) -> OffloadError:
        return TierError(
            errno.EIO, f"the checkpoint could not be stored: {reason_of(error)}", self.url
        )

    def _require_going_on(self) -> None:
        if self._is_stopped.is_set():
            raise DownloadStoppedError(errno.EINTR, "the download was stopped", self.url)

    def stop(self) -> None:
        """End the download after the pieces that are being written. Idempotent."""
        self._is_stopped.set()

    def give_up(self) -> None:
        """End a download whose state has not begun; on return the slot is not used any more."""
        self.stop()
        self._download.end()
        self.close()

    def close(self) -> None:
        """Close the connection to the tier. Idempotent."""
        self._resources.close()


def find_incoming(url: str, store: Store, tried: Mapping[str, str]) -> Incoming | str | None:
    """Return the newest whole checkpoint of a tier; None if the tier is there, and has none.

    If several ranks made it, the URL of its copy is returned. If newer copies are damaged, a
    warning names them.

    Args:
        url: URL of the tier, of a store in it, or of one copy.
        store: Store that gets the checkpoint.
        tried: Copies that were found damaged before, by URL, with the reasons.

    Raises:
        TierError: The tier cannot be read, is not there, or has copies of several stores.
        DamagedError: All copies are damaged.
    """
    address = parse_address(url)
    with ExitStack() as opened:
        objects = opened.enter_context(
            open_objects(address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=_RETRY_S)
        )
        whole, warning = find_newest_whole(objects, url, store.directory, tried)
        if warning:
            warnings.warn(warning, RuntimeWarning, stacklevel=6)
        if whole is None:
            return None
        copy = whole.copy
        if whole.manifest.owners:
            return copy.url
        manifest = on_drives(whole.manifest, len(store.directories), copy)
        if copy.marker is None:
            raise TierError(errno.EINVAL, copy.reason, copy.url)
        newest = newest_generation(objects, manifest.store_id) if whole.passed_over else 0
        filling = RangeFilling(objects, copy, manifest, store.backend, NUM_TRANSFERS)
        download = Download(filling, copy.marker, manifest)
        return Incoming(download, copy.url, newest, store.backend, opened.pop_all())
