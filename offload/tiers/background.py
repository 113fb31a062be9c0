"""Uploads beside training: a thread that sends sealed checkpoints, as the policy decides.

Training never waits for the thread. An upload holds a lock only while it reads one part from the
drive. If retention needs the slot, the upload ends, and the log says so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from gds import Backend, StorageError
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import OffloadError, RecycledError, reason_of
from offload.format.manifest import Manifest
from offload.journal import log_event
from offload.store.expiry import Leaving
from offload.store.shared import Serving
from offload.tiers.contents import OBJECT_BYTES
from offload.tiers.policy import Decision, Situation, decide, parameters_due
from offload.tiers.rank_uploads import LAST, RankShares, put_order
from offload.tiers.sending import Check, UploadStoppedError
from offload.tiers.services.opening import open_objects
from offload.tiers.upload import Parameters, Upload
from offload.tiers.upload_thread import (
    NUM_TRANSFERS,
    RETRY_S,
    TierEvent,
    UploadThread,
    write_decisions,
)
from offload.units import duration, size

_GAVE_WAY = (
    "gave way to a step that needed its slot; a larger keep=, or room for one more slot, helps"
)
_STOPPED = "stopped with the optimizer; `offload push` goes on with it"


@dataclass(frozen=True, slots=True)
class _Offered:
    checkpoint: Checkpoint
    sealed_s: float


class BackgroundUploads(UploadThread):
    """Uploads of one optimizer's checkpoints.

    Args:
        url: URL of the tier.
        max_slowdown: Largest share by which training may be slowed down.
        max_age_s: Age in seconds that the newest checkpoint in the tier should not exceed.
        check: How objects are checked after they were sent.
        num_kept: Function that returns how many of the newest checkpoints the store keeps.
        backend: Storage backend of the store; None for the local file system.
        serving: The part that each rank serves, on the rank that writes the store; None for one
            process. The other ranks have `FollowingUploads`.
        leaving: Where retention looks for checkpoints that are leaving.

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
        backend: Backend | None,
        serving: Serving | None,
        leaving: Leaving,
    ) -> None:
        super().__init__(url, check=check, backend=backend, serving=serving)
        self._max_slowdown = max_slowdown
        self._max_age_s = max_age_s
        self._num_kept = num_kept
        self._leaving = leaving
        self._num_orders = 0
        self._offered: _Offered | None = None
        self._active = False
        self._newest: _Offered | None = None
        self._newest_parameters: _Offered | None = None
        self._unmeasured = 0
        self._running: Upload | None = None
        """The upload that runs; not one of parameters beside it."""
        self._nested_s = 0.0
        """Seconds of the present upload during which it waited for parameters of newer ones."""
        self._last: _Offered | None = None
        """Newest checkpoint of which nobody has been told whether the tier has it."""
        self._warned: set[object] = set()

    def offer(self, checkpoint: Checkpoint, *, restored: bool = False) -> None:
        """Consider a checkpoint that was sealed. The call returns at once.

        If an upload is running, it goes on, and the newest checkpoint that was offered meanwhile is
        considered after it. One that training was `restored` from was sealed earlier: if its upload
        was interrupted, the upload goes on.
        """
        if restored and not _is_here(checkpoint):  # it is just arriving from the tier
            if self._serving is not None:  # the other ranks wait for the last order
                with self._changed:
                    self._begin()
            return
        sealed_s = self.measured.now() if restored else self.measured.sealed()
        offered = _Offered(checkpoint, sealed_s)
        with self._changed:
            if self._stopped:
                return
            self._leaving.begin(checkpoint.generation, "waiting")
            dropped, self._offered, self._last = self._offered, offered, offered
            self._begin()
            self._changed.notify_all()
        if dropped is not None:
            if dropped.checkpoint.generation != checkpoint.generation:
                self._leaving.end(dropped.checkpoint.generation)
            self._note(dropped, Decision("skip", "a newer one has come before its turn"))

    def _is_idle(self) -> bool:
        return not (self._active or self._offered)

    def stop(self) -> None:
        """End uploads at the end of their parts. Idempotent."""
        with self._changed:
            self._stopped = True
            offered, self._offered = self._offered, None
        if offered is not None:
            self._leaving.end(offered.checkpoint.generation)
        super().stop()
        self._tell_missing()

    def _tell_missing(self) -> None:
        """Log once that the tier lacks the newest checkpoint, unless that was decided."""
        with self._changed:
            last, self._last = self._last, None
            events = {event.step: event for event in self._events}
        if last is None:
            return
        event = events.get(last.checkpoint.step, TierEvent(0, "upload", "", ""))
        why = {"recycled": _GAVE_WAY, "parameters": "its state is not"}
        why["failed"] = f"failed: {self._failure}"
        reason = event.reason if event.choice == "skip" else why.get(event.outcome, _STOPPED)
        if event.outcome != "complete" and event.choice not in ("keep", "thin"):
            log_event(f"{last.checkpoint.path}: not in the tier: {reason}", logging.WARNING)

    def _work(self) -> None:
        try:
            self._consider_offers()
        finally:
            if self._box is not None:
                with suppress(OffloadError):
                    put_order(self._box, LAST)

    def _consider_offers(self) -> None:
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
                if decision.choice in ("upload", "parameters"):
                    self._leaving.begin(generation, "sending")
                    first: Parameters = "first" if decision.choice == "parameters" else ""
                    self._upload(offered, event, first)
                else:
                    self._unmeasured += 1
            finally:
                self._leaving.end(generation)

    def _situation(self, offered: _Offered) -> Situation:
        measured, manifest = self.measured, offered.checkpoint.manifest
        interval_s, kept = measured.interval_s, self._num_kept()
        if self._leaving.has_room is not False:
            kept = None  # retention keeps it until it is sent
        newest, layout = self._newest, manifest.layout
        with_parameters = [one for one in (newest, self._newest_parameters) if one is not None]
        return Situation(
            nbytes=_size_of(manifest),
            interval_s=interval_s,
            lifetime_s=None if interval_s is None or kept is None else interval_s * kept,
            bytes_per_s=measured.bytes_per_s,
            unmeasured=self._unmeasured,
            # A model in shard files goes with the state.
            parameter_bytes=layout.model_header.file_bytes if layout.shard is None else None,
            newest_age_s=None if newest is None else offered.sealed_s - newest.sealed_s,
            parameters_age_s=min(
                (offered.sealed_s - one.sealed_s for one in with_parameters), default=None
            ),
            slowdown=measured.slowdown,
            busy_share=measured.busy_share,
            max_slowdown=self._max_slowdown,
            max_age_s=self._max_age_s,
        )

    def _send_due_parameters(self) -> None:
        """Send the parameters of a newer checkpoint beside the present upload, if they are due."""
        with self._changed:
            offered = self._offered
        if offered is None or self._stopped or not self._are_due(offered):
            return
        with self._changed:
            if self._offered is not offered:
                return
            self._offered = None
        reason = "those in the tier become too old, and the state of another is being sent"
        try:
            event = self._note(offered, Decision("parameters", reason))
            self._leaving.begin(offered.checkpoint.generation, "sending")
            self._upload(offered, event, "only")
        finally:
            self._leaving.end(offered.checkpoint.generation)

    def _are_due(self, offered: _Offered) -> bool:
        """Return whether to send the parameters of a checkpoint beside the upload that runs."""
        now, running = self._situation(offered), self._running
        if running is None or now.parameter_bytes is None:
            return False
        if running.parameters == "first":
            return parameters_due(now)
        # It began as an upload of everything, and the link may have become slower since.
        most_bytes_per_s = self.measured.most_bytes_per_s(_most_bytes_sent(running))
        if now.bytes_per_s is None or most_bytes_per_s is None:
            return False
        observed = replace(now, bytes_per_s=min(now.bytes_per_s, most_bytes_per_s))
        return decide(observed).choice == "parameters"

    def _upload(self, offered: _Offered, event: TierEvent, parameters: Parameters = "") -> None:
        """Send a checkpoint; every outcome is logged, and none is raised."""
        checkpoint, began_s, sent = offered.checkpoint, time.monotonic(), 0
        nested, upload = parameters == "only", None
        if not nested:
            self.measured.uploading(True)
            self._nested_s = 0.0
        outcome, text, level = "failed", "", logging.INFO
        try:
            with (
                given_or_local(self._backend) as storage,
                open_objects(self._address, retry_s=RETRY_S) as objects,
            ):
                upload = Upload(
                    objects,
                    checkpoint.unlocked(storage),
                    check=self._check,
                    num_transfers=NUM_TRANSFERS,
                    is_stopped=lambda: self._stopped,
                    meanwhile=(lambda: None) if nested else self._send_due_parameters,
                    others=None if nested else self._others(checkpoint.manifest),
                    parameters=parameters,
                    parameters_sent=lambda: self._have_parameters(offered),
                )
                if not nested:
                    self._running = upload
                report = upload.run()
            sent = report.bytes_sent
            if nested and not report.already_complete:
                outcome = "parameters"
                text = f"{report.url} has the parameters, after {duration(report.seconds)}"
            else:
                outcome = "complete"
                text = f"{report.url} is complete, after {duration(report.seconds)}"
                with self._changed:
                    self._num_complete += 1
                    if self._newest is None or offered.sealed_s >= self._newest.sealed_s:
                        self._newest, self._newest_step = offered, checkpoint.step
        except UploadStoppedError:
            outcome, text = "stopped", _STOPPED
        except RecycledError:
            outcome, text = "recycled", _GAVE_WAY
        except Exception as error:  # noqa: BLE001  (training goes on)
            known = isinstance(error, (OffloadError, StorageError))
            self._failure = reason_of(error) if known else type(error).__name__
            text = f"failed: {self._failure}"
            kind = type(error), getattr(error, "errno", None)
            level = logging.INFO if kind in self._warned else logging.WARNING
            self._warned.add(kind)  # each kind of failure is shown once, not at each checkpoint
        finally:
            seconds = time.monotonic() - began_s
            if nested:
                self._nested_s += seconds
            else:
                self._running = None
                self.measured.uploading(False)
                seconds -= self._nested_s  # others were sent meanwhile
            sent = max(sent, upload.bytes_sent if upload is not None else 0)
            self.measured.sent(sent, seconds)
        with self._changed:
            self._unmeasured = 0 if sent else self._unmeasured + 1
            self._bytes_sent += sent
            for number, old in enumerate(self._events):
                if old is event:
                    self._events[number] = replace(event, outcome=outcome)
        log_event(f"{checkpoint.path}: upload of {size(sent)}: {text}", level)
        self._show(checkpoint)

    def _have_parameters(self, offered: _Offered) -> None:
        self._newest_parameters = offered
        log_event(f"{offered.checkpoint.path}: the tier has its parameters")

    def _others(self, manifest: Manifest) -> RankShares | None:
        """Return the ranks that send a checkpoint with this one; None if this one sends all of it.

        If the state was divided among other ranks than those that run now, this rank sends it.
        """
        serving, box = self._serving, self._box
        served = [] if serving is None else sorted(owner for owner in serving.owners if owner)
        if serving is None or box is None or served != [one.owner for one in manifest.owners]:
            return None
        self._num_orders += 1
        return RankShares(box, serving, self._num_orders, manifest.generation)

    def _note(self, offered: _Offered, decision: Decision) -> TierEvent:
        event = TierEvent(offered.checkpoint.step, decision.choice, decision.reason, "")
        with self._changed:
            self._events.append(event)
        name = os.path.basename(offered.checkpoint.path)
        log_event(f"{self._address.url}: {name}: {decision.choice}: {decision.reason}")
        if threading.current_thread() is self._thread:  # the thread that seals must not wait
            self._show(offered.checkpoint)
        return event

    def _show(self, checkpoint: Checkpoint) -> None:
        """Write the last decisions where ``offload ls`` finds them."""
        with self._changed:
            events = [*self._events]
        write_decisions(os.path.dirname(checkpoint.path), self._address.url, events)


def _is_here(checkpoint: Checkpoint) -> bool:
    try:
        return checkpoint.backend.stat(checkpoint.path) is not None
    except StorageError:
        return False


def _most_bytes_sent(upload: Upload) -> int:
    """Return the most bytes that an upload can have sent: objects count when they are checked."""
    nbytes = _size_of(upload.manifest)
    if upload.manifest.owners:
        return nbytes  # what the other ranks have sent is not known
    under_way = upload.manifest.layout.model_header.file_bytes + NUM_TRANSFERS * OBJECT_BYTES
    return min(nbytes, upload.bytes_sent + under_way)


def _size_of(manifest: Manifest) -> int:
    """Return about how many bytes a checkpoint has: owners of state have about as much each."""
    layout = manifest.layout
    return layout.model_header.file_bytes + layout.state_bytes * (1 + len(manifest.owners))
