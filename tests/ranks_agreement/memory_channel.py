"""A key-value store in memory: for ranks that are threads, or with a clock that the test moves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from offload.distributed.agreement.effects import ChannelLostError

LONG_S = 60.0
"""A limit that is only reached where time is skipped; something else ends all other waits."""


def message(kind: str, **fields: Any) -> str:
    """Return a message as ranks of this version write it."""
    return json.dumps({"version": 2, "kind": kind, **fields})


class Memory:
    """The store, and the clock of its ranks.

    With `at_work` set, time that all ranks would only wait through is skipped. So a rank that does
    not come costs a test nothing, and one that has no processor for a while is not late.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.is_lost = False
        self.at_work = 0
        """Number of threads of ranks, each of which calls `end` at last; 0 to skip no time."""
        self._skipped_s = 0.0
        self._waits: list[tuple[str, float]] = []

    def now(self) -> float:
        return time.monotonic() + self._skipped_s

    def wait(self, key: str, timeout_s: float) -> None:
        """Wait for a key; called with `changed` held."""
        wait = key, self.now() + timeout_s
        self._waits.append(wait)
        self._skip()
        self.changed.wait_for(lambda: key in self.values or self.now() >= wait[1], timeout_s)
        self._waits.remove(wait)

    def end(self) -> None:
        """Say that the thread of a rank makes no further calls."""
        with self.changed:
            self.at_work = max(0, self.at_work - 1)
            self._skip()

    def _skip(self) -> None:
        """Go to the end of the shortest wait, if nobody does anything before."""
        if not self.at_work or len(self._waits) < self.at_work:
            return
        if not any(key in self.values for key, _ in self._waits):
            self._skipped_s += max(0.0, min(until for _, until in self._waits) - self.now())
            self.changed.notify_all()


class MemoryChannel:
    """A connection of a thread, whose keys begin with the name of a start."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.is_closed = False
        self.name = ""

    def enter(self, name: str) -> None:
        self.name = f"{name}/"

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        del within_s
        with self.memory.changed:
            self._require()
            self.memory.values[self.name + key] = value
            self.memory.changed.notify_all()

    def get(self, key: str) -> str | None:
        with self.memory.changed:
            self._require()
            return self.memory.values.get(self.name + key)

    def wait(self, key: str, timeout_s: float) -> str | None:
        with self.memory.changed:
            self.memory.wait(self.name + key, timeout_s)
            self._require()
            return self.memory.values.get(self.name + key)

    def delete(self, key: str) -> None:
        with self.memory.changed:
            self._require()
            self.memory.values.pop(self.name + key, None)

    def now(self) -> float:
        return self.memory.now()

    def clone(self) -> MemoryChannel:
        made = type(self)(self.memory)
        made.name = self.name
        return made

    def close(self) -> None:
        self.is_closed = True

    def _require(self) -> None:
        if self.memory.is_lost or self.is_closed:
            raise ChannelLostError("the store is lost")


class TimedChannel(MemoryChannel):
    """A connection with a clock that only its waits move, for a rank whose calls come one by one.

    ``at`` has what others do, each at its time.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.time_s = 0.0
        self.at: list[tuple[float, Callable[[], object]]] = []

    def wait(self, key: str, timeout_s: float) -> str | None:
        until = self.time_s + timeout_s
        while key not in self.memory.values and self.at and self.at[0][0] <= until:
            when, happen = self.at.pop(0)
            self.time_s = max(self.time_s, when)
            happen()
        if key in self.memory.values:
            return self.memory.values[key]
        self.time_s = max(self.time_s, until)
        return None

    def now(self) -> float:
        return self.time_s

    def clone(self) -> TimedChannel:
        return self
