"""Uploads beside training: a thread that sends sealed checkpoints, as the policy decides.

Training never waits for the thread. An upload holds a lock only while it reads one part from the
drive. If retention needs the slot, the upload ends, and the log says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from gds import Backend, StorageError
from gds.opening import given_or_local
from gds.waiting import start
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import OffloadError, RecycledError, TierError
from offload.format.manifest import Manifest
from offload.journal import log_event
from offload.retention.leaving import Leaving
from offload.store.serving import Mailbox, Serving
from offload.tiers.address import parse_address
from offload.tiers.measuring import Measurements
from offload.tiers.opening import DEFAULT_TIMEOUT_S, open_objects
from offload.tiers.policy import Decision, Situation, decide
from offload.tiers.rank_notes import RankShares, put_last_order
from offload.tiers.sending import Check, UploadStoppedError
from offload.tiers.tier_stats import NUM_EVENTS, TierEvent, TierStats
from offload.tiers.upload import Others, Upload
from offload.units import duration, size

RETRY_S = 30.0
"""Seconds for which a request that failed is tried again; the next checkpoint is another chance."""

_NUM_TRANSFERS = 2
_GAVE_WAY = (
    "gave way to a step that needed its slot; a larger keep=, or room for one more slot, helps"
)
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Offered:
    checkpoint: Checkpoint
    sealed_s: float


class BackgroundUploads:
    """Uploads of one optimizer's checkpoints.

    Args:
        url: URL of the tier.
        max_slowdown: Largest share by which training may be slowed down.
        max_age_s: Age in seconds that the newest checkpoint in the tier should not exceed.
        check: How objects are checked after they were sent.
        num_kept: Function that returns how many of the newest checkpoints the store keeps.
        backend: Storage backend of the store; None for the local file system.
        serving: Which rank serves what, on the rank that writes the store; None for one process.
            The other ranks have `FollowingUploads`.
        leaving: Where retention looks for checkpoints that are leaving; None if nothing looks.
        measurements: Measurements to go by; for tests.

    Raises:
        TierError: The URL is none of a tier.
    """

    def __init__(
        self,
        url: str,
        *,
        max_slowdown: float,
        max_age_s: float | None,
        check: Check,
        num_kept: Callable[[], int | None],
        backend: Backend | None = None,
        serving: Serving | None = None,
        leaving: Leaving | None = None,
        measurements: Measurements | None = None,
    ) -> None:
        self._address = parse_address(url)
        self._max_slowdown = max_slowdown
        self._max_age_s = max_age_s
        self._check: Check = check
        self._num_kept = num_kept
        self._backend = backend
        self._serving = serving
        self._leaving = leaving or Leaving()
        self._box: Mailbox | None = None
        self._num_uploads = 0
        self.measured = measurements or Measurements()
        self._changed = threading.Condition()
        self._offered: _Offered | None = None
        self._active = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._events: deque[TierEvent] = deque(maxlen=NUM_EVENTS)
        self._bytes_sent = 0
        self._num_complete = 0
        self._newest: _Offered | None = None
        self._unmeasured = 0

    def offer(self, checkpoint: Checkpoint, *, restored: bool = False) -> None:
        """Consider a checkpoint that has just been sealed. The call returns at once.

        If an upload is running, it goes on, and the newest checkpoint that was offered meanwhile is
        considered after it.

        Args:
            checkpoint: The checkpoint.
            restored: Whether training goes on from it: it was sealed earlier. If its upload was
                interrupted, the upload goes on.
        """
        sealed_s = self.measured.restored() if restored else self.measured.sealed()
        offered = _Offered(checkpoint, sealed_s)
        with self._changed:
            if self._stopped:
                return
            self._leaving.begin(checkpoint.generation, "waiting")
            dropped, self._offered = self._offered, offered
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offload-tier", daemon=True)
                start(self._thread)
            self._changed.notify_all()
        if dropped is not None:
            if dropped.checkpoint.generation != checkpoint.generation:
                self._leaving.end(dropped.checkpoint.generation)
            self._note(dropped, Decision("skip", "a newer one has come before its turn"))

    def stats(self) -> TierStats:
        """Return what has happened so far."""
        with self._changed:
            return TierStats(
                self._address.url,
                self._bytes_sent,
                self._num_complete,
                None if self._newest is None else self._newest.checkpoint.step,
                self.measured.bytes_per_s,
                self.measured.slowdown,
                tuple(self._events),
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do, at most `timeout_s` seconds; return whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._stopped or not (self._active or self._offered), timeout_s
            )

    def stop(self) -> None:
        """End uploads at the end of their parts. Idempotent."""
        with self._changed:
            self._stopped = True
            offered, self._offered = self._offered, None
            if offered is not None:
                self._leaving.end(offered.checkpoint.generation)
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            box = self._box
            if box is not None:
                with suppress(OffloadError):
                    put_last_order(box, self._num_uploads + 1)
                box.close()
            with self._changed:
                self._active, self._stopped = False, True
                self._changed.notify_all()

    def _work(self) -> None:
        if self._serving is not None:
            try:
                self._box = self._serving.connect()
            except OffloadError as error:  # the key-value store is gone, and with it the job
                log_event(f"{self._address.url}: nothing is uploaded: {error}")
                return
        while True:
            with self._changed:
                self._active = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or self._offered is not None)
                offered, self._offered = self._offered, None
                if self._stopped or offered is None:
                    return
                self._active = True
            generation = offered.checkpoint.generation
            try:
                decision = decide(self._situation(offered))
                event = self._note(offered, decision)
                if decision.choice == "upload":
                    self._leaving.begin(generation, "sending")
                    self._upload(offered, event)
                else:
                    self._unmeasured += 1
            finally:
                self._leaving.end(generation)

    def _situation(self, offered: _Offered) -> Situation:
        measured = self.measured
        interval_s, kept = measured.interval_s, self._num_kept()
        if self._leaving.has_room is not False:
            kept = None  # retention keeps it until it is sent
        newest = self._newest
        return Situation(
            nbytes=_size_of(offered.checkpoint.manifest),
            interval_s=interval_s,
            lifetime_s=None if interval_s is None or kept is None else interval_s * kept,
            bytes_per_s=measured.bytes_per_s,
            unmeasured=self._unmeasured,
            newest_age_s=None if newest is None else offered.sealed_s - newest.sealed_s,
            slowdown=measured.slowdown,
            busy_share=measured.busy_share,
            max_slowdown=self._max_slowdown,
            max_age_s=self._max_age_s,
        )

    def _upload(self, offered: _Offered, event: TierEvent) -> None:
        """Send a checkpoint; every outcome is logged, and none is raised."""
        checkpoint, began_s, sent = offered.checkpoint, time.monotonic(), 0

        def progress(done: int, total: int) -> None:  # noqa: ARG001
            nonlocal sent
            sent = done

        self.measured.uploading(True)
        outcome, text = "failed", ""
        try:
            with (
                given_or_local(self._backend) as storage,
                open_objects(
                    self._address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=RETRY_S
                ) as objects,
            ):
                unlocked = checkpoint.unlocked(storage)
                report = Upload(
                    objects,
                    unlocked,
                    check=self._check,
                    num_transfers=_NUM_TRANSFERS,
                    progress=progress,
                    is_stopped=lambda: self._stopped,
                    others=self._others(checkpoint.manifest),
                ).run()
            outcome, sent = "complete", report.bytes_sent
            text = f"{report.url} is complete, after {duration(report.seconds)}"
            with self._changed:
                self._num_complete += 1
                self._newest = offered
        except UploadStoppedError:
            outcome, text = "stopped", "stopped with the optimizer; `offload push` goes on with it"
        except RecycledError:
            outcome, text = "recycled", _GAVE_WAY
        except (TierError, OffloadError, StorageError) as error:
            text = f"failed: {error}"
        except Exception as error:  # noqa: BLE001  (training goes on)
            text = f"failed: {type(error).__name__}"
        finally:
            self.measured.uploading(False)
            self.measured.sent(sent, time.monotonic() - began_s)
        with self._changed:
            self._unmeasured = 0 if sent else self._unmeasured + 1
            self._bytes_sent += sent
            for number, old in enumerate(self._events):
                if old is event:
                    self._events[number] = replace(event, outcome=outcome)
        log_event(f"{checkpoint.path}: upload of {size(sent)}: {text}")

    def _others(self, manifest: Manifest) -> Others | None:
        """Return the ranks that send a checkpoint with this one; None if this one sends all of it.

        If the state was divided among other ranks than those that run now, this rank sends it.
        """
        serving, box = self._serving, self._box
        served = [] if serving is None else sorted(owner for owner in serving.owners if owner)
        if serving is None or box is None or served != [one.owner for one in manifest.owners]:
            return None
        self._num_uploads += 1
        return RankShares(
            box, serving, self._num_uploads, manifest.generation, lambda: self._stopped
        )

    def _note(self, offered: _Offered, decision: Decision) -> TierEvent:
        event = TierEvent(offered.checkpoint.step, decision.choice, decision.reason, "")
        with self._changed:
            self._events.append(event)
        name = os.path.basename(offered.checkpoint.path)
        log_event(f"{self._address.url}: {name}: {decision.choice}: {decision.reason}")
        return event


def _size_of(manifest: Manifest) -> int:
    """Return about how many bytes a checkpoint has: owners of state have about as much each."""
    layout = manifest.layout
    return layout.model_header.file_bytes + layout.state_bytes * (1 + len(manifest.owners))
