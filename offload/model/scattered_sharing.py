"""Writer and reader of scattered boxes, whose runs lie between those of other ranks in the file.

Each rank writes the runs of its boxes through the page cache, which all processes of a host share.
When all ranks have written, each computes the digests of some whole rows from the cache. See
`offload.format.shares.model_shares.FileShare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gds import File
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.errors import MismatchError
from offload.format.digests import DigestContext, leaf_digests
from offload.format.shares.model_shares import ModelShare, ShareEntry
from offload.model.tensor_image import TensorImage
from offload.update.dtypes import DTYPE_CODES

_BATCH_BYTES = 4 << 20
"""Most bytes of a box in memory at a time. The file is written run by run, whatever this is."""


class ScatteredImage:
    """Live memory of scattered boxes.

    Args:
        boxes: The boxes.
        tensors: Live memory of each box, with its dtype and sizes.
        marks: Points in the streams of the devices; None for the end of the work that is queued.
        traffic: Counter of the bytes that cross.

    Raises:
        MismatchError: A tensor has another dtype or shape than its box; names it.
    """

    def __init__(
        self,
        boxes: Sequence[ShareEntry],
        tensors: Sequence[torch.Tensor],
        marks: Marks | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        for one, tensor in zip(boxes, tensors, strict=True):
            if (DTYPE_CODES.get(tensor.dtype), tuple(tensor.shape)) != (
                one.dtype,
                one.box.sizes,
            ):
                raise MismatchError(
                    f"the box {one.box.notation()} of {one.name!r} is {tensor.dtype} "
                    f"{list(tensor.shape)} now, expected {one.dtype} {list(one.box.sizes)}: "
                    "the parameter has been replaced or divided anew since the store was laid out"
                )
        self._boxes = boxes
        self._image = TensorImage(tensors, marks, traffic, names=[one.name for one in boxes])

    def batches(self) -> Iterator[tuple[ShareEntry, int, memoryview]]:
        """Yield the boxes in parts: the box, the first byte of the part in it, and its bytes.

        The bytes are valid until the next part is asked for.
        """
        memory = torch.empty(_BATCH_BYTES, dtype=torch.uint8, device="cpu")
        position = 0
        for one in self._boxes:
            for first in range(0, one.nbytes, _BATCH_BYTES):
                nbytes = min(_BATCH_BYTES, one.nbytes - first)
                self._image.gather(position + first, position + first + nbytes, memory[:nbytes])
                yield one, first, memory[:nbytes].numpy().data
            position += one.nbytes


def write_scattered(image: ScatteredImage, file: File, copied: Callable[[int], None]) -> int:
    """Write boxes run by run, through the page cache; return the number of bytes. Not synced.

    Args:
        image: Live memory of the boxes.
        file: Model file, open for writing.
        copied: Function that is called with the number of bytes of all boxes copied so far.

    Raises:
        gds.StorageError: A write failed.
    """
    done = 0
    for one, first, data in image.batches():
        for offset, start, stop in one.runs(first, first + len(data)):
            file.write_bytes(bytes(data[start - first : stop - first]), offset)
        done += len(data)
        copied(done)
    return done


def is_same_scattered(image: ScatteredImage, file: File) -> bool:
    """Return whether the boxes in a model file equal live memory, bit for bit.

    Raises:
        gds.StorageError: The file cannot be read.
    """
    return all(
        file.read_bytes(offset, stop - start) == data[start - first : stop - first]
        for one, first, data in image.batches()
        for offset, start, stop in one.runs(first, first + len(data))
    )


def digest_rows(
    rows: ModelShare, file: File, context: DigestContext, progress: Callable[[], None]
) -> list[str]:
    """Return the digest of each piece of rows that all ranks have written, from the page cache.

    Args:
        rows: The rows.
        file: Model file. Every rank has written its runs.
        context: Store and generation of the digests.
        progress: Function that is called after each piece.

    Raises:
        gds.StorageError: The file cannot be read.
    """
    found = []
    for piece in rows.pieces:
        leaves = leaf_digests(memoryview(file.read_bytes(piece.start, piece.nbytes)))
        array = rows.entries[piece.entry].digest_array
        found.append(context.digest_leaves(array, piece.number, leaves))
        progress()
    return found
