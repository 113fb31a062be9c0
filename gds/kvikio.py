"""Device memory: the KvikIO backend and its buffers. Imports neither KvikIO nor CuPy before use."""

from gds._buffer_pool import BufferPool
from gds._device_buffers import DeviceBuffer, PinnedBuffer, tensor_buffer
from gds._kvikio import KvikioBackend, RegistrationRefused
from gds._kvikio_file import KvikioFile, Used

__all__ = [
    "BufferPool",
    "DeviceBuffer",
    "KvikioBackend",
    "KvikioFile",
    "PinnedBuffer",
    "RegistrationRefused",
    "Used",
    "tensor_buffer",
]
