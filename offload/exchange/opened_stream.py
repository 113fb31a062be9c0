"""Opening of a checkpoint of one process or of several ranks as a stream of its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.whole_state import WholeState
from offload.exchange.checkpoint_stream import CheckpointStream, Progress
from offload.exchange.owners_stream import OwnersStream


@contextmanager
def open_stream(
    checkpoint: Checkpoint, progress: Progress | None = None
) -> Iterator[CheckpointStream]:
    """Open the files of a checkpoint for streaming; they are closed at the end of the block."""
    with checkpoint.held(), _open_stream(checkpoint, progress) as stream:
        yield stream


@contextmanager
def _open_stream(checkpoint: Checkpoint, progress: Progress | None) -> Iterator[CheckpointStream]:
    with WholeState(checkpoint) as state:
        state.require_all()
        if checkpoint.manifest.owners:
            with WholeState(checkpoint, verify=False) as again:
                yield OwnersStream(checkpoint, state, again, progress)
            return
        state.slot.open_all()
        yield CheckpointStream(checkpoint, state.slot, progress, state)
