"""Buffers for transfers: pageable host memory, page-locked host memory, and device memory.

This wing may know `contract`, `errors` and `waiting`. CuPy is imported only for device memory and
page-locked memory.
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
