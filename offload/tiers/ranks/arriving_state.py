"""The state of one rank's share, which arrives from a tier while the model computes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from gds.waiting import Pending, start
from offload.tiers.range_filling import DownloadStoppedError
from offload.tiers.ranks.arriving_share import ArrivingShare

_THREAD = "offload-arrival"


class ArrivingState:
    """State that a thread fetches into a slot or part whose parameters are there.

    Args:
        share: Share of this rank, whose model has been fetched. `close` closes it.
        progress: Function that is called again and again while the thread works.
    """

    def __init__(self, share: ArrivingShare, progress: Callable[[], None]) -> None:
        self.share = share
        self._progress = progress
        self._is_stopped = threading.Event()
        self._ended: Pending[None] = Pending()

    def start(self) -> None:
        """Begin to fetch the state."""
        try:
            start(threading.Thread(target=self._run, name=_THREAD, daemon=True))
        except RuntimeError as error:  # there is no thread; all ranks learn of it when they wait
            self._ended.set_exception(error)

    def _run(self) -> None:
        try:
            self.share.fetch_state(self._go_on)
        except BaseException as error:  # noqa: BLE001  (raised by those who wait)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _go_on(self) -> None:
        if self._is_stopped.is_set():
            raise DownloadStoppedError(errno.EINTR, "the download was stopped", self.share.url)
        self._progress()

    def wait(self) -> None:
        """Wait until the state is here, or until the thread has failed."""
        self._ended.wait()

    def require(self) -> None:
        """Wait until the state is here, or raise the error of the thread."""
        self._ended.result()

    def close(self) -> None:
        """End the download, and release the slot or part. Idempotent.

        What has arrived stays there, and the next download goes on from it.
        """
        self._is_stopped.set()
        self._ended.wait()
        self.share.close()
