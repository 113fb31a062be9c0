"""Backends, which move bytes between files and buffers: through the kernel, in memory, by KvikIO.

This wing may know `buffers`, `check`, `contract`, `errors`, `libc`, `paths`, `probe` and `waiting`.
KvikIO itself is imported only when its backend is made.
"""

from gds.backends.hybrid import HybridPolicy
from gds.backends.memory import MemoryBackend
from gds.backends.posix import PosixBackend
from gds.backends.wrapper import WrapperBackend, WrapperFile

__all__ = [
    "HybridPolicy",
    "MemoryBackend",
    "PosixBackend",
    "WrapperBackend",
    "WrapperFile",
]
