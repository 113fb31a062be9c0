"""Pool: the few buffers on a device that units have in turn.

A buffer is used again only if nothing but the pool refers to its memory. What else refers to it (a
saved tensor, a state dict) keeps it as it is; so nothing ever dangles, and no value changes under a
reader.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.blocks.places import Place
from offload.device.boundary import Event

_num_references: Any = torch._C._storage_Use_Count


def num_references(buffer: torch.Tensor) -> int:
    """Return the number of references to a buffer's memory, with those that only count."""
    count: int = _num_references(buffer.untyped_storage()._cdata)
    return count


class Pool:
    """Buffers of one size on one device.

    If references have made more buffers necessary than the limit, those are freed with them.

    Args:
        place: Where the buffers are.
        nbytes: Size of each buffer in bytes.
        limit: Number of buffers to keep.
    """

    def __init__(self, place: Place, nbytes: int, limit: int) -> None:
        self._place = place
        self._nbytes = nbytes
        self.limit = limit
        self._free: list[tuple[torch.Tensor, Event | None]] = []
        self._alone = 0
        """Number of references to a buffer that only the pool refers to."""
        self.num_made = 0
        """Buffers that the pool has, in use or free."""

    def get(self) -> tuple[torch.Tensor, Event | None]:
        """Return a buffer, and the point after which it may be overwritten (None: at once)."""
        for number, (buffer, after) in enumerate(self._free):
            if self._is_alone(buffer):
                del self._free[number]
                return buffer, after
        buffer = self._place.empty(self._nbytes)
        self._alone = num_references(buffer)
        self.num_made += 1
        return buffer, None

    def put(self, buffer: torch.Tensor, after: Event | None) -> None:
        """Take a buffer back, which may be overwritten after a point."""
        self._free.append((buffer, after))
        if self.num_made > self.limit:
            # One that something else refers to is of no use here, and lives as long as that.
            held = [n for n, (one, _) in enumerate(self._free) if not self._is_alone(one)]
            del self._free[held[0] if held else -1]
            self.num_made -= 1

    def _is_alone(self, buffer: torch.Tensor) -> bool:
        return num_references(buffer) <= self._alone
