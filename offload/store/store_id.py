"""Identity of a store that has no checkpoint yet: the file ``store.json``.

Every manifest holds the identity of its store. Only a store on several drives, or with several
owners, needs the file as well. A power cut during the first seal may leave a sealed part on another
drive or node, but no checkpoint in the first directory. The part must then be recognized as the
store's own. Therefore the file is durable before any part is written.

A store may take its identity over from a copy whose checkpoint is about to arrive. If that never
happens, another history begins under the same identity. So the file also records the generation of
that checkpoint, and the new history begins after it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from gds import Backend, File
from offload.checkpoint.second_read import read_document
from offload.format.names import STORE_FILE_NAME
from offload.format.strict_json import parse_json
from offload.store.store_errors import Poison

_FORMAT = 1
_BYTES = 512

_MOST_GENERATIONS = 2**53 - 1


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What ``store.json`` records."""

    store_id: str
    """Identity, as 32 hexadecimal digits."""

    taken_over: int = 0
    """Generation of the checkpoint that was about to arrive from a copy; 0 if there was none."""


def read_store_id(backend: Backend, directory: str, *, durable: bool) -> str | None:
    """Return the identity that ``store.json`` records; see `read_identity`."""
    found = read_identity(backend, directory, durable=durable)
    return None if found is None else found.store_id


def read_identity(backend: Backend, directory: str, *, durable: bool) -> StoreIdentity | None:
    """Return what ``store.json`` records; None if the file is missing or damaged.

    If `durable`, the file is synced, because the process that wrote it may have died before its own
    sync; the caller has synced the directory. Otherwise no file is opened for writing.
    """
    path = f"{directory}/{STORE_FILE_NAME}"
    stat = backend.stat(path)
    if stat is None or stat.kind != "file" or stat.size_bytes != _BYTES:
        return None
    with backend.open(path, writable=durable) as file:
        found = _read(file)
        if durable:
            file.sync()
    return found


def _read(file: File) -> StoreIdentity | None:
    try:
        return read_document(file, _BYTES, _decode, ValueError)
    except ValueError:
        return None


def _decode(data: bytes) -> StoreIdentity:
    document = parse_json(data)
    if not isinstance(document, dict):
        raise ValueError("not the identity of a store")
    store_id, generation = document.get("store_id"), document.get("taken_over", 0)
    if not isinstance(store_id, str) or not re.fullmatch(r"[0-9a-f]{32}", store_id):
        raise ValueError("not the identity of a store")
    if type(generation) is not int or not 0 <= generation <= _MOST_GENERATIONS:
        raise ValueError("not a generation")
    return StoreIdentity(store_id, generation)


def write_store_id(
    backend: Backend, directory: str, identity: StoreIdentity, poison: Poison
) -> None:
    """Write the identity of a store to ``store.json``; durable on return."""
    path = f"{directory}/{STORE_FILE_NAME}"
    document: dict[str, object] = {"format": _FORMAT, "store_id": identity.store_id}
    if identity.taken_over:
        document["taken_over"] = identity.taken_over
    text = json.dumps(document)
    if backend.stat(path) is not None:
        backend.remove(path)  # damaged, or left by a store whose checkpoints are all gone
    with backend.create(path, _BYTES) as file:
        file.write_bytes(text.encode().ljust(_BYTES - 1) + b"\n", 0)
        with poison.fatal("a store's identity could not be made durable"):
            file.sync()
            backend.sync_dir(directory)
