"""I/O layer: moves bytes between files and buffers at the drive's rate, and makes them durable."""

import gds._platform  # noqa: F401  (before any import that only works on Linux)

# isort: split
from gds.backends.hybrid import HybridPolicy
from gds.backends.memory import MemoryBackend
from gds.backends.posix import PosixBackend
from gds.backends.wrapper import WrapperBackend
from gds.contract import ALIGNMENT, Backend, Buffer, Capabilities, File, IOFuture
from gds.errors import LockHeldError, ShortReadError, StorageError
from gds.opening import open_backend

__all__ = [
    "ALIGNMENT",
    "Backend",
    "Buffer",
    "Capabilities",
    "File",
    "HybridPolicy",
    "IOFuture",
    "LockHeldError",
    "MemoryBackend",
    "PosixBackend",
    "ShortReadError",
    "StorageError",
    "WrapperBackend",
    "open_backend",
]
