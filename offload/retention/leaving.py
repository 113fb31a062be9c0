"""Checkpoints that are leaving: those being copied to a tier, and those waiting for their turn.

Retention keeps a checkpoint that is leaving, although its policy would let it go, as long as there
is room for another slot. If there is none and the next step needs a slot, the checkpoint is
recycled, and its copy is given up. An upload never holds up a step.
"""

from __future__ import annotations

import threading
from typing import Literal

Stage = Literal["sending", "waiting"]
"""What happens to a checkpoint that is leaving: it is being sent, or waits until it can be."""


class Leaving:
    """The checkpoints of one store that are leaving. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[int, Stage] = {}
        self._has_room: bool | None = None

    def begin(self, generation: int, stage: Stage) -> None:
        """Record that a checkpoint is leaving, or that it has come to another stage."""
        with self._lock:
            self._stages[generation] = stage

    def end(self, generation: int) -> None:
        """Record that a checkpoint is not leaving any more: its copy is verified, or given up."""
        with self._lock:
            self._stages.pop(generation, None)

    def stage_of(self, generation: int) -> Stage | None:
        """Return what happens to a checkpoint; None if it is not leaving."""
        with self._lock:
            return self._stages.get(generation)

    def found_room(self, has_room: bool) -> None:
        """Record whether there was room for another slot, so that nothing had to give way."""
        with self._lock:
            self._has_room = has_room

    @property
    def has_room(self) -> bool | None:
        """Whether there was room when it was last needed; None if it has not been needed."""
        with self._lock:
            return self._has_room
