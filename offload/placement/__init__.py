"""Placement of the update: measured rates, a model of the time that a step takes, and the choice.

This wing may know `stream.drives`, `update`, `device`, `model`, `format`, `options` and `gds`. It
never imports `engine`.
"""

from offload.placement.choose import PlacementChooser, decide, device_of
from offload.placement.rates import find_rates

__all__ = [
    "PlacementChooser",
    "decide",
    "device_of",
    "find_rates",
]
