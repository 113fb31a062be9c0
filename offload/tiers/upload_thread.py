"""The thread that uploads beside training, and its statistics. Training never waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque

from gds import Backend
from gds.waiting import start
from offload.errors import OffloadError
from offload.journal import log_event
from offload.store.shared import Mailbox, Serving
from offload.tiers.measuring import Measurements
from offload.tiers.sending import Check
from offload.tiers.services.address import parse_address
from offload.tiers.tier_stats import NUM_EVENTS, TierEvent, TierStats

RETRY_S = 30.0
"""Seconds for which a request that failed is tried again; the next checkpoint is another chance."""

NUM_TRANSFERS = 2
"""Number of objects that are sent at a time, beside training."""

_JOIN_S = 5.0


class UploadThread:
    """The thread of one optimizer that uploads to a tier; a subclass says what it does.

    Args:
        url: URL of the tier.
        check: How objects are checked after they were sent.
        backend: Storage backend of the store; None for the local file system.
        serving: The part that each rank serves; None for one process.

    Raises:
        TierError: The URL is none of a tier.
    """

    def __init__(
        self,
        url: str,
        *,
        check: Check,
        backend: Backend | None,
        serving: Serving | None,
    ) -> None:
        self._address = parse_address(url)
        self._check: Check = check
        self._backend = backend
        self._serving = serving
        self.measured = Measurements()
        """Measurements of this rank; the writer decides by its own."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        """Whether nothing is to be uploaded any more."""
        self._box: Mailbox | None = None
        self._events: deque[TierEvent] = deque(maxlen=NUM_EVENTS)
        self._bytes_sent = 0
        self._num_complete = 0
        self._newest_step: int | None = None

    def stats(self) -> TierStats:
        """Return what has happened so far."""
        with self._changed:
            return TierStats(
                self._address.url,
                self._bytes_sent,
                self._num_complete,
                self._newest_step,
                self.measured.bytes_per_s,
                self.measured.slowdown,
                tuple(self._events),
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do, at most `timeout_s` seconds; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopped or self._is_idle(), timeout_s)

    def stop(self) -> None:
        """End uploads at the end of their parts. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _begin(self) -> None:
        """Start the thread, unless it runs; within `_changed`."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="offload-tier", daemon=True)
            start(self._thread)

    def _run(self) -> None:
        serving = self._serving
        try:
            if serving is not None:
                self._box = serving.connect()
            self._work()
        except OffloadError as error:  # the key-value store is gone, and with it the job
            if serving is None or serving.is_writer:
                log_event(f"{self._address.url}: nothing is uploaded: {error}", logging.WARNING)
            else:
                log_event(f"{self._address.url}: rank {serving.rank} uploads no more: {error}")
        finally:
            if self._box is not None:
                self._leave(self._box)
                self._box.close()
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _is_idle(self) -> bool:
        """Return whether nothing is left to do; within `_changed`."""
        raise NotImplementedError

    def _work(self) -> None:
        """Upload until `_stopped`, on the thread."""
        raise NotImplementedError

    def _leave(self, box: Mailbox) -> None:
        """Tell the other ranks that this one uploads nothing more. Never raises."""
