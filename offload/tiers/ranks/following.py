"""Uploads on a rank that is not the writer: its thread sends what the writer asks for."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing, suppress

from gds import Backend
from gds.opening import given_or_local
from gds.waiting import start
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import OwnerPart, read_table
from offload.errors import CheckpointError, OffloadError, RecycledError
from offload.format.shares.owners import OwnerReference
from offload.journal import log_event
from offload.store.shared import Mailbox, Serving
from offload.tiers.marker import Identity
from offload.tiers.measuring import Measurements
from offload.tiers.ranks.owner_share import OwnerShare, ShareSent, send_share
from offload.tiers.ranks.owner_source import OwnerSource
from offload.tiers.ranks.rank_notes import (
    POLL_S,
    Order,
    Signs,
    read_order,
    report_failure,
    report_share,
)
from offload.tiers.sending import NUM_TRANSFERS, Check, Sending, UploadStoppedError
from offload.tiers.services.address import parse_address
from offload.tiers.services.opening import DEFAULT_TIMEOUT_S, open_objects
from offload.tiers.tier_stats import NUM_EVENTS, TierEvent, TierStats
from offload.units import duration, size

_NUM_KNOWN = 16
"""Number of checkpoints that are remembered, of which the writer may ask for one."""

_JOIN_S = 5.0


class FollowingUploads:
    """Uploads of the part that one rank serves, as the writer of the store decides.

    Args:
        url: URL of the tier.
        serving: What this rank serves.
        check: How objects are checked after they were sent.
        backend: Storage backend of the parts; None for the local file system.
        retry_s: Seconds for which a request that failed is tried again.

    Raises:
        TierError: The URL is none of a tier.
    """

    def __init__(
        self,
        url: str,
        serving: Serving,
        *,
        check: Check,
        backend: Backend | None,
        retry_s: float,
    ) -> None:
        self._address = parse_address(url)
        self._serving = serving
        self._check: Check = check
        self._backend = backend
        self._retry_s = retry_s
        self.measured = Measurements()
        """Measurements of the steps of this rank; the writer decides by its own."""
        self._changed = threading.Condition()
        self._known: OrderedDict[int, Checkpoint] = OrderedDict()
        """Newest checkpoints, by generation."""
        self._thread: threading.Thread | None = None
        self._ended = False
        """Whether the writer gives no further orders, or this rank has stopped."""
        self._done = 0
        """Number of the last upload that this rank has ended."""
        self._events: deque[TierEvent] = deque(maxlen=NUM_EVENTS)
        self._bytes_sent = 0
        self._num_complete = 0
        self._newest: int | None = None

    def offer(self, checkpoint: Checkpoint, *, restored: bool = False) -> None:
        """Remember a checkpoint that the writer may ask for. The call returns at once."""
        del restored
        with self._changed:
            if self._ended:
                return
            self._known[checkpoint.generation] = checkpoint
            while len(self._known) > _NUM_KNOWN:
                self._known.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offload-tier", daemon=True)
                start(self._thread)

    def stats(self) -> TierStats:
        """Return what this rank has sent so far; decisions are in the statistics of the writer."""
        with self._changed:
            return TierStats(
                self._address.url,
                self._bytes_sent,
                self._num_complete,
                self._newest,
                None,
                self.measured.slowdown,
                tuple(self._events),
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until the writer needs nothing any more; return whether it was seen in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self._thread is None, timeout_s)

    def stop(self) -> None:
        """End uploads at the end of their parts. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _run(self) -> None:
        box: Mailbox | None = None
        try:
            box = self._serving.connect()
            self._follow(box)
        except OffloadError as error:  # the key-value store is gone, and with it the job
            log_event(f"{self._address.url}: rank {self._serving.rank} uploads no more: {error}")
        finally:
            if box is not None:
                box.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _follow(self, box: Mailbox) -> None:
        while not self._ended:
            order = read_order(box)
            if order is not None and order.is_last:
                return
            if order is not None and order.number > self._done and order.goes_on:
                self._carry_out(box, order)
                self._done = order.number
            with self._changed:
                self._changed.wait_for(lambda: self._ended, POLL_S)

    def _carry_out(self, box: Mailbox, order: Order) -> None:
        """Send what an order asks for, and report it; errors of the tier are reported as well."""
        rank, began_s = self._serving.rank, time.monotonic()
        signs, ended = Signs(box, rank), threading.Event()

        def is_stopped() -> bool:
            """Return whether the order was withdrawn, or this rank has ended."""
            if signs.give():  # at intervals, so that the notes are not asked all the time
                now = read_order(box)
                if now is None or now.number != order.number or not now.goes_on:
                    ended.set()
            return self._ended or ended.is_set()

        try:
            checkpoint = self._wait_for(order, is_stopped)
            sent = self._send(checkpoint, order, is_stopped)
        except Exception as error:  # noqa: BLE001  (training goes on, and the writer is told)
            with suppress(OffloadError):
                report_failure(box, order, rank, error)
            known = isinstance(error, OffloadError | OSError)
            text = str(error) if known else type(error).__name__
            outcome = (
                "recycled"
                if isinstance(error, RecycledError)
                else "stopped"
                if isinstance(error, UploadStoppedError)
                else "failed"
            )
            self._note(None, outcome, f"generation {order.generation}: {text}")
            return
        report_share(box, order, rank, sent)
        with self._changed:
            self._bytes_sent += sent.bytes_sent
            self._num_complete += 1
            self._newest = checkpoint.step
        seconds = duration(time.monotonic() - began_s)
        name = os.path.basename(checkpoint.path)
        self._note(
            checkpoint.step, "complete", f"{name}: sent {size(sent.bytes_sent)} in {seconds}"
        )

    def _wait_for(self, order: Order, is_stopped: Callable[[], bool]) -> Checkpoint:
        """Return the checkpoint of an order, whose seal may not have ended yet on this rank."""
        while True:
            with self._changed:
                found = self._known.get(order.generation)
                if found is not None:
                    return found
                self._changed.wait_for(lambda: self._ended, POLL_S)
            if is_stopped():
                raise UploadStoppedError(
                    0, f"generation {order.generation} is not known here", self._address.url
                )

    def _send(
        self, checkpoint: Checkpoint, order: Order, is_stopped: Callable[[], bool]
    ) -> ShareSent:
        manifest = checkpoint.manifest
        reference = self._reference_in(checkpoint)
        path = reference.path_in(self._serving.directory)
        with (
            given_or_local(self._backend) as storage,
            open_objects(
                self._address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=self._retry_s
            ) as objects,
        ):
            part = OwnerPart(reference, path, read_table(storage, path, manifest))
            with closing(OwnerSource(storage, part)) as source:
                share = OwnerShare(source, order.object_bytes)
                sending = Sending(
                    objects,
                    check=self._check,
                    num_transfers=NUM_TRANSFERS // 2,
                    total=sum(share.sizes.values()),
                    progress=None,
                    is_stopped=is_stopped,
                )
                folder = Identity(manifest.store_id, manifest.generation, order.writer).folder
                return send_share(share, objects, folder, manifest, sending, storage)

    def _reference_in(self, checkpoint: Checkpoint) -> OwnerReference:
        owner = self._serving.owner
        for reference in checkpoint.manifest.owners:
            if reference.owner == owner:
                return reference
        raise CheckpointError(f"{checkpoint.path} has no part of owner {owner}")

    def _note(self, step: int | None, outcome: str, text: str) -> None:
        event = TierEvent(-1 if step is None else step, "upload", "the writer asks for it", outcome)
        with self._changed:
            self._events.append(event)
        log_event(f"{self._address.url}: rank {self._serving.rank}: {text}")
