"""torch's most used classes under their own names; others go through `OffloadedOptimizer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.optimizer import OffloadedOptimizer


class AdamW(OffloadedOptimizer):
    """`torch.optim.AdamW` with its state on SSD; arguments as for `OffloadedOptimizer`."""

    def __init__(self, params: Iterable[Any], **kwargs: Any) -> None:
        super().__init__(torch.optim.AdamW, params, **kwargs)


class Adam(OffloadedOptimizer):
    """`torch.optim.Adam` with its state on SSD; arguments as for `OffloadedOptimizer`."""

    def __init__(self, params: Iterable[Any], **kwargs: Any) -> None:
        super().__init__(torch.optim.Adam, params, **kwargs)


class SGD(OffloadedOptimizer):
    """`torch.optim.SGD` with its state on SSD; arguments as for `OffloadedOptimizer`."""

    def __init__(self, params: Iterable[Any], **kwargs: Any) -> None:
        super().__init__(torch.optim.SGD, params, **kwargs)
