"""Mark of a checkpoint that was found damaged: a file in its directory.

Only the presence of the file counts; its text is for people. `offload.store.quarantine` writes and
removes it.
"""

from __future__ import annotations

from gds import Backend
from offload.format.names import QUARANTINE_NAME

MAX_REASON_BYTES = 4000
"""Largest size of the reason in bytes."""


def is_quarantined(backend: Backend, path: str) -> bool:
    """Return whether a checkpoint is marked as damaged."""
    return backend.stat(f"{path}/{QUARANTINE_NAME}") is not None


def read_quarantine(backend: Backend, path: str) -> str | None:
    """Return the reason why a checkpoint is marked as damaged; None if it is not marked."""
    mark = f"{path}/{QUARANTINE_NAME}"
    stat = backend.stat(mark)
    if stat is None:
        return None
    if stat.kind != "file":
        return f"{mark} is a {stat.kind}"
    with backend.open(mark) as file:
        data = file.read_bytes(0, min(file.size_bytes, MAX_REASON_BYTES))
    text = data.decode(errors="replace").strip("\0 \n")
    # The text is not trusted, and is shown on terminals.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
