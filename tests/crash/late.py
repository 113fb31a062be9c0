"""Transfers that begin late: a test sees what was not waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from gds import IOFuture, StorageError


class Late(Future[int]):
    """A transfer that begins when it is waited for."""

    def __init__(self, transfer: Callable[[], IOFuture]) -> None:
        super().__init__()
        self._transfer = transfer

    def result(self, timeout: float | None = None) -> int:
        """Make the transfer if it has not been made; return the number of bytes."""
        if not self.done():
            try:
                self.set_result(self._transfer().result())
            except StorageError as error:
                self.set_exception(error)
        return super().result(timeout)
