"""Opening of tiers, and whether one is there: an empty place is one only if something says so.

The page of a proxy, and the mount point of a drive that is not mounted, look like tiers without
copies. So each tier has an object ``TIER.json``. It is written before the first copy, and at the
latest when `restore` finds nothing, and is read back and listed. A store remembers the tiers that
it has seen: if one of them has no such object any more, that is an error.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from offload.errors import TierError, TierNotFoundError
from offload.format import document
from offload.format.names import TIERS_NAME
from offload.journal import log_event
from offload.tiers.services.address import (
    TierAddress,
    parse_address,
    require_apart,
    require_folder,
    url_digest,
)
from offload.tiers.services.folder_objects import FolderObjects
from offload.tiers.services.objects import TIER_NAME, Objects

DEFAULT_TIMEOUT_S = 600.0
"""Seconds after which one request is given up. An object of 32 MiB arrives in that time over a link
of 0.5 Mbit/s."""

DEFAULT_RETRY_S = 180.0
"""Seconds for which a request that failed is tried again."""


def open_objects(
    address: TierAddress | str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
) -> Objects:
    """Open a tier. Nothing is read or written yet."""
    if isinstance(address, str):
        address = parse_address(address)
    if address.scheme == "file":
        return FolderObjects(address.folder)
    from offload.tiers.services.cloud_objects import (
        CloudObjects,  # imports obstore, which is optional
    )

    return CloudObjects(address, timeout_s=timeout_s, retry_s=retry_s)


def require_tier(url: str, directories: Iterable[str | os.PathLike[str]]) -> None:
    """Check that a URL is that of a tier, and that the library that it needs is there.

    Nothing is read or written.

    Args:
        url: URL of the tier.
        directories: Directories of the store.

    Raises:
        TierError: It is not, or it is of copies in a tier, or the library or a setting is missing;
            or the tier is in a directory of the store, or contains one.
    """
    address = parse_address(url)
    require_folder(address)
    require_apart(address, directories)
    open_objects(address).close()


STORE = re.compile(r"[0-9a-f]{32}")
"""Names of the folders that have the copies of a store."""

_MOST_BYTES = 64 << 10


def require_there(objects: Objects, store: str) -> None:
    """Check that the tier is there. A new one is made, unless the store has seen it before."""
    memory = _memory(store, objects.url)
    known, wrong = _recall(memory), None
    seen, found = str(known.get("tier_id", "")), None
    try:
        found = read_identity(objects)
    except TierError as error:
        if error.errno != errno.EBADMSG:
            raise
        wrong = error
    if not found:
        is_empty = not any(STORE.fullmatch(name) for name in objects.folders(""))
        if is_empty and wrong is not None:
            raise wrong
        if is_empty and found is None:
            is_same_drive = objects.drive() and objects.drive() == known.get("drive")
            if seen and not is_same_drive:  # else somebody has removed the tier
                raise TierNotFoundError(
                    errno.ENOENT,
                    "this tier has been here, and nothing is left of it: is its drive mounted, and "
                    f"the endpoint right? If it is to be made anew, remove {memory}",
                    objects.url,
                )
            objects.require_place(store)
        found = _make(objects, is_empty=is_empty, is_announced=found == "" or wrong is not None)
    if found != seen:
        if seen:
            log_event(f"{objects.url}: another tier than the one that this store has seen there")
        new = {"url": objects.url, "tier_id": found, "drive": objects.drive()}
        _remember(memory, {**known, **new})


def require_place(url: str, store: str) -> None:
    """Check that a tier that a store has not seen yet may be made there. No request is made.

    If its drive is probably not mounted, that is a `TierNotFoundError`.
    """
    with open_objects(url) as objects:
        if not _recall(_memory(store, objects.url)):
            objects.require_place(store)


def damaged_copies(store: str, url: str) -> dict[str, str]:
    """Return the copies of a tier that a store has found damaged, by URL, with the reasons."""
    found = _recall(_memory(store, url)).get("damaged", {})
    return {**found} if isinstance(found, dict) else {}


def note_damaged(store: str, url: str, copy: str, reason: str) -> None:
    """Note that a copy of a tier is damaged, so that the next restore begins with an older one."""
    noted = {**damaged_copies(store, url), copy: reason}
    memory = _memory(store, url)
    _remember(memory, {**_recall(memory), "url": url, "damaged": noted})


def read_identity(objects: Objects) -> str | None:
    """Return the identity of a tier; None if it has none, and "" if somebody asks for a new one."""
    try:
        data = objects.get(TIER_NAME, _MOST_BYTES)
    except TierNotFoundError:
        return None
    if not data:
        return ""
    try:
        body = document.read(data, "the marker of a tier")
        if STORE.fullmatch(body["tier_id"]):
            return str(body["tier_id"])
    except (ValueError, KeyError, TypeError):
        pass
    raise TierError(
        errno.EBADMSG,
        "the answer is no marker of a tier: is it the page of a proxy or of a login, or the wrong "
        "endpoint?",
        f"{objects.url}/{TIER_NAME}",
    )


def _make(objects: Objects, *, is_empty: bool, is_announced: bool) -> str:
    """Make the marker of a tier, and return the identity that it has then."""
    data = document.signed({"tier_id": uuid.uuid4().hex}) + b"\n"
    if is_announced:
        objects.put(TIER_NAME, data)
    else:
        objects.put_new(TIER_NAME, data)
    found = read_identity(objects)  # perhaps of another process
    if not found or (is_empty and TIER_NAME not in objects.sizes_below("")):
        raise TierError(
            errno.EIO,
            "the marker of the tier was written, and is not there: is this the right endpoint?",
            f"{objects.url}/{TIER_NAME}",
        )
    return found


def _memory(store: str, url: str) -> str:
    """Return the path of the file that has what a store knows of a tier."""
    return f"{store}/{TIERS_NAME}/{url_digest(url)}.tier"


def _recall(memory: str) -> dict[str, Any]:
    """Return what a store knows of a tier; nothing if it does not know it."""
    try:
        with open(memory, encoding="utf-8") as file:
            found = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"tier_id": "unknown"}


def _remember(memory: str, known: Mapping[str, object]) -> None:
    """Note what a store knows of a tier; nothing happens if the store cannot be written."""
    directory = os.path.dirname(memory)
    with suppress(OSError):  # another backend than the local file system, or a full drive
        if not os.path.isdir(os.path.dirname(directory)):
            return
        os.makedirs(directory, exist_ok=True)
        beside = f"{memory}.new"
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(known, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, memory)
