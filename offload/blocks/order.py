"""The order in which blocks are used, from which a guess is made about what is used next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from offload.blocks.units import Unit

Use: TypeAlias = tuple[Unit, bool, bool]
"""A use of a unit: whether it is in a backward, and whether a graph is recorded."""


class UseOrder:
    """What has followed each use the last time. A wrong guess costs time, and nothing else.

    Args:
        units: All units, in the order of the model, which is the first guess.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._next: dict[Use, Use] = {}
        self.last: Use | None = None
        """The newest use."""

    def note(self, use: Use) -> bool:
        """Record a use; return whether it is another one than the last."""
        before, self.last = self.last, use
        if before is not None and before != use:
            self._next[before] = use
        return before != use

    def guess(self) -> Unit | None:
        """Return the unit that is probably used next; None if there is no guess."""
        if self.last is None:
            return None
        if self.last in self._next:
            return self._next[self.last][0]
        unit, is_backward, _ = self.last
        number = unit.number + (-1 if is_backward else 1)
        return self._units[number] if 0 <= number < len(self._units) else None

    def is_last(self, unit: Unit) -> bool:
        """Return whether a unit was used last, and so may still be computed with."""
        return self.last is not None and self.last[0] is unit
