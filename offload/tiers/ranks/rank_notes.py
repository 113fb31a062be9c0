"""Notes between the ranks of one upload: the writer's order, and what each rank has sent.

The writer decides. Its *order* names the checkpoint, and the name that the upload has in the tier.
Each other rank sends the part that it serves, and then reports the names, sizes and digests of its
objects. The writer completes the copy if all have reported. No rank ever waits for another one in a
step: notes are read and written by the threads that upload.

A rank that is killed reports nothing. The writer then gives the upload up, so that the copy is not
complete. What the tier has is not sent again by the next upload of the same checkpoint.
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
from offload.tiers.ranks.owner_share import ShareSent
from offload.tiers.sending import UploadStoppedError

SILENT_S = 60.0
"""Seconds without a sign of life after which a rank counts as lost."""

_STOP_S = 20.0
"""Longest time in seconds for which the writer waits for the other ranks to end an upload."""

POLL_S = 0.1
"""Seconds between two looks for notes."""

SIGN_S = 1.0
"""Seconds between two signs of life."""

_ORDER = "order"


@dataclass(frozen=True, slots=True)
class Order:
    """What the writer wants all ranks to do."""

    number: int
    """Number of the upload; every new one is larger."""

    generation: int
    """Generation of the checkpoint."""

    writer: str
    """Name that the upload has in the tier."""

    object_bytes: int
    """Size in bytes up to which whole chunks are put together to one object."""

    goes_on: bool
    """Whether to send; False ends the upload at the end of a part."""

    is_last: bool = False
    """Whether the writer gives no further orders."""

    def put(self, box: Mailbox) -> None:
        """Tell all ranks."""
        box.put(_ORDER, json.dumps(asdict(self)))


def read_order(box: Mailbox) -> Order | None:
    """Return the present order; None if there has been none."""
    text = box.get(_ORDER)
    return None if text is None else Order(**json.loads(text))


class Signs:
    """Signs of life that a rank gives while it sends; `give` may be called from any thread."""

    def __init__(self, box: Mailbox, rank: int) -> None:
        self._box = box
        self._rank = rank
        self._lock = threading.Lock()
        self._count = 0
        self._next_s = 0.0

    def give(self) -> bool:
        """Give a sign if it is time; return whether it was."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now_s = time.monotonic()
            if now_s < self._next_s:
                return False
            self._next_s = now_s + SIGN_S
            self._count += 1
            self._box.put(f"sign/{self._rank}", str(self._count))
            return True
        finally:
            self._lock.release()


def report_share(box: Mailbox, order: Order, rank: int, sent: ShareSent) -> None:
    """Report, on a rank that is not the writer, what it has sent and checked."""
    box.put(_report_key(order.number, rank), json.dumps(asdict(sent)))


def report_failure(box: Mailbox, order: Order, rank: int, error: BaseException) -> None:
    """Report, on a rank that is not the writer, that it has ended without sending everything."""
    kind = next(
        (one.__name__ for one in (RecycledError, UploadStoppedError) if isinstance(error, one)), ""
    )
    known = isinstance(error, OffloadError | OSError)  # whose texts have no credentials
    text = str(error) if known else type(error).__name__
    box.put(_report_key(order.number, rank), json.dumps({"error": text, "kind": kind}))


def _report_key(number: int, rank: int) -> str:
    return f"share/{number}/{rank}"


class RankShares:
    """The shares of the other ranks in one upload, as the writer asks for them.

    It implements `offload.tiers.upload.Others`.

    Args:
        box: Mailbox of the ranks.
        serving: The part that each rank serves.
        number: Number of the upload; larger than that of every earlier one.
        generation: Generation of the checkpoint.
        is_stopped: Function that says whether to end the upload.
        silent_s: Seconds without a sign of life after which a rank counts as lost.
    """

    def __init__(
        self,
        box: Mailbox,
        serving: Serving,
        number: int,
        generation: int,
        is_stopped: Callable[[], bool],
        *,
        silent_s: float = SILENT_S,
    ) -> None:
        self._box = box
        self._ranks = [rank for rank in range(len(serving.owners)) if rank != serving.writer]
        self._number = number
        self._generation = generation
        self._is_stopped = is_stopped
        self._silent_s = silent_s
        self._order: Order | None = None
        self._reports: dict[int, dict[str, Any]] = {}
        self._signs: dict[int, tuple[str | None, float]] = {}
        self.bytes_sent = 0
        """Size in bytes of the objects that the other ranks have sent in this upload."""

    def begin(self, writer: str, object_bytes: int) -> None:
        """Tell all ranks to send their parts; see `Others.begin`."""
        self._order = Order(self._number, self._generation, writer, object_bytes, goes_on=True)
        self._signs = {rank: (None, time.monotonic()) for rank in self._ranks}
        self._order.put(self._box)

    def finish(self) -> list[ShareSent]:
        """Wait until all ranks have sent their parts; see `Others.finish`."""
        while not self._all_have_reported():
            if self._is_stopped():
                raise UploadStoppedError(errno.EINTR, "the upload was stopped", "")
            self._require_signs()
            time.sleep(POLL_S)
        for rank, report in sorted(self._reports.items()):
            if "error" in report:
                kind, text = report.get("kind", ""), f"rank {rank}: {report['error']}"
                if kind == RecycledError.__name__:
                    raise RecycledError(errno.EAGAIN, text, "")
                if kind == UploadStoppedError.__name__:
                    raise UploadStoppedError(errno.EINTR, text, "")
                raise TierError(errno.EIO, text, "")
        shares = [ShareSent(**report) for _, report in sorted(self._reports.items())]
        self.bytes_sent = sum(share.bytes_sent for share in shares)
        self._end()
        return shares

    def stop(self) -> bool:
        """Tell all ranks to end, and wait until they have; see `Others.stop`."""
        if self._order is None:
            return True
        with suppress(Exception):
            self._put_end()
            deadline_s = time.monotonic() + _STOP_S
            while not self._all_have_reported():
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(POLL_S)
            self._end()
            return True
        return False

    def _all_have_reported(self) -> bool:
        """Read new reports; return whether there is one of each rank, or one has failed."""
        for rank in self._ranks:
            if rank not in self._reports:
                text = self._box.get(_report_key(self._number, rank))
                if text is not None:
                    self._reports[rank] = json.loads(text)
        failed = any("error" in report for report in self._reports.values())
        ends = self._order is not None and not self._order.goes_on
        return len(self._reports) == len(self._ranks) or (failed and not ends)

    def _require_signs(self) -> None:
        """Raise an error if a rank gives no sign of life any more."""
        now_s = time.monotonic()
        for rank, (last, since_s) in self._signs.items():
            if rank in self._reports:
                continue
            sign = self._box.get(f"sign/{rank}")
            if sign != last:
                self._signs[rank] = sign, now_s
            elif now_s - since_s > self._silent_s:
                raise TierError(
                    errno.ETIMEDOUT,
                    f"rank {rank} has not answered for {self._silent_s:g} s: has it the same "
                    "Options(tier=...)?",
                    "",
                )

    def _put_end(self) -> None:
        order = self._order
        if order is not None and order.goes_on:
            self._order = Order(
                order.number, order.generation, order.writer, order.object_bytes, goes_on=False
            )
            self._order.put(self._box)

    def _end(self) -> None:
        """Remove the notes of this upload."""
        with suppress(OffloadError):
            self._put_end()
            for rank in self._ranks:
                self._box.delete(_report_key(self._number, rank))


def put_last_order(box: Mailbox, number: int) -> None:
    """Tell all ranks that there are no further uploads."""
    Order(number, 0, "", 0, goes_on=False, is_last=True).put(box)
