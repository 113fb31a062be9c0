"""The newest checkpoint of a tier on its way into an empty store.

The parameters are fetched while the caller waits, which is 2 bytes per parameter of a 16-bit model.
The state follows on a thread. When all of it is there, the checkpoint is published like every other
one. Until that rename there is none, so a process that is killed leaves a slot or parts, from which
the next restore goes on.

With several ranks the writer finds the checkpoint, and all ranks open the copy that it names. Each
fetches the share of the owner that it serves. If other owners made the checkpoint, their shares are
dealt over the ranks, and come as they were sealed; the ranks then go on from it as from one of
another number of ranks. The ranks agree after each step; see `offload.engine.tier_restore`.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from gds import Backend
from gds.waiting import Pending, start
from offload.errors import (
    CheckpointError,
    DamagedError,
    OffloadError,
    StorageError,
    StoreError,
    TierError,
    reason_of,
)
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Arrivals
from offload.store.store import Store
from offload.tiers.catalog import find_copy, find_newest_whole, newest_generation, read_manifest
from offload.tiers.download import Download, on_drives
from offload.tiers.filling import DownloadStoppedError
from offload.tiers.services.address import parse_address
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import (
    DEFAULT_RETRY_S,
    DEFAULT_TIMEOUT_S,
    note_damaged,
    open_objects,
)


def _open(url: str) -> Objects:
    return open_objects(url, timeout_s=DEFAULT_TIMEOUT_S, retry_s=DEFAULT_RETRY_S)


def find_newest(url: str, store: str, tried: Mapping[str, str]) -> tuple[str, str]:
    """Return the URL of the newest whole copy of a tier, and a sentence for a warning.

    The URL is empty if the tier has no complete copy. The sentence is not if copies were passed
    over, or if none of them is complete. For `tried`, and the errors, see `open_newest`.
    """
    with _open(url) as objects:
        whole, warning = find_newest_whole(objects, url, store, tried)
    return "" if whole is None else whole[0].url, warning


def open_newest(url: str, store: Store, tried: Mapping[str, str]) -> Download | str | None:
    """Return the download of the newest whole checkpoint of a tier, for one process.

    None is returned if the tier is there, and has none. If several ranks made the checkpoint, the
    URL of its copy is returned. If newer copies are damaged, a warning names them.

    Args:
        url: URL of the tier, of a store in it, or of one copy.
        store: Store that gets the checkpoint.
        tried: Copies that were found damaged before, by URL, with the reasons.

    Raises:
        TierError: The tier cannot be read, is not there, or has copies of several stores.
        DamagedError: All copies are damaged.
    """
    with ExitStack() as opened:
        objects = opened.enter_context(_open(url))
        whole, warning = find_newest_whole(objects, url, store.directory, tried)
        if warning:
            warnings.warn(warning, RuntimeWarning, stacklevel=6)
        if whole is None:
            return None
        copy, manifest = whole
        if manifest.owners:
            return copy.url
        manifest = on_drives(manifest, len(store.directories), copy)
        newest = newest_generation(objects, manifest.store_id) if warning else 0
        download = Download(objects, copy, manifest, store.backend, store.directory, newest=newest)
        opened.pop_all()
        return download


def open_share(
    url: str,
    backend: Backend,
    directory: str,
    served: Sequence[int],
    rank: int,
    *,
    sees_all: bool,
) -> Download:
    """Return the download of the share of one rank in a checkpoint of a tier.

    Args:
        url: URL of the copy, the same on all ranks.
        backend: Storage backend of the store.
        directory: First directory of the store.
        served: Owner that each rank serves, by rank; 0 for the writer.
        rank: This rank.
        sees_all: Whether all ranks are on one host.

    Raises:
        CheckpointError: Other ranks than the present ones made the checkpoint, and these are on
            several hosts; or its owners do not have each element of it once.
        DamagedError: The manifest or a table is missing, or is not the one that was sent.
        TierError: The tier cannot be used.
    """
    with ExitStack() as opened:
        objects = opened.enter_context(_open(url))
        copy = find_copy(objects, parse_address(url))
        manifest = on_drives(read_manifest(objects, copy), 1, copy)
        made = [0, *(one.owner for one in manifest.owners)]
        is_recut = made != sorted(served)
        if is_recut and not sees_all:
            raise _refusal(url, made, served)
        download = Download(
            objects,
            copy,
            manifest,
            backend,
            directory,
            owners=_deal(made, served)[rank],
            newest=0 if served[rank] else newest_generation(objects, manifest.store_id),
        )
        download.is_recut = is_recut
        opened.pop_all()
        return download


def _deal(made: Sequence[int], served: Sequence[int]) -> list[list[int]]:
    """Return the owners whose shares each rank fetches, by rank.

    A rank fetches the share of the owner that it serves, if that owner made the checkpoint with the
    others. The shares of owners that no rank serves go to the ranks that have the fewest.
    """
    dealt = [[owner] if owner in made else [] for owner in served]
    for owner in made:
        if owner not in served:
            min(dealt, key=len).append(owner)
    return dealt


def _refusal(url: str, made: Sequence[int], served: Sequence[int]) -> CheckpointError:
    """Return the error that other ranks, which are on several hosts, made a checkpoint."""
    by = "one process" if len(made) == 1 else f"{len(made)} ranks"
    return CheckpointError(
        f"{url}: {by} made this checkpoint (owners {_listed(made)}), and {len(served)} ranks on "
        f"several hosts run now (owners {_listed(sorted(served))}): ranks on several hosts take a "
        "checkpoint of as many ranks from a tier. Run as many, or bring it to one directory with "
        "`offload pull` first, from which any number of ranks on that host goes on; fresh=True "
        "starts from the beginning"
    )


def _listed(owners: Sequence[int]) -> str:
    few = ", ".join(map(str, owners[:8]))
    return few if len(owners) <= 8 else f"{few}, ... {owners[-1]}"


class ArrivingState:
    """State that a thread fetches into slots or parts whose parameters are there.

    Args:
        download: Download whose model has been fetched. `close` closes it.
        progress: Function that is called again and again while the thread works.
    """

    def __init__(self, download: Download, progress: Callable[[], object] = lambda: None) -> None:
        self.share = download
        self._progress = progress
        self._is_stopped = threading.Event()
        self.ended: Pending[None] = Pending()
        """Outcome of the thread."""

    def start(self) -> None:
        """Begin to fetch the state."""
        try:
            self._start(partial(self.share.fetch_state, self._go_on))
        except RuntimeError as error:  # there is no thread; all ranks learn of it when they wait
            self.ended.set_exception(error)

    def start_alone(
        self,
        store: Store,
        order: Sequence[int],
        published: Callable[[StoredCheckpoint], object],
    ) -> None:
        """Begin to fetch the state, in one process, and make it a checkpoint of the store then.

        From now on the slot makes readers wait for each chunk, and belongs to the caller. The
        chunks come in the order that is given. `published` is called on the thread.
        """
        arrivals = Arrivals(self.share.state_pieces())
        self.share.first_slot.arriving(arrivals)
        self._start(partial(self._publish, store, order, arrivals, published))

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (raised by those who wait)
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)

        start(threading.Thread(target=run, name="offload-arrival", daemon=True))

    def _publish(
        self,
        store: Store,
        order: Sequence[int],
        arrivals: Arrivals,
        published: Callable[[StoredCheckpoint], object],
    ) -> None:
        url = self.share.url
        try:
            self.share.fetch_state(self._go_on, order, arrivals.add)
            if (found := self.share.publish([])) is not None:
                published(found)
        except BaseException as error:
            if isinstance(error, DamagedError):
                note_damaged(store.directory, parse_address(url).url, url, str(error))
            self.share.end()
            own = isinstance(error, StoreError) or not isinstance(error, StorageError)
            if own and isinstance(error, OffloadError):
                arrivals.fail(error)
                raise
            reason = f"the checkpoint could not be stored: {reason_of(error)}"
            named = TierError(errno.EIO, reason, url)
            arrivals.fail(named)
            raise named from error
        finally:
            self.share.end()

    def _go_on(self) -> None:
        if self._is_stopped.is_set():
            raise DownloadStoppedError(errno.EINTR, "the download was stopped", self.share.url)
        self._progress()

    def stop(self) -> None:
        """End the download after the pieces that are being written. Idempotent."""
        self._is_stopped.set()

    def wait(self) -> None:
        """Wait until the state is here, or until the thread has failed."""
        self.ended.wait()

    def require(self) -> None:
        """Wait until the state is here, or raise the error of the thread."""
        self.ended.result()

    def close(self) -> None:
        """End the download, and release the slot or part. Idempotent.

        What has arrived stays there, and the next download goes on from it.
        """
        self.stop()
        self.wait()
        self.share.close()
