"""Reader of a model that is in the shard files of a checkpoint's owners, tensor by tensor.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.checkpoint.checked_reads import CheckedReads
from offload.checkpoint.recut.layout import stretches
from offload.checkpoint.sealed_slot import SealedOwner, SealedRange, SealedSlot, shard_pieces
from offload.errors import CheckpointError
from offload.format.boxes import Box, cut_range
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout, ModelTensor
from offload.format.shares.owners import MODEL_PIECE_BYTES, ModelBox


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A box of a tensor in the shard file of an owner."""

    owner: int
    """Index of the owner."""

    box: Box
    pieces: tuple[SealedRange, ...]
    """Ranges of the file that have a digest; together they are the box."""


class ShardedModel:
    """Tensors of a model, put together from the shard files of owners.

    Args:
        path: Directory of the checkpoint, for messages.
        owners: For each owner that is seen here, its layout and its boxes of the model.
        files: Function that returns the files of an owner, given its index in `owners`.
        reads: Reader of ranges.
        missing: Function that says which owners are not seen here; empty if all are.
    """

    def __init__(
        self,
        path: str,
        owners: Sequence[tuple[Layout, Sequence[ModelBox]]],
        files: Callable[[int], SealedSlot | SealedOwner],
        reads: CheckedReads,
        missing: Callable[[], str],
    ) -> None:
        self._path = path
        self._files = files
        self._reads = reads
        self._missing = missing
        self._tensors: dict[str, ModelTensor] = {one.name: one for one in owners[0][0].model}
        self._held: dict[str, list[_Held]] = {}
        for number, (layout, boxes) in enumerate(owners):
            for box in boxes:
                pieces = tuple(shard_pieces(layout, box))
                self._held.setdefault(box.name, []).append(_Held(number, box.box, pieces))

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` of a tensor, in memory of their own.

        Raises:
            DamagedError: A piece is not as it was written.
            CheckpointError: Elements are in the shard file of an owner that is not seen here.
            gds.StorageError: A piece cannot be read.
        """
        tensor = self._tensors[name]
        size, whole = DTYPE_BYTES[tensor.dtype], Box.whole(tensor.shape)
        out, done = memoryview(bytearray(stop - start)), 0
        first, last = start // size, -(-stop // size)
        parts = list(cut_range(tensor.shape, first, last)) if first < last else []
        for held in self._held.get(name, ()):
            for one in (one for part in parts for one in stretches(held.box, whole, part)):
                low, high = one.target * size, (one.target + one.num) * size
                begin, end = max(low, start), min(high, stop)
                self._copy(held, one.source * size + begin - low, out[begin - start : end - start])
                done += end - begin
        if done < stop - start:
            missing = self._missing()
            if missing:
                raise CheckpointError(f"{name!r} is not whole. {missing}")
            raise CheckpointError(
                f"{self._path}: contradictory content: no owner has all bytes from {start} to "
                f"{stop} of {name!r}"
            )
        return out

    def _copy(self, held: _Held, at: int, into: memoryview) -> None:
        """Copy bytes of a box, which may lie in several pieces."""
        files, done = self._files(held.owner), 0
        while done < len(into):
            number, first = divmod(at + done, MODEL_PIECE_BYTES)
            piece = held.pieces[number]
            last = min(first + len(into) - done, piece.nbytes)
            out = into[done : done + last - first]
            self._reads.copy(files.model, piece, files.context, first, last, out)
            done += last - first
