"""Move bytes between files and buffers, as fast as the drive, and say when they are durable."""

from typing import TYPE_CHECKING

import gds._platform  # noqa: F401  (before what other systems do not have is imported)

# isort: split
from gds._backend import ALIGNMENT, Backend, Buffer, Capabilities, File, IOFuture
from gds._errors import LockHeldError, ShortReadError, StorageError
from gds._hybrid import HybridPolicy
from gds._memory import MemoryBackend
from gds._open import open_backend
from gds._posix import PosixBackend
from gds._wrapper import WrapperBackend

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
    from gds._kvikio import KvikioBackend

    _: tuple[type[Backend], ...] = (MemoryBackend, PosixBackend, WrapperBackend, KvikioBackend)
