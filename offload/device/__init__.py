"""Everything that touches a device: the boundary to its memory, staging through the host, kernels.

This wing may know torch, `offload.format` and the buffers of `gds`. It knows nothing of files, of
stores or of optimizers.
"""

from offload.device.boundary import HOST, Boundary, boundary_of, is_on_device
from offload.device.compute import Compute, compute_on
from offload.device.staging import StagedTensors, Traffic

__all__ = [
    "HOST",
    "Boundary",
    "Compute",
    "StagedTensors",
    "Traffic",
    "boundary_of",
    "compute_on",
    "is_on_device",
]
