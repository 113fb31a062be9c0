"""Uploads of sealed checkpoints: every object is sent, checked, and the marker is written last."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gds import ALIGNMENT, Backend, Buffer
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.opening import open_checkpoint
from offload.errors import DamagedError, RecycledError, TierError
from offload.format.names import MANIFEST_NAME, MODEL_NAME, TRAIN_STATE_NAME
from offload.tiers.catalog import copies_of
from offload.tiers.checking import Fetcher, check_model, check_state, check_whole, nothing
from offload.tiers.contents import (
    MARKER_NAME,
    OBJECT_BYTES,
    WRITER_NAME,
    StateObject,
    state_objects,
    wrong_sizes,
)
from offload.tiers.ledger import Ledger, Unrecorded, UploadKey
from offload.tiers.marker import MOST_BYTES, Identity, Marker, encode_writer
from offload.tiers.objects import Objects
from offload.tiers.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects
from offload.tiers.source import Documents, Source, whole_digest
from offload.tiers.workers import Task, run_all

Check = Literal["read", "size"]
"""How an object is checked after it was sent: it is read back and compared with its digests, or
only its size is compared."""

Progress = Callable[[int, int], object]
"""Function that is called with the bytes done and the total."""

NUM_TRANSFERS = 4


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of an upload."""

    url: str
    """URL of the copy."""

    step: int

    already_complete: bool
    """Whether the tier had a complete copy, so that nothing was sent."""

    num_sent: int
    bytes_sent: int
    """Size in bytes of the objects that this call sent."""

    num_kept: int
    bytes_kept: int
    """Size in bytes of the objects that an earlier upload of the same checkpoint had sent."""

    refuses_overwriting: bool
    """Whether the tier was seen to refuse a conditional write of an object that exists."""

    seconds: float


def push(
    path: str | os.PathLike[str],
    url: str,
    *,
    parts: PartDirectories = None,
    check: Check = "read",
    object_bytes: int = OBJECT_BYTES,
    num_transfers: int = NUM_TRANSFERS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
    progress: Progress | None = None,
    backend: Backend | None = None,
) -> PushReport:
    """Upload a checkpoint to a tier. An upload that was interrupted goes on where it ended.

    The call may run beside a process that trains in the store, and never delays a step. If training
    recycles the checkpoint meanwhile, the upload ends with `RecycledError` and removes what it has
    sent; pin the checkpoint first to prevent that.

    Args:
        path: Directory of a checkpoint, or of a store, which means its newest checkpoint.
        url: URL of the tier.
        parts: Directories of the state on several drives, as for `open_checkpoint`.
        check: How each object is checked in the tier before the copy counts as complete.
        object_bytes: Size in bytes up to which whole chunks are put together to one object.
        num_transfers: Number of objects that are sent at a time. Each takes memory for one object.
        timeout_s: Seconds after which one request is given up.
        retry_s: Seconds for which a request that failed is tried again.
        progress: Function that is called with the bytes done and the total.
        backend: Storage backend of the checkpoint; the local file system by default.

    Raises:
        TierError: The tier cannot be used. The message says what to do; what was sent stays, and
            the next call goes on from it.
        RecycledError: Training has recycled the checkpoint.
        DamagedError: The checkpoint is damaged, or the tier returns other bytes than it was sent.
        CheckpointError: There is no usable checkpoint, or several ranks made it.
        gds.StorageError: The checkpoint cannot be read.
    """
    with (
        given_or_local(backend) as storage,
        open_objects(url, timeout_s=timeout_s, retry_s=retry_s) as objects,
    ):
        with open_checkpoint(path, parts=parts, backend=storage) as opened:
            # Without its lock: see `Source`.
            checkpoint = Checkpoint(storage, opened.path, opened.manifest, parts)
        upload = Upload(
            objects,
            checkpoint,
            check=check,
            object_bytes=object_bytes,
            num_transfers=num_transfers,
            progress=progress,
        )
        return upload.run()


class Upload:
    """Upload of one checkpoint.

    Args:
        objects: Objects of the tier.
        checkpoint: Checkpoint to send; unlocked, so that training is not held up.
        check: How objects are checked.
        object_bytes: Size in bytes of objects of state.
        num_transfers: Number of objects that are sent at a time.
        progress: Function that is called with the bytes done and the total.
    """

    def __init__(
        self,
        objects: Objects,
        checkpoint: Checkpoint,
        *,
        check: Check = "read",
        object_bytes: int = OBJECT_BYTES,
        num_transfers: int = NUM_TRANSFERS,
        progress: Progress | None = None,
    ) -> None:
        self._objects = objects
        self._checkpoint = checkpoint
        self._manifest = checkpoint.manifest
        self._check = check
        self._object_bytes = object_bytes
        self._num_transfers = num_transfers
        self._progress = progress
        self._mutex = threading.Lock()
        self._done = self._total = 0
        self._sent: dict[str, int] = {}
        self._kept: dict[str, int] = {}

    def run(self) -> PushReport:
        """Send, check and complete the copy; the errors are those of `push`."""
        began_s = time.monotonic()
        with closing(Source(self._checkpoint)) as source:
            documents = source.documents()
            key = UploadKey(
                self._objects.url,
                self._manifest.store_id,
                self._manifest.generation,
                self._manifest.digest,
                whole_digest(documents.train_state),
            )
            with closing(self._open_ledger(key)) as ledger:
                url = self._find_complete(key)
                refuses = False
                if url is None:
                    refuses = self._send_all(source, documents, key, ledger)
                ledger.forget()
        return PushReport(
            url or self._url_of(ledger.writer),
            self._manifest.step,
            url is not None,
            len(self._sent),
            sum(self._sent.values()),
            len(self._kept),
            sum(self._kept.values()),
            refuses,
            time.monotonic() - began_s,
        )

    def _url_of(self, writer: str) -> str:
        identity = Identity(self._manifest.store_id, self._manifest.generation, writer)
        return f"{self._objects.url}/{identity.folder}"

    def _open_ledger(self, key: UploadKey) -> Ledger | Unrecorded:
        store = os.path.dirname(self._checkpoint.path)
        try:
            return Ledger(store, key, self._object_bytes, self._checkpoint.backend)
        except TierError:
            raise
        except OSError as error:
            warnings.warn(
                f"{store}: no record of the upload can be kept here ({error.strerror}): if it is "
                "interrupted, the next one begins anew",
                RuntimeWarning,
                stacklevel=4,
            )
            return Unrecorded(self._object_bytes)

    def _find_complete(self, key: UploadKey) -> str | None:
        """Return the URL of a complete copy of just this checkpoint; None if there is none."""
        for copy in copies_of(self._objects, key.store_id, key.generation):
            marker = copy.marker
            if (
                marker is not None
                and marker.manifest_digest == key.manifest_digest
                and marker.digests.get(TRAIN_STATE_NAME) == key.train_state_digest
            ):
                return copy.url
        return None

    def _send_all(
        self, source: Source, documents: Documents, key: UploadKey, ledger: Ledger | Unrecorded
    ) -> bool:
        """Send and check every object, and then the marker.

        Returns:
            Whether the tier refuses conditional writes of objects that exist.
        """
        identity = Identity(key.store_id, key.generation, ledger.writer)
        folder = identity.folder
        state = state_objects(self._manifest, ledger.object_bytes)
        whole = {MANIFEST_NAME: documents.manifest, TRAIN_STATE_NAME: documents.train_state}
        marker = Marker(
            identity,
            self._manifest.step,
            self._manifest.created,
            self._manifest.digest,
            ledger.object_bytes,
            {
                MODEL_NAME: self._manifest.layout.model_header.file_bytes,
                **{name: len(data) for name, data in whole.items()},
                **{one.name: one.nbytes for one in state},
            },
            {name: whole_digest(data) for name, data in whole.items()},
            dict(self._manifest.metrics),
        )
        self._total = marker.nbytes
        refuses = self._put_writer(identity)
        try:
            self._send_objects(source, whole, state, marker, ledger)
        except RecycledError:
            with suppress(TierError):  # of no use to anybody without the rest
                self._objects.delete(f"{folder}/{name}" for name in (*marker.sizes, WRITER_NAME))
            ledger.forget()
            raise
        self._require_sizes(folder, marker)
        self._put_checked(f"{folder}/{MARKER_NAME}", marker.encode())  # offers the copy
        return refuses

    def _put_writer(self, identity: Identity) -> bool:
        """Write the first object, and try whether a second, conditional write is refused."""
        name, data = (
            f"{identity.folder}/{WRITER_NAME}",
            encode_writer(identity, self._manifest),
        )
        self._put_checked(name, data)
        return not self._objects.put_new(name, data)

    def _put_checked(self, name: str, data: bytes) -> None:
        """Write a document and read it back. One of an attempt of this upload may be there.

        Raises:
            DamagedError: The tier returns other bytes.
        """
        self._objects.put_new(name, data)
        if self._objects.get(name, MOST_BYTES) == data:
            return
        self._objects.put(name, data)  # nobody else writes under this upload's name
        if self._objects.get(name, MOST_BYTES) != data:
            raise DamagedError(
                f"{self._objects.url}/{name}: the tier returns other bytes than were just written"
            )

    def _send_objects(
        self,
        source: Source,
        whole: dict[str, bytes],
        state: list[StateObject],
        marker: Marker,
        ledger: Ledger | Unrecorded,
    ) -> None:
        folder = marker.identity.folder
        present: dict[str, int] = {}
        if ledger.goes_on:
            self._objects.drop_unfinished(folder)
            present = self._objects.sizes_below(folder)
        present = {name.removeprefix(f"{folder}/"): nbytes for name, nbytes in present.items()}
        fetcher = Fetcher(self._objects, folder, self._manifest)

        def transfers() -> Iterator[_Transfer]:
            """Yield what is to be sent: parameters first."""
            yield _Transfer(
                MODEL_NAME,
                partial(self._send_model, source, f"{folder}/{MODEL_NAME}"),
                partial(check_model, fetcher, self._manifest, nothing),
            )
            for name, data in whole.items():
                digests = {name: marker.digests[name]}
                yield _Transfer(
                    name,
                    partial(self._send_whole, f"{folder}/{name}", data),
                    partial(check_whole, fetcher, marker.sizes, digests, nothing),
                )
            for one in state:
                yield _Transfer(
                    one.name,
                    partial(self._send_state, source, f"{folder}/{one.name}", one),
                    partial(check_state, fetcher, one, nothing),
                )

        def tasks() -> Iterator[Task]:
            for transfer in transfers():
                name = transfer.name
                is_there = present.get(name) == marker.sizes[name]
                yield partial(self._carry_out, transfer, marker.sizes[name], is_there, ledger)

        most = max((one.nbytes for one in state), default=0)
        storage = self._checkpoint.backend
        run_all(tasks(), self._num_transfers, lambda: storage.allocate(most + ALIGNMENT))

    def _send_model(self, source: Source, name: str, _: Buffer) -> None:
        nbytes = self._manifest.layout.model_header.file_bytes
        self._objects.put_stream(name, source.model_blocks(), nbytes)

    def _send_whole(self, name: str, data: bytes, _: Buffer) -> None:
        self._objects.put(name, data)

    def _send_state(self, source: Source, name: str, one: StateObject, buffer: Buffer) -> None:
        self._objects.put(name, source.read_object(one, buffer))

    def _carry_out(
        self,
        transfer: _Transfer,
        nbytes: int,
        is_there: bool,
        ledger: Ledger | Unrecorded,
        buffer: Buffer,
    ) -> None:
        """Send an object and check it, unless an earlier upload has sent it already."""
        name = transfer.name
        kept = is_there and (ledger.checked.get(name) == nbytes or self._is_good(transfer))
        if not kept:
            transfer.send(buffer)
            if self._check == "read" and not self._is_good(transfer):
                transfer.send(buffer)
                transfer.check()  # raises if it is wrong again
        if ledger.checked.get(name) != nbytes:
            ledger.add(name, nbytes)
        with self._mutex:
            (self._kept if kept else self._sent)[name] = nbytes
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _is_good(self, transfer: _Transfer) -> bool:
        """Return whether the tier has the right bytes; True without reading for check="size"."""
        if self._check == "size":
            return True
        try:
            transfer.check()
        except DamagedError:
            return False
        return True

    def _require_sizes(self, folder: str, marker: Marker) -> None:
        """Check that the tier lists every object with its size, before the copy is offered.

        Raises:
            TierError: An object is missing, or has another size.
        """
        found = {
            name.removeprefix(f"{folder}/"): nbytes
            for name, nbytes in self._objects.sizes_below(folder).items()
        }
        for name in [name for name in marker.sizes if name not in found]:
            size = self._objects.size(f"{folder}/{name}")  # lists of some services lag behind
            if size is not None:
                found[name] = size
        wrong = wrong_sizes(marker.sizes, found)
        if wrong:
            raise TierError(
                errno.EIO,
                f"not complete, although everything was sent: {'; '.join(wrong[:3])}. Something "
                "else removes or rewrites objects there; repeat this when it has ended",
                f"{self._objects.url}/{folder}",
            )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One object of an upload."""

    name: str
    send: Callable[[Buffer], None]
    """Function that sends the object. It may use the buffer."""

    check: Callable[[], None]
    """Function that reads the object back; it raises `DamagedError` if the bytes are wrong."""
