"""Memory that transfers can use: of the host, page-locked, and of a device.

This wing may know `contract` and `errors`, and imports CuPy only when memory of a device is asked
for.
"""

from gds.buffers.device import DeviceBuffer, PinnedBuffer, tensor_buffer
from gds.buffers.host import HostBuffer
from gds.buffers.pool import BufferPool

__all__ = [
    "BufferPool",
    "DeviceBuffer",
    "HostBuffer",
    "PinnedBuffer",
    "tensor_buffer",
]
