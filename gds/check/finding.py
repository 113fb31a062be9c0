"""Finding: one result of the examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "limits", "missing"]
Section = Literal["machine", "storage", "gpu"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One property that was examined, with its value and a verdict."""

    section: Section
    """Part of the machine that the property belongs to."""

    what: str
    """Name of the property. It is short and stable, so that scripts can search for it."""

    value: str
    """Value of the property, for people."""

    verdict: Verdict
    """``ok``; ``limits`` if the value makes some transfers slower or impossible; ``missing`` if a
    component is missing that a better path needs."""

    why: str = ""
    """Reason of the verdict, for people; may be empty if the verdict is ``ok``."""

    do: str = ""
    """Remedy, for people; empty if the verdict is ``ok`` or nothing can be done."""
