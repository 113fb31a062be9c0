"""Sending of objects to a copy: each is sent, and compared with what was meant to be sent."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gds import ALIGNMENT, Backend, Buffer
from offload.errors import DamagedError, TierError
from offload.tiers.services.objects import Objects
from offload.tiers.workers import Task, run_all

Check = Literal["read", "size"]
"""How an object is checked after it was sent: it is read back and compared with its digests, or
only its size is compared."""

Progress = Callable[[int, int], object]
"""Function that is called with the bytes done and the total."""

NUM_TRANSFERS = 4


class UploadStoppedError(TierError):
    """An upload was told to end, and has ended after a part. Another one goes on from there."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One object of an upload."""

    name: str
    nbytes: int
    send: Callable[[Buffer], None]
    """Function that sends the object. It may use the buffer."""

    check: Callable[[], None]
    """Function that reads the object back; it raises `DamagedError` if the bytes are wrong."""


class Sending:
    """Sends the objects of one copy, or of one rank's share of it.

    Args:
        objects: Objects of the tier.
        check: How objects are checked.
        num_transfers: Number of objects that are sent at a time.
        total: Size in bytes of all objects.
        progress: Function that is called with the bytes done and the total.
        is_stopped: Function that says, before each part is read or sent, whether to end there.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        check: Check,
        num_transfers: int,
        total: int,
        progress: Progress | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._objects = objects
        self._check = check
        self._num_transfers = num_transfers
        self._total = total
        self._progress = progress
        self._is_stopped = is_stopped
        self._mutex = threading.Lock()
        self._done = 0
        self.sent: dict[str, int] = {}
        """Size in bytes of each object that was sent, by name."""
        self.kept: dict[str, int] = {}
        """Size in bytes of each object that an earlier upload had sent, by name."""

    def run(
        self,
        transfers: Iterable[Transfer],
        present: Mapping[str, int],
        backend: Backend,
        most_bytes: int,
    ) -> None:
        """Send all objects, several at a time.

        Args:
            transfers: The objects, in the order in which they are begun.
            present: Size in bytes of each object that the tier has already, by name.
            backend: Backend that makes the buffers.
            most_bytes: Size in bytes of the largest object that must fit into a buffer.

        Raises:
            UploadStoppedError: The upload was told to end.
            DamagedError: The tier returns other bytes than it was sent, twice.

        Errors of transfers are raised as they are.
        """

        def tasks() -> Iterator[Task]:
            """Yield the transfers as tasks of the workers."""
            for transfer in transfers:
                is_there = present.get(transfer.name) == transfer.nbytes
                yield partial(self._carry_out, transfer, is_there)

        run_all(
            tasks(),
            self._num_transfers,
            # With the second one, two blocks of the model fit into the memory of a usual object.
            lambda: backend.allocate(most_bytes + 2 * ALIGNMENT, "host"),
            self.require_going_on,
        )

    def require_going_on(self) -> None:
        """Raise `UploadStoppedError` if the upload is to end."""
        if self._is_stopped():
            raise UploadStoppedError(errno.EINTR, "the upload was stopped", self._objects.url)

    def while_going_on(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield blocks until the upload is to end; then raise `UploadStoppedError`."""
        for block in blocks:
            self.require_going_on()
            yield block

    def _carry_out(self, transfer: Transfer, is_there: bool, buffer: Buffer) -> None:
        """Send an object and check it, unless an earlier upload has sent it already."""
        name, nbytes = transfer.name, transfer.nbytes
        self.require_going_on()
        kept = is_there and self._is_good(transfer)
        if not kept:
            transfer.send(buffer)
            if self._check == "read" and not self._is_good(transfer):
                transfer.send(buffer)
                transfer.check()  # raises if it is wrong again
        with self._mutex:
            (self.kept if kept else self.sent)[name] = nbytes
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _is_good(self, transfer: Transfer) -> bool:
        """Return whether the tier has the right bytes; True without reading for check="size"."""
        if self._check == "size":
            return True
        try:
            transfer.check()
        except DamagedError:
            return False
        return True
