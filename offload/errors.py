"""The errors of `offload`. Each also is the builtin that a caller would catch.

A message says what was attempted, where (path, parameter, byte offset), what was found and what
was expected, and what to do next.
"""

from __future__ import annotations

from gds import StorageError
from gds.errors import message_of


class OffloadError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedOptimizerError(OffloadError, TypeError):
    """The wrapped optimizer class or one of its flags cannot be streamed chunk by chunk."""


class UnsupportedParameterError(OffloadError, TypeError):
    """A parameter or its gradient has a type or layout that the streamer cannot update."""


class ProcessGroupError(OffloadError, RuntimeError):
    """Several processes train one model, or `model=` is wrapped for that."""


class _SaysAllError(OSError):
    """An error whose own message says all that its number would."""

    def __str__(self) -> str:
        return message_of(self)


class StoreError(OffloadError, _SaysAllError):
    """The store as a whole cannot be used as asked."""


class StoreLockedError(StoreError):
    """Another process, or another optimizer in this one, is writing to the store."""


class StoreBusyError(StoreError):
    """Readers hold every checkpoint that could be recycled."""


class RecycledError(StoreBusyError):
    """A training process has recycled a checkpoint while it was looked at; it was not damaged."""


class StoreFullError(StoreError):
    """The file system has no room for what the retention policy, or an export, will need."""


class UnreadableError(StoreError, StorageError):
    """Something of a store could not be read. That says nothing about what it holds."""

    def __init__(self, number: int, message: str, path: str) -> None:
        OSError.__init__(self, number, message, path)  # the message says all that it needs to
        self.offset = None


class SlotFullError(StoreFullError, StorageError):
    """The file system has no room for the slot that the next generation needs, at this moment."""

    def __init__(self, number: int, message: str, path: str) -> None:
        OSError.__init__(self, number, message, path)  # the message says all that it needs to
        self.offset = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.filename)


class UnwritableError(StoreError, StorageError):
    """This user may not write to the store, or nobody may: it is mounted read-only."""

    def __init__(self, number: int, message: str, path: str) -> None:
        OSError.__init__(self, number, message, path)  # the message says all that it needs to
        self.offset = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.filename)


class UnreliableReadError(StoreError):
    """What is whole on the drive does not arrive in memory unchanged: the machine is at fault."""


class PinError(OffloadError, ValueError):
    """A pin cannot be made, or something cannot be done because of one; names it."""


class MetricError(OffloadError, ValueError):
    """What was given as a metric is not a number with a name, or no checkpoint has that metric."""


class VolatileStoreError(StoreError):
    """The directory is on a file system that forgets at power-off."""


class RemoteStoreError(StoreError):
    """The directory is on a file system that another machine, or a program, serves."""


class CheckpointError(OffloadError, ValueError):
    """A checkpoint is damaged, incomplete, or not one at all."""


class DamagedError(CheckpointError):
    """Content of a checkpoint, or of the state in training, is not what was written."""


class ManifestError(CheckpointError):
    """A manifest cannot be read: damaged, of another version, or not a manifest."""


class CheckpointNotFoundError(OffloadError, _SaysAllError, FileNotFoundError):
    """There is no such checkpoint in the store."""


class MismatchError(OffloadError, ValueError):
    """The model or optimizer differs from what the checkpoint was made with."""


class NotRestoredError(OffloadError, RuntimeError):
    """The store holds checkpoints, and nobody has said whether to resume or to start over."""


class SealError(OffloadError, RuntimeError):
    """Sealing a checkpoint failed; the checkpoints made before it are untouched."""


class BrokenOptimizerError(OffloadError, RuntimeError):
    """An earlier failure left the working state torn; restore a checkpoint to go on."""


class OverlapError(OffloadError, RuntimeError):
    """Something that a step which runs beside backward cannot do; names what can."""


def reason_of(error: BaseException) -> str:
    """Return what an error says, for another message: its name if it says nothing."""
    return str(error) or type(error).__name__
