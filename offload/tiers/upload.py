"""Uploads of sealed checkpoints: every object is sent, checked, and the marker is written last.

`push` uploads one on request; `offload.tiers.background` does so beside training.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Literal

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.opening import open_checkpoint
from offload.errors import (
    CheckpointError,
    DamagedError,
    RecycledError,
    TierError,
    TierNotFoundError,
)
from offload.format.names import LOCK_NAME, TRAIN_STATE_NAME
from offload.tiers.catalog import copies_of, sizes_in, what_is_missing
from offload.tiers.contents import (
    MARKER_NAME,
    OBJECT_BYTES,
    PARAMETERS_NAME,
    WRITER_NAME,
    is_own_name,
)
from offload.tiers.ledger import Ledger, UploadKey, clear_leftovers, open_ledger
from offload.tiers.marker import (
    MOST_BYTES,
    Identity,
    Marker,
    content_digest,
    encode_writer,
    marker_of,
)
from offload.tiers.rank_uploads import RankShares
from offload.tiers.sending import NUM_TRANSFERS, Check, Progress, Sending, Share
from offload.tiers.services.address import parse_address, require_apart
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import (
    DEFAULT_RETRY_S,
    DEFAULT_TIMEOUT_S,
    open_objects,
    require_there,
)
from offload.tiers.source import Source, open_first, open_part, whole_digest


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of an upload."""

    url: str
    """URL of the copy."""

    step: int

    already_complete: bool
    """Whether the tier had a complete copy, so that nothing was sent."""

    num_sent: int
    """Number of objects that this process sent."""

    bytes_sent: int
    """Size in bytes of the objects that this upload sent."""

    num_kept: int
    bytes_kept: int
    """Size in bytes of the objects that an earlier upload of the same checkpoint had sent."""

    refuses_overwriting: bool
    """Whether the tier was seen to refuse a conditional write of an object that exists."""

    seconds: float


Parameters = Literal["", "first", "only"]
"""Whether parameters are sent, and marked as complete, before the state; or without it."""


class Upload:
    """Upload of one checkpoint, which need not be locked, by the process that writes the marker.

    Args:
        others: Ranks that send the parts of the owners besides the first; None if this process
            sends them.
        parameters: "first" marks the parameters as complete before the state is sent; "only" sends
            no state, and another upload goes on with it. Neither is for a model in shard files.
        parameters_sent: Function that is called when the parameters are marked as complete.

    The others are those of `Sending`.
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
        is_stopped: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], object] = lambda: None,
        others: RankShares | None = None,
        parameters: Parameters = "",
        parameters_sent: Callable[[], object] = lambda: None,
    ) -> None:
        self.parameters = parameters
        self.manifest = checkpoint.manifest
        self._parameters_sent = parameters_sent
        self._is_stopped = is_stopped
        self._meanwhile = meanwhile
        self._objects = objects
        self._checkpoint = checkpoint
        self._store = os.path.dirname(checkpoint.path)
        self._check: Check = check
        self._object_bytes = object_bytes
        self._num_transfers = num_transfers
        self._progress = progress
        self._others = others
        self._sends_all = others is None and parameters != "only"
        self._sending: Sending | None = None

    @property
    def bytes_sent(self) -> int:
        """Size in bytes of the objects that this process has sent and checked so far."""
        return 0 if self._sending is None else sum([*self._sending.sent.values()])

    def run(self) -> PushReport:
        """Send, check and complete the copy; the errors are those of `push`."""
        began_s = time.monotonic()
        manifest, backend = self.manifest, self._checkpoint.backend
        with ExitStack() as resources:
            owners = self._checkpoint.owners if manifest.owners else []
            first = resources.enter_context(closing(open_first(self._checkpoint, owners)))
            parts = [
                resources.enter_context(closing(open_part(backend, owner)))
                for owner in (owners if self._sends_all else [])
            ]
            key = UploadKey(
                self._objects.url,
                manifest.store_id,
                manifest.generation,
                manifest.digest,
                whole_digest(first.documents[TRAIN_STATE_NAME]),
            )
            ledger = open_ledger(self._store, key, self._object_bytes, backend)
            resources.callback(ledger.close)
            identity = Identity(manifest.store_id, manifest.generation, ledger.writer)
            refuses = False
            try:
                require_there(self._objects, self._store)
                clear_leftovers(self._objects, self._store, key, backend)
                url = self._find_complete(key)
            except BaseException:
                if not ledger.goes_on:
                    ledger.forget()  # nothing has been sent
                raise
            if url is None:
                refuses = self._send_all([first, *parts], ledger, identity)
            if url is not None or self.parameters != "only":
                ledger.forget()
            clear_leftovers(self._objects, self._store, key, backend, manifest.generation)
        sending = self._sending
        sent, kept = (sending.sent, sending.kept) if sending else ({}, {})
        return PushReport(
            url or f"{self._objects.url}/{identity.folder}",
            manifest.step,
            url is not None,
            len(sent),
            sum(sent.values()) + (self._others.bytes_sent if self._others is not None else 0),
            len(kept),
            sum(kept.values()),
            refuses,
            time.monotonic() - began_s,
        )

    def _find_complete(self, key: UploadKey) -> str | None:
        """Return the URL of a complete copy of just this checkpoint; None if there is none."""
        content = content_digest(self.manifest)
        for copy in copies_of(self._objects, key.store_id, key.generation):
            marker = copy.marker
            if (
                marker is not None
                and content in (marker.content, marker.manifest_digest)
                and marker.digests.get(TRAIN_STATE_NAME) == key.train_state
                and not what_is_missing(self._objects, copy.folder, marker)  # removed by others
            ):
                return copy.url
        return None

    def _send_all(self, sources: Sequence[Source], ledger: Ledger, identity: Identity) -> bool:
        """Send and check every object, and then the marker.

        Returns:
            Whether the tier was seen to refuse a conditional write of an object that exists.
        """
        objects, manifest, others = self._objects, self.manifest, self._others
        folder, object_bytes = identity.folder, ledger.object_bytes
        shares = [Share(source, object_bytes) for source in sources]
        sizes = {name: nbytes for share in shares for name, nbytes in share.sizes.items()}
        digests = {name: digest for share in shares for name, digest in share.digests.items()}
        self._sending = sending = Sending(
            objects,
            folder,
            manifest,
            shares,
            self._checkpoint.backend,
            check=self._check,
            num_transfers=self._num_transfers,
            is_stopped=self._is_stopped,
            progress=self._progress,
            meanwhile=self._meanwhile,
        )
        refuses = self._put_writer(identity)
        if ledger.goes_on:
            sending.find_present()
        try:
            if self.parameters:
                first = shares[0].first
                sending.run(len(first))
                marker = marker_of(
                    identity, manifest, object_bytes, first, shares[0].digests, parameters_only=True
                )
                self._put_checked(f"{folder}/{PARAMETERS_NAME}", marker.encode())
                self._parameters_sent()
                if self.parameters == "only":
                    return refuses
            if others is not None:  # with parameters first, their state goes behind these
                others.begin(ledger.writer, object_bytes)
            sending.run()
            for theirs in others.finish(sending.look_up) if others is not None else ():
                sizes |= theirs.sizes
                digests |= theirs.digests
        except RecycledError:
            have_ended = others is None or others.stop()
            if have_ended and self._remove(folder, sizes):
                ledger.forget()  # else a later upload removes the rest
            raise
        except BaseException:
            if others is not None:
                others.stop()
            raise
        marker = marker_of(identity, manifest, object_bytes, sizes, digests)
        self._require_sizes(folder, marker)
        self._put_checked(f"{folder}/{MARKER_NAME}", marker.encode())  # offers the copy
        if PARAMETERS_NAME in sending.present or self.parameters:
            with suppress(TierError):  # it says less than the marker
                objects.delete([f"{folder}/{PARAMETERS_NAME}"])
        return refuses

    def _remove(self, folder: str, sizes: Mapping[str, int]) -> bool:
        """Remove what was sent: without the rest it is of no use. Return whether it is gone."""
        try:
            names = {f"{folder}/{name}" for name in (*sizes, PARAMETERS_NAME)}
            if not self._sends_all:
                own = filter(is_own_name, sizes_in(self._objects, folder))
                names |= {f"{folder}/{name}" for name in own}
            first = f"{folder}/{WRITER_NAME}"
            self._objects.delete([*sorted(names - {first}), first])
        except TierError:
            return False
        return True

    def _put_writer(self, identity: Identity) -> bool:
        """Write the first object, and try whether a second, conditional write is refused."""
        name, data = f"{identity.folder}/{WRITER_NAME}", encode_writer(identity, self.manifest)
        self._put_checked(name, data)
        return not self._objects.put_new(name, data)

    def _put_checked(self, name: str, data: bytes) -> None:
        """Write a document and read it back. One of an attempt of this upload may be there."""
        self._objects.put_new(name, data)
        with suppress(TierNotFoundError):  # a service may refuse for another reason than a name
            if self._objects.get(name, MOST_BYTES) == data:
                return
        self._objects.put(name, data)  # nobody else writes under this upload's name
        if self._objects.get(name, MOST_BYTES) != data:
            raise DamagedError(
                f"{self._objects.url}/{name}: the tier returns other bytes than were just written"
            )

    def _require_sizes(self, folder: str, marker: Marker) -> None:
        """Check that the tier lists every object with its size, before the copy is offered."""
        wrong = what_is_missing(self._objects, folder, marker)
        if wrong:
            raise TierError(
                errno.EIO,
                f"not complete, although everything was sent: {'; '.join(wrong[:3])}. Something "
                "else removes or rewrites objects there; repeat this when it has ended",
                f"{self._objects.url}/{folder}",
            )


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
        CheckpointError: There is no usable checkpoint, or a part of it is not seen here.
        gds.StorageError: The checkpoint cannot be read.
    """
    with (
        given_or_local(backend) as storage,
        open_objects(url, timeout_s=timeout_s, retry_s=retry_s) as objects,
    ):
        with open_checkpoint(path, parts=parts, backend=storage) as opened:
            require_apart(parse_address(url), _directories(opened))
            if opened.parameters_only:
                raise CheckpointError(
                    f"{opened.path}: parameters only, so it cannot be pushed to a tier: push a "
                    "complete checkpoint, or copy this directory"
                )
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


def _directories(checkpoint: Checkpoint) -> list[str]:
    """Return the directories of a checkpoint, and of its store if it is in one."""
    directory = os.path.dirname(os.path.abspath(checkpoint.path))
    is_store = os.path.exists(f"{directory}/{LOCK_NAME}")
    parts = [part.directory for part in checkpoint.manifest.parts]
    return [directory if is_store else checkpoint.path, *parts]
