"""The other ranks of an upload, as the process sees them that writes the marker."""

from __future__ import annotations

from typing import Protocol

from offload.tiers.ranks.owner_share import ShareSent


class Others(Protocol):
    """The other ranks of an upload, each of which sends the part that it serves."""

    @property
    def bytes_sent(self) -> int:
        """Size in bytes of the objects that they have sent in this upload."""
        ...

    def begin(self, writer: str, object_bytes: int) -> None:
        """Tell all ranks to send their parts, under the name that the upload has in the tier."""
        ...

    def finish(self) -> list[ShareSent]:
        """Wait until all ranks have sent and checked their parts; return what they are.

        Raises:
            UploadStoppedError: The upload was told to end.
            RecycledError: A rank's part was recycled.
            TierError: A rank has failed, or does not answer.
        """
        ...

    def stop(self) -> bool:
        """Tell all ranks to end; return whether all have ended. Never raises."""
        ...


class NoOthers:
    """One process, which sends everything."""

    bytes_sent = 0

    def begin(self, writer: str, object_bytes: int) -> None:
        """Do nothing."""

    def finish(self) -> list[ShareSent]:
        """Return nothing."""
        return []

    def stop(self) -> bool:
        """Return True: nobody else sends anything."""
        return True
