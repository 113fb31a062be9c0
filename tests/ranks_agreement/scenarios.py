"""What the model checker explores, from small to large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tests.ranks_agreement.checker import Bounds, Explored, explore
from tests.ranks_agreement.model import Ranks
from tests.ranks_agreement.wing import Wing

_NOTHING = Bounds()


@dataclass(frozen=True)
class Scenario:
    """One exploration."""

    size: int
    seals: int = 1
    faults: int = 0
    """Number of local effects that fail: a full disk, an I/O error, a failed rename or sync."""

    beside: bool = False
    bounds: Bounds = _NOTHING
    forgets: str = ""
    skips: tuple[int, ...] = ()

    def run(self, wing: Wing) -> Explored:
        """Explore all states, and check them."""
        model = Ranks(
            wing,
            self.size,
            self.seals,
            beside=self.beside,
            forgets=self.forgets,
            skips=self.skips,
        )
        return explore(model, model.first(self.faults), self.bounds)


_SILENT = Bounds(silence=True)

SCENARIOS: Final[Mapping[str, Scenario]] = {
    "2 ranks, nothing fails": Scenario(2, seals=2),
    "2 ranks, one effect fails": Scenario(2, seals=2, faults=1),
    "2 ranks, any is stopped": Scenario(2, bounds=_SILENT),
    "2 ranks, any is stopped, one effect fails": Scenario(2, faults=1, bounds=_SILENT),
    "2 ranks, killed twice, store lost": Scenario(
        2, faults=1, bounds=Bounds(kills=2, loses_store=True)
    ),
    "2 ranks, two seals, any is stopped": Scenario(2, seals=2, faults=1, bounds=_SILENT),
    "2 ranks, beside training, one effect fails": Scenario(2, faults=1, beside=True),
    "3 ranks, one effect fails": Scenario(3, faults=1),
    "3 ranks, any subset is killed": Scenario(3, bounds=Bounds(kills=1)),
    "3 ranks, any is stopped": Scenario(3, bounds=_SILENT),
}
"""Explorations of the ordinary run: seconds each."""

LARGE: Final[Mapping[str, Scenario]] = {
    "2 ranks, beside training, any is stopped": Scenario(2, beside=True, bounds=_SILENT),
    "2 ranks, two seals beside training": Scenario(2, seals=2, beside=True),
    "2 ranks, two seals, killed twice, store lost": Scenario(
        2, seals=2, faults=1, bounds=Bounds(kills=2, loses_store=True)
    ),
    "2 ranks, beside training, killed, one effect fails": Scenario(
        2, faults=1, beside=True, bounds=Bounds(kills=1)
    ),
    "2 ranks, two seals beside training, killed": Scenario(
        2, seals=2, beside=True, bounds=Bounds(kills=1)
    ),
    "3 ranks, killed, one effect fails": Scenario(3, faults=1, bounds=Bounds(kills=1)),
    "3 ranks, killed twice, store lost": Scenario(3, bounds=Bounds(kills=2, loses_store=True)),
    "3 ranks, any is stopped, one effect fails": Scenario(3, faults=1, bounds=_SILENT),
}
"""Explorations that take up to minutes."""
