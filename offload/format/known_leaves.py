"""Known content of a slot's ``model.safetensors``, as digests of its 1 MiB leaves.

A seal skips what the file already holds. It relies only on digests that this process has computed
itself, from bytes that it wrote to the file or read from it.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple


class Content(NamedTuple):
    """Content of a model file, as processes name it that each know a part of it."""

    name: str = ""
    """Name that no other content has, of this or another file; empty if nothing may be known."""

    readable: bool = False
    """See `KnownLeaves.readable`."""


class KnownLeaves:
    """Digests of the leaves of a model file, block by block.

    Args:
        inode: Inode of the file, so that another file of the same name is not taken for it; 0 if
            the inode is not known.
        readable: Initial value of `readable`.
    """

    def __init__(self, inode: int = 0, *, readable: bool) -> None:
        self.inode = inode
        self.readable = readable
        """Whether unknown blocks may be read back and trusted. They may not if the file has no
        content yet, or if a write or a sync has failed: then a cache may hold what the drive does
        not."""
        self._blocks: dict[int, bytes] = {}
        self._name = uuid.uuid4().hex

    @property
    def content(self) -> Content:
        """Content of the file. It has another name whenever it has been forgotten."""
        return Content(self._name, self.readable)

    def of(self, block: int) -> bytes | None:
        """Return the digests of a block's leaves, 8 bytes each; None if they are not known."""
        return self._blocks.get(block)

    def note(self, block: int, leaves: bytes) -> None:
        """Record the content of a block: the digests of its leaves in order, 8 bytes each."""
        self._blocks[block] = leaves

    def forget(self, *, readable: bool) -> None:
        """Forget the digests of all blocks.

        Args:
            readable: Whether unknown blocks may be read back from now on.
        """
        self._blocks.clear()
        self._name = uuid.uuid4().hex
        self.readable = readable

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._blocks)
