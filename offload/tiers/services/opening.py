"""Opening of tiers: which code serves which kind of URL."""

from __future__ import annotations

import os
from collections.abc import Iterable

from gds import Backend
from offload.tiers.services.address import TierAddress, parse_address, require_apart
from offload.tiers.services.folder_objects import FolderObjects
from offload.tiers.services.objects import Objects

DEFAULT_TIMEOUT_S = 600.0
"""Seconds after which one request is given up. An object of 32 MiB arrives in that time over a link
of 0.5 Mbit/s."""

DEFAULT_RETRY_S = 180.0
"""Seconds for which a request that failed is tried again."""


def open_objects(
    address: TierAddress | str,
    *,
    backend: Backend | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
) -> Objects:
    """Open a tier. Nothing is read or written yet."""
    if isinstance(address, str):
        address = parse_address(address)
    if address.scheme == "file":
        return FolderObjects(address.folder, backend)
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
        TierError: It is not, or the library or a setting is missing; or the tier is in a directory
            of the store, or contains one.
    """
    address = parse_address(url)
    require_apart(address, directories)
    open_objects(address).close()
