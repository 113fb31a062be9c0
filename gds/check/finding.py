"""One thing that was found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "limits", "missing"]
Section = Literal["machine", "storage", "gpu"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what that means."""

    section: Section

    what: str
    """Short and stable: scripts find a finding by it."""

    value: str
    """What was found, for people."""

    verdict: Verdict
    """``ok``; ``limits`` where it keeps something from being as fast as it could be, or possible
    at all; ``missing`` where a part is not there that a better path needs."""

    why: str = ""
    """What the verdict rests on; may be empty where it is ``ok``."""

    do: str = ""
    """What to do about it; empty where it is ``ok`` or nothing can be done."""
