"""Records of uploads that have not ended, so that another process can go on with them.

A record is a file in the store's directory ``tiers/``. It says which upload it belongs to, and is
durable before the first object is sent. The tier's own list decides which objects exist, and each
is compared with its digests again: somebody may have changed it meanwhile.
"""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from gds import Backend, LockHeldError, StorageError
from gds.contract import Lock
from offload.checkpoint.listing import list_checkpoints
from offload.errors import OffloadError, TierError
from offload.format.names import TIERS_NAME
from offload.tiers.catalog import copy_of, remove_copy
from offload.tiers.marker import Identity
from offload.tiers.services.address import url_digest
from offload.tiers.services.objects import Objects

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class UploadKey:
    """What makes two uploads the same, so that one may go on where the other has ended.

    The names and the order of the fields are those of the record.
    """

    url: str
    store_id: str
    generation: int
    manifest: str
    """Digest of the manifest."""

    train_state: str
    """Digest of the train state."""

    @property
    def file_name(self) -> str:
        """Name of the record's file."""
        return f"{url_digest(self.url)}-gen-{self.generation:08d}.upload"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Record of one upload, which keeps other processes from carrying it out until `close`."""

    writer: str
    """Name that the upload has in the tier."""

    object_bytes: int

    goes_on: bool = False
    """Whether an earlier process has begun the upload."""

    path: str = ""
    """Path of the file; empty if no record can be kept."""

    lock: Lock | None = None

    def forget(self) -> None:
        """Remove the record: the upload has ended, or its checkpoint is gone."""
        if self.path:
            with suppress(FileNotFoundError):
                os.remove(self.path)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self.lock is not None:
            self.lock.release()


def open_ledger(store: str, key: UploadKey, object_bytes: int, backend: Backend) -> Ledger:
    """Go on with the record of an upload in the directory of a store, or begin one.

    If none can be written there, a warning says so. If another process carries out the same upload,
    that is a `TierError`.
    """
    try:
        return _open_ledger(f"{store}/{TIERS_NAME}", key, object_bytes, backend)
    except TierError:
        raise
    except OSError as error:
        warnings.warn(
            f"{store}: no record of the upload can be kept here ({error.strerror}): if it is "
            "interrupted, the next one begins anew",
            RuntimeWarning,
            stacklevel=4,
        )
        return Ledger(uuid.uuid4().hex, object_bytes)


def _open_ledger(directory: str, key: UploadKey, object_bytes: int, backend: Backend) -> Ledger:
    if backend.stat(directory) is None:
        backend.make_dir(directory)
    path = f"{directory}/{key.file_name}"
    lock = _lock(backend, path, key)
    try:
        header = _read(path)
        if _is_whole(header, key) and header == {**header, **asdict(key)}:
            writer, object_bytes = str(header["writer"]), int(str(header["object_bytes"]))
            return Ledger(writer, object_bytes, True, path, lock)
        ledger = Ledger(uuid.uuid4().hex, object_bytes, False, path, lock)
        with open(path, "wb") as file:
            header = {
                "format": _FORMAT,
                "writer": ledger.writer,
                "object_bytes": object_bytes,
                **asdict(key),
            }
            file.write(json.dumps(header).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        backend.sync_dir(directory)
    except BaseException:
        lock.release()
        raise
    return ledger


def _lock(backend: Backend, path: str, key: UploadKey) -> Lock:
    """Lock the record, and make its file if there is none."""
    while True:
        try:
            lock = backend.lock(path, create=True)
        except LockHeldError as error:
            raise TierError(
                error.errno or 0,
                "another process uploads this checkpoint to this tier at this moment",
                key.url,
            ) from error
        if lock.is_current():
            return lock
        lock.release()  # the upload that held it has ended, and removed the file


def _read(path: str) -> dict[str, object]:
    """Return the content of a record; nothing if it is not whole."""
    with open(path, "rb") as file:
        try:
            value = json.loads(file.read())
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _is_whole(header: Mapping[str, object], key: UploadKey) -> bool:
    """Return whether a record is one of the store and the tier of a key."""
    writer, size = header.get("writer"), header.get("object_bytes")
    return (
        (header.get("format"), header.get("url"), header.get("store_id"))
        == (_FORMAT, key.url, key.store_id)
        and isinstance(writer, str)
        and len(writer) == 32
        and isinstance(size, int)
        and size > 0
    )


_MOST = 4
"""Most records that are looked at at a time: an upload does not wait long for them."""

_MOST_RECORDS = 32
"""Most records without a checkpoint that are kept, if the tier refuses to remove objects."""


class _Record(NamedTuple):
    path: str
    generation: int
    writer: str


def clear_leftovers(
    objects: Objects, store: str, key: UploadKey, backend: Backend, newest: int = 0
) -> None:
    """Remove what failed uploads of a store have left in a tier, and their records.

    An upload that has failed goes on with the next attempt, as long as the store has its
    checkpoint. When the checkpoint is gone, nobody needs what was sent. Parameters stay until there
    are newer ones. Only uploads with a record in this store are touched, and none that is running:
    it holds the lock of its record. A call removes a few of them, and errors leave them there.
    """
    with suppress(OSError, OffloadError):
        records = [one for one in _records_in(store, key) if one.generation != key.generation]
        if not records:
            return
        checkpoints = list_checkpoints(store, backend=backend)
        if not all(one.valid for one in checkpoints):
            return  # whose checkpoint a record is of is not known
        present = {one.generation for one in checkpoints}
        dead = [one for one in records if one.generation not in present]
        older = [one for one in records if one.generation < newest and one not in dead]
        for old in dead[:-_MOST_RECORDS]:
            os.remove(old.path)
        for one in dead[-_MOST_RECORDS:][:_MOST] + older[:_MOST_RECORDS]:
            with suppress(TierError), _claimed(backend, one.path) as is_free:
                if is_free and _is_cleared(objects, key.store_id, one, newest, one in dead):
                    os.remove(one.path)


def _records_in(store: str, key: UploadKey) -> list[_Record]:
    """Return the records of uploads of a store to the tier of a key, oldest generation first."""
    directory = f"{store}/{TIERS_NAME}"
    beginning = url_digest(key.url)
    found = []
    for name in sorted(os.listdir(directory)):
        if name.startswith(beginning) and name.endswith(".upload"):
            path = f"{directory}/{name}"
            with suppress(FileNotFoundError):
                header = _read(path)
                generation, writer = header.get("generation"), str(header.get("writer"))
                if isinstance(generation, int) and _is_whole(header, key):
                    found.append(_Record(path, generation, writer))
    return sorted(found, key=lambda one: one.generation)


@contextmanager
def _claimed(backend: Backend, path: str) -> Iterator[bool]:
    """Lock a record in a block; yield False if an upload has locked it, or it is gone."""
    try:
        lock = backend.lock(path)
    except StorageError:
        yield False
        return
    try:
        yield lock.is_current()
    finally:
        lock.release()


def _is_cleared(
    objects: Objects, store_id: str, record: _Record, newest: int, is_dead: bool
) -> bool:
    """Remove what an upload has sent, if nobody needs it; return whether its record may go."""
    copy = copy_of(objects, Identity(store_id, record.generation, record.writer))
    if copy is None or copy.marker is not None:
        return is_dead or copy is not None
    if record.generation >= newest if copy.parameters is not None else not is_dead:
        return False
    remove_copy(objects, copy)
    return True
