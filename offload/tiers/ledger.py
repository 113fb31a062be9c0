"""The record of an upload that has not ended, so that another process can go on with it.

The record is a file in the store's directory ``tiers/``. It says which upload it belongs to, and is
durable before the first object is sent. The tier's own list decides which objects exist, and each
is compared with its digests again: somebody may have changed it meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from gds import Backend, LockHeldError, StorageError
from gds.contract import Lock
from offload.errors import TierError
from offload.format.names import TIERS_NAME

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class UploadKey:
    """What makes two uploads the same, so that one may go on where the other has ended."""

    url: str
    store_id: str
    generation: int
    manifest_digest: str
    train_state_digest: str

    @property
    def file_name(self) -> str:
        """Name of the record's file."""
        tier = hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()
        return f"{tier}-gen-{self.generation:08d}.upload"


class Ledger:
    """Record of one upload.

    Args:
        store: Directory of the store.
        key: Upload that is recorded.
        object_bytes: Setting by which the state is cut into objects, if the upload is a new one.
        backend: Backend of the store, for the lock.

    Raises:
        TierError: Another process carries out the same upload.
        OSError: The record cannot be written.
    """

    def __init__(self, store: str, key: UploadKey, object_bytes: int, backend: Backend) -> None:
        directory = f"{store}/{TIERS_NAME}"
        if backend.stat(directory) is None:
            backend.make_dir(directory)
        self._path = f"{directory}/{key.file_name}"
        self._lock = _lock(backend, self._path, key)
        try:
            header = _read(self._path)
            is_same = _is_of(header, key)
            self.writer = str(header["writer"]) if is_same else uuid.uuid4().hex
            """Name that the upload has in the tier."""
            self.object_bytes = int(str(header["object_bytes"])) if is_same else object_bytes
            """Setting by which the state is cut into objects."""
            self.goes_on = is_same
            """Whether an earlier process has begun the upload."""
            if not is_same:
                self._begin(key, directory, backend)
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, key: UploadKey, directory: str, backend: Backend) -> None:
        with open(self._path, "wb") as file:
            line = {
                "format": _FORMAT,
                "writer": self.writer,
                "object_bytes": self.object_bytes,
                **_described(key),
            }
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        backend.sync_dir(directory)

    def forget(self) -> None:
        """Remove the record: the upload has ended, or its checkpoint is gone."""
        with suppress(FileNotFoundError):
            os.remove(self._path)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._lock.release()


class Unrecorded:
    """An upload of which no record can be kept: if it is interrupted, the next one begins anew.

    Args:
        object_bytes: Setting by which the state is cut into objects.
    """

    def __init__(self, object_bytes: int) -> None:
        self.writer = uuid.uuid4().hex
        self.object_bytes = object_bytes
        self.goes_on = False

    def forget(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


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
        for line in file.read().split(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and value:
                return value
    return {}


class UploadRecord(NamedTuple):
    """A record of an upload that has not ended."""

    path: str
    generation: int
    writer: str


def records_in(store: str, key: UploadKey) -> list[UploadRecord]:
    """Return the records of uploads of a store to the tier of a key, oldest generation first."""
    directory = f"{store}/{TIERS_NAME}"
    beginning = key.file_name.partition("-gen-")[0]
    found = []
    for name in sorted(os.listdir(directory)):
        if name.startswith(beginning) and name.endswith(".upload"):
            path = f"{directory}/{name}"
            with suppress(FileNotFoundError):
                header = _read(path)
                generation, writer = header.get("generation"), str(header.get("writer"))
                if isinstance(generation, int) and _is_whole(header, key):
                    found.append(UploadRecord(path, generation, writer))
    return sorted(found, key=lambda one: one.generation)


@contextmanager
def claimed(backend: Backend, path: str) -> Iterator[bool]:
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


def _described(key: UploadKey) -> dict[str, object]:
    return {
        "url": key.url,
        "store_id": key.store_id,
        "generation": key.generation,
        "manifest": key.manifest_digest,
        "train_state": key.train_state_digest,
    }


def _is_of(header: Mapping[str, object], key: UploadKey) -> bool:
    expected = _described(key)
    return _is_whole(header, key) and {name: header.get(name) for name in expected} == expected


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
