"""Copies of the live model that seals make, by one process or by each of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gds import File
from offload.device.boundary import Marks
from offload.device.filed import FiledTensor
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.layout import Layout
from offload.model.model_file import BlockBuffers, ModelImage, digest_model
from offload.model.model_writing import CloneSource, TensorRanges, write_model
from offload.model.stored import Stored


class ModelCopy(Protocol):
    """One copy of live tensors into a model file, or into the part that this rank writes."""

    @property
    def data_bytes(self) -> int:
        """Bytes that are copied from the live tensors."""
        ...

    def stop_of(self, name: str) -> int:
        """Return the number of copied bytes after which a tensor has been copied."""
        ...

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk of a layout, the bytes to copy before its parameters change."""
        ...

    def write(self, copied: Callable[[int], None]) -> tuple[Sequence[str], int]:
        """Write the file. It is not synced.

        Args:
            copied: Function that is called with the number of bytes copied so far.

        Returns:
            The digests of what has been copied, and the number of bytes that were written.

        Raises:
            gds.StorageError: A write failed.
        """
        ...

    def is_same(self, digests: Sequence[str]) -> bool:
        """Return whether the tensors have the values still whose digests `write` has returned."""
        ...

    def forget(self) -> None:
        """Record that the content of the file is unknown, because a write or a sync failed."""
        ...


class WholeCopy:
    """Copy of all tensors by one process.

    Args:
        layout: Layout of the slot.
        stored: Tensors to copy.
        file: Model file of the slot.
        buffers: Memory for copying.
        context: Store and generation of the digests.
        known: Known content of the file.
        marks: Positions in the streams of devices; the tensors have their values there.
        source: Function that returns a file that unchanged content may be cloned from. It is given
            the ranges of trained tensors.
        reads_back: Whether the seal also reads back what a step may have changed, because steps
            have written nearly all of it to the file.
    """

    def __init__(
        self,
        layout: Layout,
        stored: Sequence[Stored],
        file: File,
        buffers: BlockBuffers,
        context: DigestContext,
        known: KnownLeaves,
        marks: Marks,
        source: Callable[[TensorRanges], CloneSource | None],
        *,
        reads_back: bool = False,
    ) -> None:
        header = layout.model_header
        self._entries = header.entries
        self._file = file
        self._buffers = buffers
        self._context = context
        self._known = known
        self._source = source
        tensors: dict[str, torch.Tensor] = {item.spec.name: item.tensor for item in stored}
        trained = {spec.name for spec in layout.parameters}
        changing = {s.spec.name for s in stored if s.parameter.requires_grad} & trained
        self._trained = TensorRanges(header, trained)
        self._changing = TensorRanges(header, () if reads_back else changing)
        elsewhere = {
            name: tensor.place()
            for name, tensor in tensors.items()
            if isinstance(tensor, FiledTensor) and name not in trained
        }
        self._image = ModelImage(header, tensors, marks, buffers.traffic, file, elsewhere)

    @property
    def data_bytes(self) -> int:
        """Bytes of the model file's data."""
        return self._image.data_bytes

    def stop_of(self, name: str) -> int:
        """Return the end of a tensor in the file's data."""
        return self._entries[name].stop

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return `Layout.model_stops`."""
        return layout.model_stops

    def write(self, copied: Callable[[int], None]) -> tuple[Sequence[str], int]:
        """Write what the file lacks; see `write_model`."""
        written = write_model(
            self._image,
            self._file,
            self._buffers,
            self._context,
            self._known,
            copied,
            changing=self._changing,
            source=self._source(self._trained),
        )
        return written.digests, written.written_bytes

    def is_same(self, digests: Sequence[str]) -> bool:
        """Compare the digests of all blocks, without writing."""
        found = digest_model(self._image, self._buffers, self._context, digests)
        return found == list(digests)

    def forget(self) -> None:
        """Forget the content of the file. It may exist only in a cache, so it is not read back."""
        self._known.forget(readable=False)
