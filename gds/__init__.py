"""Move bytes between files and buffers, as fast as the drive, and say when they are durable."""

from typing import TYPE_CHECKING

import gds._platform  # noqa: F401  (before what other systems do not have is imported)

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

if TYPE_CHECKING:  # where one of these does not fulfil the contract, the type checker says why
    from gds.backends.kvikio import KvikioBackend

    _: tuple[type[Backend], ...] = (MemoryBackend, PosixBackend, WrapperBackend, KvikioBackend)
