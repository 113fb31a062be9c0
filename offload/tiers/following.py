"""Uploads on a rank that is not the writer: its thread sends what the writer asks for."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from contextlib import closing, suppress

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import OwnerPart, read_table
from offload.errors import CheckpointError, OffloadError, RecycledError
from offload.format.names import owner_name
from offload.journal import log_event
from offload.store.shared import Mailbox, Serving
from offload.tiers.marker import Identity
from offload.tiers.rank_notes import LAST, POLL_S, Answer, Order, ShareSent, read_order
from offload.tiers.sending import Check, Sending, Share, UploadStoppedError
from offload.tiers.services.opening import DEFAULT_TIMEOUT_S, open_objects
from offload.tiers.source import open_part
from offload.tiers.tier_stats import TierEvent
from offload.tiers.upload_thread import NUM_TRANSFERS, RETRY_S, UploadThread
from offload.units import duration, size

_NUM_KNOWN = 16
"""Number of checkpoints that are remembered, of which the writer may ask for one."""


class FollowingUploads(UploadThread):
    """Uploads of the part that one rank serves, as the writer of the store decides."""

    def __init__(
        self, url: str, *, check: Check, backend: Backend | None, serving: Serving
    ) -> None:
        super().__init__(url, check=check, backend=backend, serving=serving)
        self._rank = serving.rank
        self._owner = serving.owner
        self._directory = serving.directory
        self._known: OrderedDict[int, Checkpoint] = OrderedDict()
        """Newest checkpoints, by generation."""
        self._done = 0
        """Number of the last upload that this rank has ended."""

    def offer(self, checkpoint: Checkpoint, *, restored: bool = False) -> None:
        """Remember a checkpoint that the writer may ask for. The call returns at once."""
        del restored
        with self._changed:
            if self._stopped:
                return
            self._known[checkpoint.generation] = checkpoint
            while len(self._known) > _NUM_KNOWN:
                self._known.popitem(last=False)
            self._begin()

    def _is_idle(self) -> bool:
        return self._thread is None  # else the writer may still need something

    def _work(self) -> None:
        box = self._box
        while box is not None and not self._stopped:
            order = read_order(box)
            if order == LAST:
                return
            if order is not None and order.number > self._done:
                self._carry_out(box, order)
                self._done = order.number
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, POLL_S)

    def _carry_out(self, box: Mailbox, order: Order) -> None:
        """Send what an order asks for, and answer it; errors of the tier are an answer as well."""
        began_s, answer = time.monotonic(), Answer(box, order, self._rank)
        try:
            checkpoint = self._wait_for(order, answer)
            sent = self._send(checkpoint, order, answer)
        except Exception as error:  # noqa: BLE001  (training goes on, and the writer is told)
            with suppress(OffloadError):
                answer.give_error(error)
            known = isinstance(error, OffloadError | OSError)
            text = str(error) if known else type(error).__name__
            outcome = "failed"
            if isinstance(error, RecycledError | UploadStoppedError):
                outcome = "recycled" if isinstance(error, RecycledError) else "stopped"
            self._note(-1, outcome, f"generation {order.generation}: {text}")
            return
        answer.give(sent)
        with self._changed:
            self._bytes_sent += sent.bytes_sent
            self._num_complete += 1
            self._newest_step = checkpoint.step
        seconds = duration(time.monotonic() - began_s)
        name = os.path.basename(checkpoint.path)
        text = f"{name}: sent {size(sent.bytes_sent)} in {seconds}"
        self._note(checkpoint.step, "complete", text)

    def _wait_for(self, order: Order, answer: Answer) -> Checkpoint:
        """Return the checkpoint of an order, whose seal may not have ended yet on this rank."""
        while True:
            with self._changed:
                found = self._known.get(order.generation)
                if found is not None:
                    return found
                self._changed.wait_for(lambda: self._stopped, POLL_S)
            if self._stopped or not answer.is_wanted():
                raise UploadStoppedError(
                    0, f"generation {order.generation} is not known here", self._address.url
                )

    def _send(self, checkpoint: Checkpoint, order: Order, answer: Answer) -> ShareSent:
        manifest = checkpoint.manifest
        references = [one for one in manifest.owners if one.owner == self._owner]
        if not references:
            raise CheckpointError(f"{checkpoint.path} has no part of owner {self._owner}")
        path = references[0].path_in(self._directory)
        with (
            given_or_local(self._backend) as storage,
            open_objects(self._address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=RETRY_S) as objects,
        ):
            part = OwnerPart(references[0], path, read_table(storage, path, manifest))
            with closing(open_part(storage, part)) as source:
                share = Share(source, order.object_bytes)
                sending = Sending(
                    objects,
                    Identity(manifest.store_id, manifest.generation, order.writer).folder,
                    manifest,
                    [share],
                    storage,
                    check=self._check,
                    num_transfers=NUM_TRANSFERS,
                    is_stopped=lambda: self._stopped or not answer.is_wanted(),
                )
                # What the tier has already is compared and not sent again; no record is needed.
                sending.find_present(owner_name(self._owner))
                sending.run()
                return ShareSent(share.sizes, share.digests, sum(sending.sent.values()))

    def _note(self, step: int, outcome: str, text: str) -> None:
        with self._changed:
            self._events.append(TierEvent(step, "upload", "the writer asks for it", outcome))
        log_event(f"{self._address.url}: rank {self._rank}: {text}")
