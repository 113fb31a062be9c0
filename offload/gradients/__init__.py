"""Gradients outside of the device: hooks that move them, and tensors that stand for them.

`GradientMover` moves each gradient as soon as backward has made it, and leaves an `OutsideGradient`
in ``p.grad``. A step reads the values from where they are. This wing may know
`device` and `format`.
"""

from offload.gradients.mover import GradientMover
from offload.gradients.outside import OutsideGradient, values_for_step
from offload.gradients.spilled import SpilledTensors, is_spilled

__all__ = ["GradientMover", "OutsideGradient", "SpilledTensors", "is_spilled", "values_for_step"]
