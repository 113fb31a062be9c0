"""Copies that have parameters only, which one process has sent, and removes again."""

from __future__ import annotations

import os
from contextlib import suppress

from offload.errors import TierError
from offload.format.names import TIERS_NAME
from offload.tiers.catalog import list_copies
from offload.tiers.ledger import UploadKey
from offload.tiers.pruning import remove_copy
from offload.tiers.services.address import parse_address
from offload.tiers.services.objects import Objects


class ParameterCopies:
    """Copies that have parameters only, and that nothing is added to any more."""

    def __init__(self) -> None:
        self._urls: list[str] = []

    def add(self, url: str) -> None:
        """Remember a copy."""
        self._urls.append(url)

    def forget(self, generation: int) -> None:
        """Forget the copy of a checkpoint, whose state is now to be sent."""
        self._urls = [url for url in self._urls if f"/gen-{generation:08d}/" not in url]

    def remove_older(self, objects: Objects, url: str, store: str) -> None:
        """Remove those that are older than a copy. Errors of the tier leave them there.

        Args:
            objects: Objects of the tier.
            url: URL of the copy that has just got its parameters, or everything.
            store: Directory of the store, which has the records of these uploads.
        """
        newest = parse_address(url).copy
        for old in [*self._urls]:
            address = parse_address(old)
            if address.copy.split("/")[1] >= newest.split("/")[1]:
                continue
            self._urls.remove(old)
            with suppress(TierError):
                for copy in list_copies(objects, address):
                    if copy.marker is None:
                        remove_copy(objects, copy)
            store_id, generation, _ = address.copy.split("/")
            number = int(generation.removeprefix("gen-"))
            key = UploadKey(objects.url, store_id, number, "", "")
            with suppress(OSError):
                os.remove(f"{store}/{TIERS_NAME}/{key.file_name}")
