"""Notes between the ranks of one upload: the writer's order, and the answer of each other rank.

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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from offload.errors import OffloadError, RecycledError, TierError
from offload.store.shared import Mailbox, Serving
from offload.tiers.sending import UploadStoppedError

_SILENT_S = 60.0
"""Seconds without a sign of life after which a rank counts as lost."""

_STOP_S = 20.0
"""Longest time in seconds for which the writer waits for the other ranks to end an upload."""

POLL_S = 0.1
"""Seconds between two looks for notes."""

_SIGN_S = 1.0
"""Seconds between two signs of life."""

_ORDER = "order"


@dataclass(frozen=True, slots=True)
class ShareSent:
    """What an owner's share of a copy consists of, for the marker."""

    sizes: dict[str, int]
    """Size in bytes of each object, by name."""

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
    """Generation of the checkpoint."""

    writer: str
    """Name that the upload has in the tier."""

    object_bytes: int
    """Size in bytes up to which whole chunks are put together to one object."""


LAST = Order(-1, 0, "", 0)
"""Order that says that the writer gives no further ones."""


def read_order(box: Mailbox) -> Order | None:
    """Return the order that stands; None if there is none."""
    text = box.get(_ORDER)
    return Order(**json.loads(text)) if text else None


def put_order(box: Mailbox, order: Order | None) -> None:
    """Give an order, or withdraw the one that stands."""
    box.put(_ORDER, json.dumps(asdict(order)) if order is not None else "")


def _answer_key(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"


class Answer:
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
                    self._stands = read_order(self._box) == self._order
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
    """The shares of the other ranks in one upload, as the writer asks for them.

    Args:
        box: Mailbox of the ranks.
        serving: The part that each rank serves.
        number: Number of the upload; larger than that of every earlier one.
        generation: Generation of the checkpoint.
    """

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
        """Wait until all ranks have sent and checked their parts; return what they are.

        Args:
            look_up: Function that is called again and again, and raises an error to end early.

        Raises:
            UploadStoppedError: A rank was told to end.
            RecycledError: A rank's part was recycled.
            TierError: A rank has failed, or does not answer.
        """
        while True:
            have_all = self._have_all_answered()
            for rank, answer in sorted(self._answers.items()):
                _require_sent(rank, answer)
            if have_all:
                break
            look_up()
            self._require_signs()
            time.sleep(POLL_S)
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
                time.sleep(POLL_S)
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
