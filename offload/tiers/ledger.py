"""The record of an upload that has not ended, so that another process can go on with it.

The record is a file in the store's directory ``tiers/``. Its first line says which upload it
belongs to, and is durable before the first object is sent. Every further line names an object that
the tier has and that was checked. A line that is lost, or torn, costs a second check of an object
and nothing else. The tier's own list decides which objects exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gds import Backend, LockHeldError
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
    """Record of one upload. A ``with`` block closes it; methods may be called from any thread.

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
        self._mutex = threading.Lock()
        self._lock = _lock(backend, self._path, key)
        try:
            lines = _read(self._path)
            header, checked = (lines[0], lines[1:]) if lines else ({}, [])
            is_same = _is_of(header, key)
            self.writer = str(header["writer"]) if is_same else uuid.uuid4().hex
            """Name that the upload has in the tier."""
            self.object_bytes = int(str(header["object_bytes"])) if is_same else object_bytes
            """Setting by which the state is cut into objects."""
            self.goes_on = is_same
            """Whether an earlier process has begun the upload."""
            self.checked: dict[str, int] = {
                str(line["object"]): int(str(line["bytes"]))
                for line in (checked if is_same else [])
                if "object" in line and "bytes" in line
            }
            """Size in bytes of each object that was checked in the tier, by name."""
            self._file = open(self._path, "ab" if is_same else "wb", buffering=0)  # noqa: SIM115
            if is_same:
                self._write({})  # ends a torn line
            else:
                self._begin(key, directory, backend)
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, key: UploadKey, directory: str, backend: Backend) -> None:
        self._write(
            {
                "format": _FORMAT,
                "writer": self.writer,
                "object_bytes": self.object_bytes,
                **_described(key),
            }
        )
        os.fsync(self._file.fileno())
        backend.sync_dir(directory)

    def add(self, name: str, nbytes: int) -> None:
        """Record that the tier has an object, and that it was checked."""
        with self._mutex:
            self.checked[name] = nbytes
            self._write({"object": name, "bytes": nbytes})

    def forget(self) -> None:
        """Remove the record: the upload has ended, or its checkpoint is gone."""
        with suppress(FileNotFoundError):
            os.remove(self._path)

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        with self._mutex:
            self._file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: Mapping[str, object]) -> None:
        if not self._file.closed:
            self._file.write(b"\n" + json.dumps(line).encode() + b"\n")


class Unrecorded:
    """An upload of which no record can be kept: if it is interrupted, the next one begins anew.

    Args:
        object_bytes: Setting by which the state is cut into objects.
    """

    def __init__(self, object_bytes: int) -> None:
        self.writer = uuid.uuid4().hex
        self.object_bytes = object_bytes
        self.goes_on = False
        self.checked: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Remember that the tier has an object."""
        self.checked[name] = nbytes

    def forget(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _lock(backend: Backend, path: str, key: UploadKey) -> Lock:
    """Lock the record, and make its file if there is none.

    Raises:
        TierError: Another process, or another thread of this one, has locked it.
    """
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


def _read(path: str) -> list[dict[str, object]]:
    """Return the lines that are whole."""
    found: list[dict[str, object]] = []
    with open(path, "rb") as file:
        for line in file.read().split(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and value:
                found.append(value)
    return found


def _described(key: UploadKey) -> dict[str, object]:
    return {
        "url": key.url,
        "store_id": key.store_id,
        "generation": key.generation,
        "manifest": key.manifest_digest,
        "train_state": key.train_state_digest,
    }


def _is_of(header: Mapping[str, object], key: UploadKey) -> bool:
    expected = {"format": _FORMAT, **_described(key)}
    writer, size = header.get("writer"), header.get("object_bytes")
    return (
        {name: header.get(name) for name in expected} == expected
        and isinstance(writer, str)
        and len(writer) == 32
        and isinstance(size, int)
        and size > 0
    )
