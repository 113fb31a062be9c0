"""Uploads of sealed checkpoints: every object is sent, checked, and the marker is written last."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

from gds import Buffer
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import DamagedError, RecycledError, TierError, TierNotFoundError
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME
from offload.tiers.catalog import copies_of, what_is_missing
from offload.tiers.checking import Fetcher, check_model, check_state, check_whole, nothing
from offload.tiers.contents import (
    MARKER_NAME,
    OBJECT_BYTES,
    PARAMETERS_NAME,
    WRITER_NAME,
    StateObject,
    is_own_name,
    state_objects,
)
from offload.tiers.ledger import Ledger, Unrecorded, UploadKey
from offload.tiers.leftovers import clear_leftovers
from offload.tiers.marker import MOST_BYTES, Identity, Marker, content_digest, encode_writer
from offload.tiers.ranks.owner_share import NoOthers, Others, OwnerShare
from offload.tiers.ranks.owner_source import OwnerSource
from offload.tiers.sending import NUM_TRANSFERS, Check, Progress, Sending, Transfer
from offload.tiers.services.objects import Objects
from offload.tiers.services.presence import require_there
from offload.tiers.source import Documents, Source, whole_digest


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
    """Upload of one checkpoint, by the process that writes the marker.

    Args:
        objects: Objects of the tier.
        checkpoint: Checkpoint to send; unlocked, so that training is not held up.
        check: How objects are checked.
        object_bytes: Size in bytes of objects of state.
        num_transfers: Number of objects that are sent at a time.
        progress: Function that is called with the bytes done and the total.
        is_stopped: Function that says, before each part is read or sent, whether to end there with
            `UploadStoppedError`.
        others: Ranks that send the parts of the owners besides the first; None if this process
            sends them.
        parameters: "first" marks the parameters as complete before the state is sent; "only" sends
            no state, and another upload goes on with it. Neither is for a model in shard files.
        parameters_sent: Function that is called when the parameters are marked as complete.
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
        others: Others | None = None,
        parameters: Parameters = "",
        parameters_sent: Callable[[], object] = lambda: None,
    ) -> None:
        self._parameters = parameters
        self._parameters_sent = parameters_sent
        self._is_stopped = is_stopped
        self._objects = objects
        self._checkpoint = checkpoint
        self._manifest = checkpoint.manifest
        self._check: Check = check
        self._object_bytes = object_bytes
        self._num_transfers = num_transfers
        self._progress = progress
        self._others: Others = others or NoOthers()
        self._sends_all = others is None and parameters != "only"
        self._sending: Sending | None = None

    @property
    def bytes_sent(self) -> int:
        """Size in bytes of the objects that this process has sent and checked so far."""
        return 0 if self._sending is None else sum([*self._sending.sent.values()])

    def run(self) -> PushReport:
        """Send, check and complete the copy; the errors are those of `push`."""
        began_s = time.monotonic()
        with ExitStack() as resources:
            owners = self._checkpoint.owners if self._manifest.owners else []
            source = resources.enter_context(closing(Source(self._checkpoint, owners)))
            sources = [
                resources.enter_context(closing(OwnerSource(self._checkpoint.backend, owner)))
                for owner in (owners if self._sends_all else [])
            ]
            documents = source.documents()
            key = UploadKey(
                self._objects.url,
                self._manifest.store_id,
                self._manifest.generation,
                self._manifest.digest,
                whole_digest(documents.train_state),
            )
            ledger = resources.enter_context(closing(self._open_ledger(key)))
            refuses, sending = False, None
            try:
                url = self._look(key)
            except BaseException:
                if not ledger.goes_on:
                    ledger.forget()  # nothing has been sent
                raise
            if url is None:
                copy = _Copy(source, documents, key, ledger, sources)
                refuses, sending = self._send_all(copy)
            if url is not None or self._parameters != "only":
                ledger.forget()
            self._clear_leftovers(key, self._manifest.generation)
        sent, kept = (sending.sent, sending.kept) if sending else ({}, {})
        of_others = self._others.bytes_sent
        return PushReport(
            url or self._url_of(ledger.writer),
            self._manifest.step,
            url is not None,
            len(sent),
            sum(sent.values()) + of_others,
            len(kept),
            sum(kept.values()),
            refuses,
            time.monotonic() - began_s,
        )

    def _look(self, key: UploadKey) -> str | None:
        """Look whether the tier is there; return the URL of a complete copy, if it has one."""
        require_there(self._objects, self._store)
        self._clear_leftovers(key)
        return self._find_complete(key)

    @property
    def _store(self) -> str:
        return os.path.dirname(self._checkpoint.path)

    def _clear_leftovers(self, key: UploadKey, newest: int = 0) -> None:
        clear_leftovers(self._objects, self._store, key, self._checkpoint.backend, newest)

    def _url_of(self, writer: str) -> str:
        identity = Identity(self._manifest.store_id, self._manifest.generation, writer)
        return f"{self._objects.url}/{identity.folder}"

    def _open_ledger(self, key: UploadKey) -> Ledger | Unrecorded:
        store = self._store
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
        content = content_digest(self._manifest)
        for copy in copies_of(self._objects, key.store_id, key.generation):
            marker = copy.marker
            if (
                marker is not None
                and content in (marker.content, marker.manifest_digest)
                and marker.digests.get(TRAIN_STATE_NAME) == key.train_state_digest
                and not what_is_missing(self._objects, copy.folder, marker)  # removed by others
            ):
                return copy.url
        return None

    def _send_all(self, copy: _Copy) -> tuple[bool, Sending]:
        """Send and check every object, and then the marker."""
        ledger, manifest = copy.ledger, self._manifest
        identity = Identity(copy.key.store_id, copy.key.generation, ledger.writer)
        folder = identity.folder
        state = state_objects(manifest, ledger.object_bytes)
        shares = [OwnerShare(source, ledger.object_bytes) for source in copy.owners]
        whole = {MANIFEST_NAME: copy.documents.manifest}
        whole[TRAIN_STATE_NAME] = copy.documents.train_state
        sizes = {
            copy.source.model.name: copy.source.model.nbytes,
            **{name: len(data) for name, data in whole.items()},
            **{one.name: one.nbytes for one in state},
        }
        digests = {name: whole_digest(data) for name, data in whole.items()}
        for share in shares:
            sizes |= share.sizes
            digests |= share.digests
        self._sending = sending = Sending(
            self._objects,
            check=self._check,
            num_transfers=self._num_transfers,
            total=sum(sizes.values()),
            progress=self._progress,
            is_stopped=self._is_stopped,
        )
        refuses = self._put_writer(identity)
        present = self._present(folder) if ledger.goes_on else {}
        try:
            if not self._parameters:
                self._others.begin(ledger.writer, ledger.object_bytes)
            transfers = self._transfers(copy, folder, whole, digests, state, shares, sending)
            most = max([one.nbytes for one in state] + [s.most_bytes for s in shares], default=0)
            backend = self._checkpoint.backend
            if self._parameters:
                first = islice(transfers, 1 + len(whole))
                sending.run(first, present, backend, 0)
                sent = {name: sizes[name] for name in (copy.source.model.name, *whole)}
                own = {name: digests[name] for name in whole}
                marker = self._marker(identity, ledger, sent, own, parameters_only=True)
                self._put_checked(f"{folder}/{PARAMETERS_NAME}", marker.encode())
                self._parameters_sent()
                if self._parameters == "only":
                    return refuses, sending
                self._others.begin(ledger.writer, ledger.object_bytes)  # their state goes behind
            sending.run(transfers, present, backend, most)
            for theirs in self._others.finish():
                sizes |= theirs.sizes
                digests |= theirs.digests
        except RecycledError:
            if self._others.stop() and self._remove(folder, sizes):
                ledger.forget()  # else a later upload removes the rest
            raise
        except BaseException:
            self._others.stop()
            raise
        marker = self._marker(identity, ledger, sizes, digests)
        self._require_sizes(folder, marker)
        self._put_checked(f"{folder}/{MARKER_NAME}", marker.encode())  # offers the copy
        if PARAMETERS_NAME in present or self._parameters:
            with suppress(TierError):  # it says less than the marker
                self._objects.delete([f"{folder}/{PARAMETERS_NAME}"])
        return refuses, sending

    def _marker(
        self,
        identity: Identity,
        ledger: Ledger | Unrecorded,
        sizes: Mapping[str, int],
        digests: Mapping[str, str],
        *,
        parameters_only: bool = False,
    ) -> Marker:
        manifest = self._manifest
        return Marker(
            identity,
            manifest.step,
            manifest.created,
            manifest.digest,
            ledger.object_bytes,
            dict(sizes),
            dict(digests),
            dict(manifest.metrics),
            content_digest(manifest),
            parameters_only,
        )

    def _present(self, folder: str) -> dict[str, int]:
        """Return the objects that an earlier upload has sent, by name."""
        self._objects.drop_unfinished(folder)
        listed = self._objects.sizes_below(folder)
        return {name.removeprefix(f"{folder}/"): nbytes for name, nbytes in listed.items()}

    def _remove(self, folder: str, sizes: Mapping[str, int]) -> bool:
        """Remove what was sent: without the rest it is of no use. Return whether it is gone."""
        try:
            names = {f"{folder}/{name}" for name in (*sizes, PARAMETERS_NAME)}
            if not self._sends_all:
                names |= {
                    name
                    for name in self._objects.sizes_below(folder)
                    if is_own_name(name.removeprefix(f"{folder}/"))
                }
            first = f"{folder}/{WRITER_NAME}"
            self._objects.delete([*sorted(names - {first}), first])
        except TierError:
            return False
        return True

    def _put_writer(self, identity: Identity) -> bool:
        """Write the first object, and try whether a second, conditional write is refused."""
        name, data = (
            f"{identity.folder}/{WRITER_NAME}",
            encode_writer(identity, self._manifest),
        )
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

    def _transfers(
        self,
        copy: _Copy,
        folder: str,
        whole: Mapping[str, bytes],
        digests: Mapping[str, str],
        state: Sequence[StateObject],
        shares: Sequence[OwnerShare],
        sending: Sending,
    ) -> Iterator[Transfer]:
        """Yield what this process sends: parameters first."""
        objects, source = self._objects, copy.source
        fetcher = Fetcher(objects, folder, self._manifest)
        model = source.model

        def send_model(buffer: Buffer) -> None:
            """Send the model file."""
            blocks = sending.while_going_on(source.model_blocks(buffer))
            objects.put_stream(f"{folder}/{model.name}", blocks, model.nbytes)

        def send_whole(name: str, _: Buffer) -> None:
            """Send an object whose bytes are in memory."""
            objects.put(f"{folder}/{name}", whole[name])

        def send_state(one: StateObject, buffer: Buffer) -> None:
            """Send an object of state."""
            objects.put(f"{folder}/{one.name}", source.read_object(one, buffer))

        yield Transfer(
            model.name,
            model.nbytes,
            send_model,
            partial(check_model, fetcher, model, nothing),
        )
        for name, data in whole.items():
            yield Transfer(
                name,
                len(data),
                partial(send_whole, name),
                partial(check_whole, fetcher, {name: len(data)}, {name: digests[name]}, nothing),
            )
        for one in state:
            yield Transfer(
                one.name,
                one.nbytes,
                partial(send_state, one),
                partial(check_state, fetcher, one, nothing),
            )
        for share in shares:
            yield from share.transfers(objects, folder, fetcher, sending)

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


@dataclass(frozen=True, slots=True)
class _Copy:
    """What an upload sends."""

    source: Source
    documents: Documents
    key: UploadKey
    ledger: Ledger | Unrecorded
    owners: Sequence[OwnerSource]
    """Parts of the owners besides the first that this process sends."""
