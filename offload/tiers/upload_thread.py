"""The thread that uploads beside training, and its statistics. Training never waits for it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from gds import Backend
from gds.waiting import start
from offload.errors import OffloadError
from offload.format.names import TIERS_NAME
from offload.journal import log_event
from offload.store.shared import Mailbox, Serving
from offload.tiers.policy import Measurements
from offload.tiers.sending import Check
from offload.tiers.services.address import parse_address, url_digest


@dataclass(frozen=True, slots=True)
class TierEvent:
    """What became of one checkpoint."""

    step: int
    choice: str
    """Decision: ``upload``, ``parameters``, ``keep``, ``thin`` or ``skip``."""

    reason: str
    outcome: str
    """What has happened since: empty, ``complete``, ``parameters`` if only those were sent,
    ``recycled``, ``stopped`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """State of the uploads of one optimizer."""

    url: str
    bytes_sent: int
    """Bytes of objects that were sent and checked since construction."""

    num_complete: int
    """Number of checkpoints that the tier has got since construction."""

    newest_step: int | None
    """Step of the newest checkpoint that the tier has got from this process; None if none."""

    bytes_per_s: float | None
    """Rate of the link, as measured; None if nothing was sent."""

    slowdown: float | None
    """Share by which steps beside uploads take longer, as measured; None if it is not known."""

    events: tuple[TierEvent, ...]
    """The last decisions, the newest last."""

    failure: str = ""
    """Why the last upload that failed has failed; empty if none has."""


_NUM_EVENTS = 32
"""Number of events that are remembered."""

_ENDING = ".decisions"


def write_decisions(store: str, url: str, events: Sequence[TierEvent]) -> None:
    """Write the last decisions about checkpoints of a store, for people. Never raises.

    The file is not synced, nothing is decided by it, and it may be removed.
    """
    name = url_digest(url) + _ENDING
    body = {"url": url, "decisions": [asdict(event) for event in events]}
    with suppress(OSError):  # another backend than the local file system, or a full drive
        directory = f"{store}/{TIERS_NAME}"
        if not os.path.isdir(store):
            return
        os.makedirs(directory, exist_ok=True)
        beside = f"{directory}/.{name}"
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(body, file)
        os.replace(beside, f"{directory}/{name}")


def read_decisions(store: str) -> dict[str, list[TierEvent]]:
    """Return the last decisions about checkpoints of a store, by URL of the tier.

    Files that cannot be read, or are damaged, are left out.
    """
    found: dict[str, list[TierEvent]] = {}
    directory = f"{store}/{TIERS_NAME}"
    with suppress(OSError):
        for name in sorted(os.listdir(directory)):
            if name.endswith(_ENDING) and not name.startswith("."):
                with (
                    suppress(OSError, ValueError, TypeError, KeyError),
                    open(f"{directory}/{name}", encoding="utf-8") as file,
                ):
                    body = json.load(file)
                    events = [TierEvent(**event) for event in body["decisions"]]
                    found[str(body["url"])] = events
    return found


RETRY_S = 30.0
"""Seconds for which a request that failed is tried again; the next checkpoint is another chance."""

NUM_TRANSFERS = 2
"""Number of objects that are sent at a time, beside training."""

_JOIN_S = 5.0


class UploadThread:
    """The thread of one optimizer that uploads to a tier; a subclass says what it does."""

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
        self._events: deque[TierEvent] = deque(maxlen=_NUM_EVENTS)
        self._bytes_sent = 0
        self._num_complete = 0
        self._newest_step: int | None = None
        self._failure = ""

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
                self._failure,
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
