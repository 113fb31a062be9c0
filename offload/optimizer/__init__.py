"""The optimizer that a training loop uses, with the interface of torch.optim.

This wing may know every wing below it but the programs. It never imports `integrations`, `demo` or
`cli`.
"""

from offload.optimizer.checkpointing import CheckpointName
from offload.optimizer.optimizer import OffloadedOptimizer

__all__ = ["CheckpointName", "OffloadedOptimizer"]
