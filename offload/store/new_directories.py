"""New directories of a store, made durably on file systems that keep what they are given."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from gds import Backend, StorageError
from gds.probe import describe_remote
from offload.errors import RemoteStoreError, StoreError, VolatileStoreError
from offload.store.store_errors import as_store_errors, nearest_existing

_LONGEST_PATH_BYTES = 4095
"""Largest length of a path that Linux takes."""

_BELOW_BYTES = 128
"""Largest length of what the store adds to the path of its directory.

The longest is a state array of a rank, ``/owner-<9 digits>/part-<18 digits>/<64>.safetensors``. The
file of a pin that is being made is ``/pins/.<64>.<10 digits>-<20 digits>.new``.
"""


def make_directories(
    drives: Sequence[tuple[Backend, str]], *, allow_volatile: bool, allow_remote: bool
) -> None:
    """Create missing directories and their parents, durably."""
    for backend, directory in drives:
        _require_short(directory)
        with as_store_errors(backend, directory):
            # A new directory is on the file system of its nearest existing parent.
            capabilities = backend.capabilities(nearest_existing(backend, directory))
        if capabilities.volatile and not allow_volatile:
            raise VolatileStoreError(
                errno.EINVAL,
                f"the file system ({capabilities.filesystem}) loses its content at power-off, so "
                "checkpoints there would not survive; choose a directory on a drive, or pass "
                "options=Options(allow_volatile=True), or --allow-volatile to `offload import`, "
                "if that is what you want",
                directory,
            )
        if capabilities.remote and not allow_remote:
            raise RemoteStoreError(
                errno.EINVAL,
                f"{describe_remote(capabilities.filesystem)}, so this package guarantees nothing "
                "for checkpoints there; choose a directory on a local drive, or pass "
                "options=Options(allow_remote=True), or --allow-remote to `offload import`, "
                "if that is what you want",
                directory,
            )
    for backend, directory in drives:
        with as_store_errors(backend, directory):
            _make(backend, directory)


def _require_short(directory: str) -> None:
    nbytes, most = len(os.fsencode(directory)), _LONGEST_PATH_BYTES - _BELOW_BYTES
    if nbytes > most:
        raise StoreError(
            errno.ENAMETOOLONG,
            f"this path has {nbytes} bytes, and that of a store has at most {most}, because the "
            "files in it have longer paths: choose a shorter one",
            directory,
        )


def _make(backend: Backend, directory: str) -> None:
    """Create a directory and its parents, durably. Other processes may do so at the same time."""
    missing: list[str] = []
    path = directory
    while backend.stat(path) is None:
        missing.insert(0, path)
        path = os.path.dirname(path)
    try:
        # A process that created the directory may have died before it synced the name.
        backend.sync_dir(os.path.dirname(path))
    except StorageError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
            raise
    for new in missing:
        try:
            backend.make_dir(new)
        except StorageError as error:
            made = backend.stat(new)
            if error.errno != errno.EEXIST or made is None or made.kind != "directory":
                raise
        backend.sync_dir(os.path.dirname(new))
