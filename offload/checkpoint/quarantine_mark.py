"""The mark of a checkpoint that was found damaged: a file in it.

Its presence is what counts; its text is for people. `offload.store.quarantine` writes and removes
it.
"""

from __future__ import annotations

from gds import Backend
from offload.format.names import QUARANTINE_NAME

MAX_REASON_BYTES = 4000


def is_quarantined(backend: Backend, path: str) -> bool:
    """Return whether a checkpoint has the mark."""
    return backend.stat(f"{path}/{QUARANTINE_NAME}") is not None


def read_quarantine(backend: Backend, path: str) -> str | None:
    """Return why a checkpoint is quarantined; None if it is not."""
    mark = f"{path}/{QUARANTINE_NAME}"
    stat = backend.stat(mark)
    if stat is None:
        return None
    if stat.kind != "file":
        return f"{mark} is a {stat.kind}"
    file = backend.open(mark)
    try:
        data = file.read_bytes(0, min(file.size_bytes, MAX_REASON_BYTES))
    finally:
        file.close()
    text = data.decode(errors="replace").strip("\0 \n")
    # It may come from anywhere by now, and goes to terminals.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
