"""Errors of `offload`; each is also a subclass of the builtin error that a caller would catch.

A message names the attempted operation, the place (path, parameter, byte offset), the value found,
the value expected, and the next thing to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gds.errors import OffloadError as OffloadError
from gds.errors import StorageError as StorageError
from gds.errors import message_of


class UnsupportedOptimizerError(OffloadError, TypeError):
    """The wrapped optimizer class or one of its flags cannot be streamed chunk by chunk."""


class UnsupportedParameterError(OffloadError, TypeError):
    """A parameter or its gradient has a type or layout that the streamer cannot update."""


class ProcessGroupError(OffloadError, RuntimeError):
    """There is no process group, or not this process in it, or `model=` is wrapped unsuitably."""


class _SaysAllError(OSError):
    """An `OSError` that prints only its message, which already has the meaning of the errno."""

    def __str__(self) -> str:
        return message_of(self)


class StoreError(OffloadError, _SaysAllError):
    """The store as a whole cannot be used as asked."""


class StoreLockedError(StoreError):
    """Another process, or another optimizer in this one, is writing to the store."""


class StoreBusyError(StoreError):
    """Readers hold every checkpoint that could be recycled."""


class RecycledError(StoreBusyError):
    """A training process has recycled a checkpoint that was in use here, and was not damaged."""


class StoreFullError(StoreError):
    """The file system has no room for the slots of the retention policy, or for an export."""


class _AtPathError(StoreError, StorageError):
    """An error of a file or directory whose message says all that the number would."""

    def __init__(self, number: int, message: str, path: str) -> None:
        OSError.__init__(self, number, message, path)  # StorageError would add the number's meaning
        self.offset = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.filename)


class UnreadableError(_AtPathError):
    """A file or directory of a store could not be read. Its content may well be whole."""


class SlotFullError(_AtPathError, StoreFullError):
    """The file system has no room at present for the slot that the next generation needs."""


class UnwritableError(_AtPathError):
    """The store cannot be written: this user lacks permission, or it is mounted read-only."""


class UnreliableReadError(StoreError):
    """Data that is whole on the drive arrives in memory changed, so the machine is at fault."""


class PinError(OffloadError, ValueError):
    """A pin cannot be made, or a pin prevents an operation. The message names the pin."""


class MetricError(OffloadError, ValueError):
    """A metric is not a number with a name, or no checkpoint has a metric of that name."""


class VolatileStoreError(StoreError):
    """The directory is on a file system that loses its content at power-off."""


class RemoteStoreError(StoreError):
    """The directory is on a file system that another machine, or a program, serves."""


class CheckpointError(OffloadError, ValueError):
    """A checkpoint is damaged or incomplete, or the directory or file is not a checkpoint."""


class DamagedError(CheckpointError):
    """The content of a checkpoint, or of the state in training, differs from the data written."""


class ManifestError(CheckpointError):
    """A manifest cannot be read: it is damaged, of another version, or not a manifest."""


class CheckpointNotFoundError(OffloadError, _SaysAllError, FileNotFoundError):
    """The store does not have the checkpoint, parameter or pin that was asked for."""


class MismatchError(OffloadError, ValueError):
    """The model or optimizer differs from that of the checkpoint."""


class NotRestoredError(OffloadError, RuntimeError):
    """The store has checkpoints, and the program has chosen neither to resume nor to start over."""


class SealError(OffloadError, RuntimeError):
    """Sealing a checkpoint failed; the checkpoints made before it are untouched."""


class InDoubtError(SealError):
    """It is not known whether the state of a step is a checkpoint; the next opening finds out."""


class RanksError(OffloadError, RuntimeError):
    """The ranks that train into one store do not agree, or one of them failed or gives no sign."""


class NearError(OffloadError, ConnectionError):
    """The server that updates next to the drives, or its client, is lost or cannot be used."""


class TierError(OffloadError, _SaysAllError):
    """A tier cannot be used as asked. The message says what to do."""


class TierNotFoundError(TierError, FileNotFoundError):
    """A tier, or a copy in it, does not exist."""


class TierAccessError(TierError, PermissionError):
    """A tier refuses the credentials, or there are none, or they have expired."""


class TierUnavailableError(TierError, ConnectionError):
    """A tier did not answer, or answered with errors, until the attempts were given up."""


class SizingError(OffloadError, ValueError):
    """The sizes that were asked for cannot be computed from the input. The message says why."""


class BrokenOptimizerError(OffloadError, RuntimeError):
    """An earlier failure left the working state torn. Restore a checkpoint to continue."""


class OverlapError(OffloadError, RuntimeError):
    """An operation is impossible with ``overlap="backward"``. The message names alternatives."""


class TrainStateTypeError(OffloadError, TypeError):
    """A value in `train_state` cannot be stored so that it comes back the same."""


class TrainStateTooLargeError(OffloadError, ValueError):
    """`train_state` does not fit the space reserved for it in each checkpoint."""


class TrainStateFormatError(CheckpointError):
    """A stored `train_state` is not what this package writes."""


class TrainStateTagError(TrainStateFormatError):
    """A stored `train_state` has a tag that this version does not know."""


class TrainStateDigestError(CheckpointError):
    """A stored `train_state` differs from what was written: the file is damaged or mixed up."""


def reason_of(error: BaseException) -> str:
    """Return the message of an error, or the name of its class if the message is empty."""
    return str(error) or type(error).__name__


_ADVICE: Final = {
    errno.EACCES: "check who has write permission (ls -l {}), and run this as that user",
    errno.EPERM: "check its attributes (ls -l, lsattr {}), and run this as a user who may write",
    errno.EROFS: "its file system is mounted read-only: mount it for writing",
}


@contextmanager
def writing(store: str) -> Iterator[None]:
    """Turn an error of the body about missing write access into one with advice for the user.

    Args:
        store: Directory of the store that is written to, for the message.

    Raises:
        UnwritableError: This user or this mount may not write to the store.
    """
    try:
        yield
    except (UnreadableError, UnwritableError):
        raise
    except StorageError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        path = os.path.relpath(os.fsdecode(error.filename), store)
        inside = path.partition("/")[0]  # users know this name, but not those of temporary files
        where = f", at {inside}" if inside not in (".", "..") else ""
        raise UnwritableError(
            error.errno or errno.EACCES,
            f"this store cannot be written ({os.strerror(error.errno or 0)}{where}): "
            f"{advice.format(store)}; or copy it to a directory of your own",
            store,
        ) from error
