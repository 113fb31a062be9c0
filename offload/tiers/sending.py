"""Transfers by a few threads, and the sending of copies, whose objects are read and compared."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from gds import ALIGNMENT, Backend, Buffer
from gds.waiting import start
from offload.errors import DamagedError, TierError
from offload.format.manifest import Manifest
from offload.tiers.checking import Fetcher, check_model, check_whole, nothing
from offload.tiers.contents import ModelObject, StateObject, state_objects
from offload.tiers.services.objects import Objects
from offload.tiers.source import Source, whole_digest

Task: TypeAlias = Callable[[Buffer], None]
"""One transfer. It is given a buffer, which belongs to it until it returns."""

_POLL_S = 0.1
"""Seconds after which the waiting thread looks whether it was interrupted."""

_LAST_WAIT_S = 1.0
"""Seconds that an error or an interrupt waits for transfers in progress. Threads whose servers do
not answer are left behind: they end with their request, and do nothing more."""


def run_all(
    tasks: Iterable[Task],
    num_workers: int,
    make_buffer: Callable[[], Buffer],
    require_going_on: Callable[[], None] = lambda: None,
) -> None:
    """Carry out tasks in their order, several at a time, until one fails, whose error is raised."""
    work = _Work(iter(tasks), make_buffer)
    threads = [
        threading.Thread(target=work.run, name=f"offload tier {number}", daemon=True)
        for number in range(num_workers)
    ]
    try:
        start(*threads)
        for _ in threads:
            while True:
                try:
                    error = work.ended.get(timeout=_POLL_S)
                    break
                except queue.Empty:
                    require_going_on()
            if error is not None:
                raise error
    finally:
        work.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_LAST_WAIT_S)


class _Work:
    """Tasks that the threads share."""

    def __init__(self, tasks: Iterable[Task], make_buffer: Callable[[], Buffer]) -> None:
        self._tasks = iter(tasks)
        self._make_buffer = make_buffer
        self._lock = threading.Lock()
        self._stopped = False
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """For each thread that has ended, its error or None."""

    def run(self) -> None:
        """Carry out tasks until there are none, or until one has failed."""
        try:
            buffer: Buffer | None = None
            while (task := self._next()) is not None:
                if buffer is None:
                    buffer = self._make_buffer()
                task(buffer)
        except BaseException as error:  # noqa: BLE001  (raised by the waiting thread)
            self.stop()
            self.ended.put(error)
        else:
            self.ended.put(None)

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)

    def stop(self) -> None:
        """Begin no further task."""
        with self._lock:
            self._stopped = True


Check = Literal["read", "size"]
"""How an object is checked after it was sent: it is read back and compared with its digests, or
only its size is compared."""

Progress = Callable[[int, int], object]
"""Function that is called with the bytes done and the total."""

NUM_TRANSFERS = 4


class UploadStoppedError(TierError):
    """An upload was told to end, and has ended after a part. Another one goes on from there."""


class Tally:
    """Bytes that all threads have moved or checked together, of which progress is reported."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._lock = threading.Lock()
        self.done = 0

    def add(self, nbytes: int) -> None:
        """Count bytes, and report them."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)


class Share:
    """The objects that one owner of state has in a copy."""

    def __init__(self, source: Source, object_bytes: int) -> None:
        self.source = source
        self.state = state_objects(source.sealed, object_bytes)
        model = {} if source.model is None else {source.model.name: source.model.nbytes}
        documents = {name: len(data) for name, data in source.documents.items()}
        is_of_first = isinstance(source.sealed, Manifest)
        self.first = {**model, **documents} if is_of_first else {**documents, **model}
        """Size in bytes of each object that is sent before the state, by name, in their order."""
        self.sizes = {**self.first, **{one.name: one.nbytes for one in self.state}}
        self.digests = {name: whole_digest(data) for name, data in source.documents.items()}
        """Digest of each object that neither manifest nor table has digests for, by name."""


class _Transfer(NamedTuple):
    """One object of an upload: how it is sent, and read back and compared."""

    name: str
    nbytes: int
    send: Callable[[Buffer], None]
    check: Callable[[], None]


class Sending:
    """Sends shares of one copy in their order, and compares each object with what was to be sent.

    Args:
        is_stopped: Function that says, before each part is read or sent, whether to end there with
            `UploadStoppedError`.
        meanwhile: Function that sends something more urgent, and does nothing most of the time. The
            thread that waits for the transfers calls it. As long as it works, they begin no part.
    """

    def __init__(
        self,
        objects: Objects,
        folder: str,
        manifest: Manifest,
        shares: Sequence[Share],
        backend: Backend,
        *,
        check: Check,
        num_transfers: int,
        is_stopped: Callable[[], bool],
        progress: Progress | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self._objects = objects
        self._folder = folder
        self._fetcher = Fetcher(objects, folder, manifest)
        self._backend = backend
        self._check = check
        self._num_transfers = num_transfers
        self._is_stopped = is_stopped
        self._meanwhile = meanwhile
        self._may_begin = threading.Event()
        self._may_begin.set()
        self._left = (transfer for share in shares for transfer in self._transfers(share))
        self._tally = Tally(progress, sum(sum(share.sizes.values()) for share in shares))
        self._most_bytes = max((one.nbytes for share in shares for one in share.state), default=0)
        self.present: dict[str, int] = {}
        """Size in bytes of each object that the tier had before, by name."""
        self.sent: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        """Size in bytes of each object that an earlier upload had sent, by name."""

    def find_present(self, below: str = "") -> None:
        """Find the objects that an earlier upload has sent, in the copy or in one folder of it."""
        folder = f"{self._folder}/{below}".rstrip("/")
        self._objects.drop_unfinished(folder)
        listed = self._objects.sizes_below(folder)
        self.present = {
            name.removeprefix(f"{self._folder}/"): nbytes for name, nbytes in listed.items()
        }

    def run(self, num_objects: int | None = None) -> None:
        """Send objects that are left, all or some of which none is state, several at a time."""
        most_bytes = self._most_bytes if num_objects is None else 0
        run_all(
            (partial(self._carry_out, one) for one in islice(self._left, num_objects)),
            self._num_transfers,
            # With the second one, two blocks of the model fit into the memory of a usual object.
            lambda: self._backend.allocate(most_bytes + 2 * ALIGNMENT, "host"),
            self.look_up,
        )

    def look_up(self) -> None:
        """Look, on the waiting thread, whether to end, or to send something more urgent first."""
        self._require_going_on()
        self._may_begin.clear()
        try:
            self._meanwhile()
        finally:
            self._may_begin.set()
        self._require_going_on()

    def _require_turn(self) -> None:
        """Wait, before a part is read or sent, until nothing is more urgent."""
        while not self._may_begin.wait(_POLL_S) and not self._is_stopped():
            pass
        self._require_going_on()

    def _require_going_on(self) -> None:
        if self._is_stopped():
            raise UploadStoppedError(errno.EINTR, "the upload was stopped", self._objects.url)

    def _transfers(self, share: Share) -> Iterator[_Transfer]:
        """Yield what is to be sent of a share: its state after everything else."""
        source, model, fetcher = share.source, share.source.model, self._fetcher
        for name, nbytes in share.first.items():
            if model is not None and name == model.name:
                send = partial(self._send_model, source, model)
                check = partial(check_model, fetcher, model, nothing)
            else:
                send = partial(self._send_document, name, source.documents[name])
                digests = {name: share.digests[name]}
                check = partial(check_whole, fetcher, {name: nbytes}, digests, nothing)
            yield _Transfer(name, nbytes, send, check)
        for one in share.state:
            send = partial(self._send_state, source, one)
            check = partial(fetcher.check, one.name, 0, one.chunks, nothing)
            yield _Transfer(one.name, one.nbytes, send, check)

    def _send_model(self, source: Source, model: ModelObject, buffer: Buffer) -> None:
        def blocks() -> Iterator[memoryview]:
            for block in source.model_blocks(model, buffer):
                self._require_turn()
                yield block

        self._objects.put_stream(f"{self._folder}/{model.name}", blocks(), model.nbytes)

    def _send_document(self, name: str, data: bytes, _: Buffer) -> None:
        self._objects.put(f"{self._folder}/{name}", data)

    def _send_state(self, source: Source, one: StateObject, buffer: Buffer) -> None:
        self._objects.put(f"{self._folder}/{one.name}", source.read_object(one, buffer))

    def _carry_out(self, transfer: _Transfer, buffer: Buffer) -> None:
        """Send an object and check it, unless an earlier upload has sent it already."""
        name, nbytes = transfer.name, transfer.nbytes
        self._require_turn()
        kept = self.present.get(name) == nbytes and self._is_good(transfer)
        if not kept:
            transfer.send(buffer)
            if self._check == "read" and not self._is_good(transfer):
                transfer.send(buffer)
                transfer.check()  # raises if it is wrong again
        (self.kept if kept else self.sent)[name] = nbytes
        self._tally.add(nbytes)

    def _is_good(self, transfer: _Transfer) -> bool:
        """Return whether the tier has the right bytes; True without reading for check="size"."""
        if self._check == "size":
            return True
        try:
            transfer.check()
        except DamagedError:
            return False
        return True
