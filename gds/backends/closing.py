"""Base of files and backends: a ``with`` block closes them at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """An object with a `close` that a ``with`` block calls at its end, also after an error."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the object holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
