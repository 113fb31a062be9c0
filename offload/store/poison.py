"""What a process may still do after a rename or a sync has failed: reuse nothing."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import StoreError, reason_of


class Poison:
    """Whether nobody knows any more what is on a store's drives, and since what.

    Args:
        directory: The store, for messages.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._told = False
        self.reason = ""
        """What failed; empty as long as nothing has."""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def warn_once(self) -> None:
        """Say, the first time, what follows from it; for a caller that a user's call has led to."""
        if self.reason and not self._told:
            self._told = True
            warnings.warn(
                f"{self._directory}: {self.reason}. Nobody knows what is on the drive after that, "
                "so this process reuses no slot any more, and every checkpoint takes new space. "
                "Check the drive, and start a new process",
                RuntimeWarning,
                stacklevel=3,
            )

    def require_none(self, path: str) -> None:
        """Refuse to withdraw a checkpoint once anything has failed.

        Raises:
            StoreError: Something has; names the checkpoint.
        """
        if self.reason:
            raise StoreError(
                errno.EIO,
                f"this checkpoint cannot be withdrawn any more: {self.reason}; check the drive, "
                "and start a new process",
                path,
            )

    @contextmanager
    def on_error(self, what: str) -> Iterator[None]:
        """Take note of any error in the block, which then means that `what`."""
        try:
            yield
        except BaseException as error:
            self.reason = self.reason or f"{what} ({reason_of(error)})"
            raise
