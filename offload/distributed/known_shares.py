"""What a rank knows of the model files that it has written its share of.

The writer of the store names the content of each slot's model file, and says so when it grants the
slot. After a seal that was aborted, or if another file has taken the place of the file, the name is
another one. So a rank believes only what it has written or read under the present name.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from offload.format.digests import Content, KnownLeaves
from offload.format.shares.file_shares import FileShare

_MOST: Final = 256
"""Number of files that are remembered; each takes 8 bytes for each MiB of the share."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """The model file that all ranks write for a slot."""

    folder: str = ""
    """Name of the directory that has it, below the first directory; empty if it is not known."""

    content: Content = field(default_factory=Content)
    """Its content, as the writer has named it."""


class KnownShares:
    """Known content of model files, as far as it is this rank's share. For one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[FileShare, KnownLeaves]] = OrderedDict()

    def of(self, content: Content, share: FileShare) -> KnownLeaves:
        """Return what is known of a file's content; the caller adds what it writes, by piece.

        Args:
            content: Content of the file.
            share: What this rank writes of the file. Nothing is known of another share.
        """
        if not content.name:
            return KnownLeaves(readable=False)
        found = self._known.get(content.name)
        if found is None or found[0] is not share:
            found = share, KnownLeaves(readable=content.readable)
        self._known[content.name] = found
        self._known.move_to_end(content.name)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return found[1]

    def forget(self, content: Content) -> None:
        """Forget a file, because a seal has failed: what was written may be in a cache only."""
        self._known.pop(content.name, None)
