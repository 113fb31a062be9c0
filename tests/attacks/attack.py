"""What one attack is: a file, where it goes, and how it is to be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Stage = Literal["open", "store", "read", "restore", "writer", "left", "ignored"]


@dataclass(frozen=True)
class Attack:
    """One attack on one file of a store."""

    name: str
    """Unique in its group."""

    group: str
    """What it attacks: ``manifest``, ``header``, ``train_state``, ``part``, ``small`` (files that
    are of no consequence) or ``names`` (whatever there is in the place of a file)."""

    target: str
    """Path within the store. ``{step}`` stands for the newest checkpoint, ``{part}`` for its part
    on the second drive, and ``{slot}`` for a slot that a process left behind."""

    reason: str
    """Regular expression that the message must match."""

    content: bytes | None = None
    """What is written there; None where `make` does it."""

    start_only: bool = False
    """Whether `content` only overwrites the start of the good file, whose size stays."""

    make: Callable[[Path, Path], object] | None = None
    """Puts something there that no repository can hold: called with the target, which has been
    removed, and with a directory outside of the store that holds what was there."""

    stage: Stage = "open"
    """When it is refused. ``open``: by whoever opens the checkpoint. ``store``: likewise, and
    whoever would write to the store is asked for its other directories. ``read``: when the train
    state is read. ``restore``: when an optimizer takes it over. ``writer``: by whoever would write
    to the store. ``left``: it is left alone, with a warning. ``ignored``: it counts as missing."""

    num_directories: int = 1

    @property
    def id(self) -> str:
        """What tells it from all others."""
        return f"{self.group}/{self.name}"
