"""Moments of a seal on one rank, for the time that the agreement of the ranks takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from gds import File, PosixBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.reports import Report

_T = TypeVar("_T")


class TimedSeals:
    """Times of the reports of one rank's seals, and of its syncs and renames.

    Args:
        threads: Number of reads, and of writes, that the backend has in flight.
    """

    def __init__(self, threads: int) -> None:
        inner = PosixBackend(read_threads=threads, write_threads=threads)
        self.backend = _TimedBackend(inner)
        """Backend that the store must use."""
        self._reported: list[float] = []
        original = Agreement.report

        def timed(agreement: Agreement, number: int, report: Report) -> None:
            self._reported.append(time.monotonic())
            original(agreement, number, report)

        setattr(Agreement, "report", timed)  # noqa: B010  (for this process, which only measures)

    def forget(self) -> None:
        """Forget all moments so far."""
        self._reported.clear()
        self.backend.durations.clear()

    def events(self) -> dict[str, Any]:
        """Return the moment of the report, and the beginning and end of each sync and rename.

        The clock is the same for all processes of a machine.
        """
        return {"reported": self._reported, "durable": self.backend.durations}


class _TimedBackend(WrapperBackend):
    """Notes when it makes something durable or renames it."""

    def __init__(self, inner: PosixBackend) -> None:
        super().__init__(inner)
        self.durations: list[tuple[float, float]] = []

    def wrap_file(self, file: File) -> File:
        return _TimedFile(file, self)

    def sync_dir(self, path: str) -> None:
        self.timed(lambda: super(_TimedBackend, self).sync_dir(path))

    def rename(self, source: str, target: str) -> None:
        self.timed(lambda: super(_TimedBackend, self).rename(source, target))

    def exchange(self, a: str, b: str) -> None:
        self.timed(lambda: super(_TimedBackend, self).exchange(a, b))

    def timed(self, action: Callable[[], _T]) -> _T:
        started = time.monotonic()
        try:
            return action()
        finally:
            self.durations.append((started, time.monotonic()))


class _TimedFile(WrapperFile):
    def __init__(self, inner: File, backend: _TimedBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def sync(self) -> None:
        self._backend.timed(self.inner.sync)
