"""Uploads by several ranks: the writer's order, and what each other rank does and answers.

The writer decides. Its *order* names the checkpoint, and the name that the upload has in the tier.
Each other rank sends the part that it serves. Its answer counts seconds of work, as a sign of life,
and in the end has the names, sizes and digests of its objects. The writer completes the copy if all
have answered so. No rank ever waits for another one in a step: notes are read and written by the
threads that upload.

A rank that is killed gives no further answer. The writer then gives the upload up, so that the copy
is not complete. What the tier has is not sent again by the next upload of the same checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import OwnerPart, read_table
from offload.errors import CheckpointError, OffloadError, RecycledError, TierError
from offload.format.names import owner_name
from offload.journal import log_event
from offload.store.shared import Mailbox, Serving
from offload.tiers.marker import Identity
from offload.tiers.sending import Check, Sending, Share, UploadStoppedError
from offload.tiers.services.opening import open_objects
from offload.tiers.source import open_part
from offload.tiers.upload_thread import NUM_TRANSFERS, RETRY_S, TierEvent, UploadThread
from offload.units import duration, size

_SILENT_S = 60.0
"""Seconds without a sign of life after which a rank counts as lost."""

_STOP_S = 20.0
"""Longest time in seconds for which the writer waits for the other ranks to end an upload."""

_POLL_S = 0.1
"""Seconds between two looks for notes."""

_SIGN_S = 1.0
"""Seconds between two signs of life."""

_ORDER = "order"


@dataclass(frozen=True, slots=True)
class ShareSent:
    """What an owner's share of a copy consists of, for the marker."""

    sizes: dict[str, int]
    digests: dict[str, str]
    """Digest of each object that no table has digests for, by name."""

    bytes_sent: int
    """Size in bytes of the objects that were sent; the others had been sent before."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the writer wants all ranks to send. It stands until there is another one, or none."""

    number: int
    """Number of the upload; every new one is larger."""

    generation: int
    writer: str
    """Name that the upload has in the tier."""

    object_bytes: int
    """Size in bytes up to which whole chunks are put together to one object."""


LAST = Order(-1, 0, "", 0)
"""Order that says that the writer gives no further ones."""


def _read_order(box: Mailbox) -> Order | None:
    text = box.get(_ORDER)
    return Order(**json.loads(text)) if text else None


def put_order(box: Mailbox, order: Order | None) -> None:
    """Give an order, or withdraw the one that stands."""
    box.put(_ORDER, json.dumps(asdict(order)) if order is not None else "")


def _answer_key(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"


class _Answer:
    """The answer of a rank to one order."""

    def __init__(self, box: Mailbox, order: Order, rank: int) -> None:
        self._box = box
        self._order = order
        self._key = _answer_key(order.number, rank)
        self._lock = threading.Lock()
        self._signs = 0
        self._next_s = 0.0
        self._stands = True
        self._is_given = False

    def is_wanted(self) -> bool:
        """Return whether the order stands, and give a sign of life; both at intervals.

        Any thread that works for the order may ask.
        """
        if self._lock.acquire(blocking=False):
            try:
                now_s = time.monotonic()
                if now_s >= self._next_s and not self._is_given:
                    self._next_s = now_s + _SIGN_S
                    self._signs += 1
                    self._box.put(self._key, json.dumps({"signs": self._signs}))
                    self._stands = _read_order(self._box) == self._order
            finally:
                self._lock.release()
        return self._stands

    def give(self, sent: ShareSent) -> None:
        """Say that the share is in the tier, and has been checked."""
        self._put({"sent": asdict(sent)})

    def give_error(self, error: BaseException) -> None:
        """Say that this rank has ended without sending everything."""
        kind = next((one.__name__ for one in _KINDS if isinstance(error, one)), "")
        known = isinstance(error, OffloadError | OSError)  # whose texts have no credentials
        self._put({"error": str(error) if known else type(error).__name__, "kind": kind})

    def _put(self, said: dict[str, Any]) -> None:
        with self._lock:
            self._is_given = True  # a thread that is left behind gives no sign in its place
            self._box.put(self._key, json.dumps(said))


_KINDS = {RecycledError: errno.EAGAIN, UploadStoppedError: errno.EINTR}
"""Errors of a rank that the writer raises as they are; all others are a `TierError`."""


class RankShares:
    """The shares of the other ranks in one upload, as the writer asks for them."""

    def __init__(self, box: Mailbox, serving: Serving, number: int, generation: int) -> None:
        self._box = box
        self._ranks = [rank for rank in range(len(serving.owners)) if rank != serving.writer]
        self._number = number
        self._generation = generation
        self._has_begun = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._signs: dict[int, tuple[str | None, float]] = {}
        self.bytes_sent = 0
        """Size in bytes of the objects that the other ranks have sent in this upload."""

    def begin(self, writer: str, object_bytes: int) -> None:
        """Tell all ranks to send their parts, under the name that the upload has in the tier."""
        self._has_begun = True
        self._signs = {rank: (None, time.monotonic()) for rank in self._ranks}
        put_order(self._box, Order(self._number, self._generation, writer, object_bytes))

    def finish(self, look_up: Callable[[], object]) -> list[ShareSent]:
        """Wait until all ranks have sent and checked their parts, or raise the error of one.

        `look_up` is called again and again, and raises an error to end early.
        """
        while True:
            have_all = self._have_all_answered()
            for rank, answer in sorted(self._answers.items()):
                _require_sent(rank, answer)
            if have_all:
                break
            look_up()
            self._require_signs()
            time.sleep(_POLL_S)
        shares = [ShareSent(**answer["sent"]) for _, answer in sorted(self._answers.items())]
        self.bytes_sent = sum(share.bytes_sent for share in shares)
        with suppress(OffloadError):
            put_order(self._box, None)
            self._remove_answers()
        return shares

    def stop(self) -> bool:
        """Tell all ranks to end; return whether all have ended. Never raises."""
        if not self._has_begun:
            return True
        with suppress(Exception):
            put_order(self._box, None)
            deadline_s = time.monotonic() + _STOP_S
            while not self._have_all_answered():
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(_POLL_S)
            with suppress(OffloadError):
                self._remove_answers()
            return True
        return False

    def _have_all_answered(self) -> bool:
        """Read new answers; return whether each rank has ended, in one way or another."""
        for rank in self._ranks:
            if rank not in self._answers:
                text = self._box.get(_answer_key(self._number, rank))
                answer = json.loads(text) if text else {}
                if "sent" in answer or "error" in answer:
                    self._answers[rank] = answer
                elif text != self._signs[rank][0]:
                    self._signs[rank] = text, time.monotonic()
        return len(self._answers) == len(self._ranks)

    def _require_signs(self) -> None:
        """Raise an error if a rank gives no sign of life any more."""
        now_s = time.monotonic()
        for rank, (_, since_s) in self._signs.items():
            if rank not in self._answers and now_s - since_s > _SILENT_S:
                raise TierError(
                    errno.ETIMEDOUT,
                    f"rank {rank} has not answered for {_SILENT_S:g} s: has it the same "
                    "Options(tier=...)?",
                    "",
                )

    def _remove_answers(self) -> None:
        for rank in self._ranks:
            self._box.delete(_answer_key(self._number, rank))


def _require_sent(rank: int, answer: dict[str, Any]) -> None:
    """Raise the error that a rank has answered with, if it has."""
    if "error" in answer:
        text = f"rank {rank}: {answer['error']}"
        for kind, number in _KINDS.items():
            if answer["kind"] == kind.__name__:
                raise kind(number, text, "")
        raise TierError(errno.EIO, text, "")


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
            order = _read_order(box)
            if order == LAST:
                return
            if order is not None and order.number > self._done:
                self._carry_out(box, order)
                self._done = order.number
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, _POLL_S)

    def _carry_out(self, box: Mailbox, order: Order) -> None:
        """Send what an order asks for, and answer it; errors of the tier are an answer as well."""
        began_s, answer = time.monotonic(), _Answer(box, order, self._rank)
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

    def _wait_for(self, order: Order, answer: _Answer) -> Checkpoint:
        """Return the checkpoint of an order, whose seal may not have ended yet on this rank."""
        while True:
            with self._changed:
                found = self._known.get(order.generation)
                if found is not None:
                    return found
                self._changed.wait_for(lambda: self._stopped, _POLL_S)
            if self._stopped or not answer.is_wanted():
                raise UploadStoppedError(
                    0, f"generation {order.generation} is not known here", self._address.url
                )

    def _send(self, checkpoint: Checkpoint, order: Order, answer: _Answer) -> ShareSent:
        manifest = checkpoint.manifest
        references = [one for one in manifest.owners if one.owner == self._owner]
        if not references:
            raise CheckpointError(f"{checkpoint.path} has no part of owner {self._owner}")
        path = references[0].path_in(self._directory)
        with (
            given_or_local(self._backend) as storage,
            open_objects(self._address, retry_s=RETRY_S) as objects,
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
