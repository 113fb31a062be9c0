"""Device memory: the KvikIO backend and its buffers. KvikIO and CuPy are imported on first use."""

from gds.backends.kvikio import KvikioBackend, RegistrationRefused
from gds.backends.kvikio_file import KvikioFile, Used
from gds.buffers.device import DeviceBuffer, PageLockRefused, PinnedBuffer, tensor_buffer
from gds.buffers.pool import BufferPool

__all__ = [
    "BufferPool",
    "DeviceBuffer",
    "KvikioBackend",
    "KvikioFile",
    "PageLockRefused",
    "PinnedBuffer",
    "RegistrationRefused",
    "Used",
    "tensor_buffer",
]
