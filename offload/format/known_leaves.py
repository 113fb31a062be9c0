"""What this process knows of the content of a slot's ``model.safetensors``.

A seal leaves out what the file holds already. It goes by digests of 1 MiB leaves, and only by
those that this process has computed itself: of bytes that it has written there, or read from there.
"""

from __future__ import annotations


class KnownLeaves:
    """Digests of the leaves of a model file, block by block.

    Args:
        inode: Of the file, so that another one under the same name is not taken for it; 0 if that
            is not known.
        readable: What `readable` says.
    """

    def __init__(self, inode: int = 0, *, readable: bool) -> None:
        self.inode = inode
        self.readable = readable
        """Whether blocks that are not known may be read back, and believed as they are read. They
        may not where there is nothing yet, nor where a write or a sync has failed: then a cache may
        hold what the drive does not."""
        self._blocks: dict[int, bytes] = {}

    def of(self, block: int) -> bytes | None:
        """Return the digests of a block's leaves, 8 bytes each; None if they are not known."""
        return self._blocks.get(block)

    def note(self, block: int, leaves: bytes) -> None:
        """Take note of what a block holds now: digests of its leaves, 8 bytes each, in order."""
        self._blocks[block] = leaves

    def forget(self, *, readable: bool) -> None:
        """Know nothing any more.

        Args:
            readable: Whether the file may be asked from now on.
        """
        self._blocks.clear()
        self.readable = readable

    def __len__(self) -> int:
        """Return how many blocks are known."""
        return len(self._blocks)
