"""What became of checkpoints that were offered to a tier, for `stats`.

The file is for people. It is not synced, nothing is decided by it, and it may be removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from offload.format.names import TIERS_NAME

NUM_EVENTS = 32
"""Number of events that are remembered."""


@dataclass(frozen=True, slots=True)
class TierEvent:
    """What became of one checkpoint."""

    step: int
    choice: str
    """Decision: ``upload``, ``parameters``, ``keep``, ``thin`` or ``skip``."""

    reason: str
    outcome: str
    """What has happened since: empty, ``complete``, ``parameters`` if only those were sent,
    ``recycled``, ``stopped`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """State of the uploads of one optimizer."""

    url: str
    bytes_sent: int
    """Bytes of objects that were sent and checked since construction."""

    num_complete: int
    """Number of checkpoints that the tier has got since construction."""

    newest_step: int | None
    """Step of the newest checkpoint that the tier has got from this process; None if none."""

    bytes_per_s: float | None
    """Rate of the link, as measured; None if nothing was sent."""

    slowdown: float | None
    """Share by which steps beside uploads take longer, as measured; None if it is not known."""

    events: tuple[TierEvent, ...]
    """The last decisions, the newest last."""


_ENDING = ".decisions"


def write_decisions(store: str, url: str, events: Sequence[TierEvent]) -> None:
    """Write the last decisions about checkpoints of a store. Never raises."""
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest() + _ENDING
    body = {"url": url, "decisions": [asdict(event) for event in events]}
    with suppress(OSError):  # another backend than the local file system, or a full drive
        directory = f"{store}/{TIERS_NAME}"
        if not os.path.isdir(store):
            return
        os.makedirs(directory, exist_ok=True)
        beside = f"{directory}/.{name}"
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(body, file)
        os.replace(beside, f"{directory}/{name}")


def read_decisions(store: str) -> dict[str, list[TierEvent]]:
    """Return the last decisions about checkpoints of a store, by URL of the tier.

    Files that cannot be read, or are damaged, are left out.
    """
    found: dict[str, list[TierEvent]] = {}
    directory = f"{store}/{TIERS_NAME}"
    with suppress(OSError):
        for name in sorted(os.listdir(directory)):
            if name.endswith(_ENDING) and not name.startswith("."):
                with (
                    suppress(OSError, ValueError, TypeError, KeyError),
                    open(f"{directory}/{name}", encoding="utf-8") as file,
                ):
                    body = json.load(file)
                    events = [TierEvent(**event) for event in body["decisions"]]
                    found[str(body["url"])] = events
    return found
