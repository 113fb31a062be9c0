"""Poison of a store: after a failed rename or sync, a process reuses no slot any more."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import StoreError, reason_of


class Poison:
    """Records the failure that has left the content of a store's drives unknown, if there is one.

    The object is true once the store is poisoned.

    Args:
        directory: Path of the store, for messages.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._told = False
        self.reason = ""
        """Description of the first failure; empty if nothing has failed."""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def warn_once(self) -> None:
        """Warn once of the consequences of a failure; call this on the thread of a user's call."""
        if self.reason and not self._told:
            self._told = True
            warnings.warn(
                f"{self._directory}: {self.reason}. After that the content of the drive is "
                "unknown, so this process reuses no slot any more, and every checkpoint takes new "
                "space. Check the drive, and start a new process",
                RuntimeWarning,
                stacklevel=3,
            )

    def require_healthy(self, path: str) -> None:
        """Refuse to withdraw a checkpoint if the store is poisoned."""
        if self.reason:
            raise StoreError(
                errno.EIO,
                f"this checkpoint cannot be withdrawn any more: {self.reason}; check the drive, "
                "and start a new process",
                path,
            )

    @contextmanager
    def fatal(self, what: str) -> Iterator[None]:
        """Poison the store if the block raises any error."""
        try:
            yield
        except BaseException as error:
            self.reason = self.reason or f"{what} ({reason_of(error)})"
            raise
