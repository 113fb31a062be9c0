"""Decisions about uploads, as ``offload ls`` shows them: a small file beside the store's records.

The file is for people. It is not synced, nothing is decided by it, and it may be removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from offload.format.names import TIERS_NAME
from offload.tiers.tier_stats import TierEvent

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
