"""Source of a step that reads the state of a checkpoint in another cut than it was stored in.

The stored values of an element do not depend on the cut: only their places do. (Values of 8-bit
state stand for 32 elements, and are moved together.) So the bytes are copied as they are, and a
step that reads this source computes what it would have computed from a slot of its own cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

from gds import Backend
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.recut.layout import Recut, StoredBox, box_of, recut, stretches
from offload.checkpoint.recut.leaves import CheckedLeaves
from offload.checkpoint.recut.owners import open_owners
from offload.checkpoint.sealed_slot import SealedRange, SlotFiles
from offload.format.boxes import Box, Cut
from offload.format.chunk_plan import Piece
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.shares.box_ranges import flat_boxes


class RecutSource(SlotFiles):
    """State of a checkpoint in the cut of one rank, for reading chunk by chunk.

    To the streamer it is a slot whose chunks are not read but filled. Each chunk that is needed is
    compared with its digest when it is first read. The memory is that of `CheckedLeaves`.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint, as it is on the drive.
        cuts: Box of each parameter that the rank steps, by name; None for whole parameters.
        parts: Directories of the store on other drives, or directories to search for owners.

    Raises:
        MismatchError: The cut is not possible with this state; names the parameter.
        CheckpointError: The part of an owner is missing or damaged, or contradicts another one.
        StoreBusyError: A rank is about to rewrite a part.
        UnreadableError: A part could not be read.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        manifest: Manifest,
        cuts: Mapping[str, Cut] | None,
        parts: PartDirectories = None,
    ) -> None:
        self.path = path
        self._resources = ExitStack()
        try:
            owners = open_owners(backend, path, manifest, parts, resources=self._resources)
            self._recut: Recut = recut(path, manifest, owners, cuts)
        except BaseException:
            self._resources.close()
            raise
        super().__init__(self._recut.layout, {})
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._leaves = CheckedLeaves()
        self._resources.callback(self._leaves.close)
        self.manifest = replace(
            manifest,
            layout=self._recut.layout,
            scalars=self._recut.scalars,
            digests={},
            model_boxes=(),
            model_digests=(),
        )
        """Manifest of the checkpoint with the layout and the scalar state of this cut. It has no
        digests, and is never written."""

    @property
    def bytes_read(self) -> int:
        """Number of bytes of state that have been read so far."""
        return self._leaves.bytes_read

    def fill(self, chunk: int, arrays: Mapping[str, memoryview]) -> None:
        """Write the stored values of a chunk to memory. Values that nobody has stored are left.

        Args:
            chunk: Index of the chunk in `layout`.
            arrays: Bytes of the chunk in each state array, by name.

        Raises:
            DamagedError: A chunk of an owner is not as it was written.
            gds.StorageError: A chunk of an owner cannot be read.
        """
        plan = self.layout.plans[chunk]
        for array, out in arrays.items():  # one array after the other: fewer leaves are needed
            form, share = self.layout.formats[array], plan.arrays[array]
            for number, piece in enumerate(plan.pieces):
                spec = self.layout.parameters[piece.parameter]
                if array not in spec.arrays:
                    continue
                for stored, first, source, num in self._runs(spec.name, box_of(spec), piece):
                    at = share.starts[number] + (first - piece.start) // form.block
                    self._copy(stored, array, source, num, out[at * form.nbytes :])

    def close(self) -> None:
        """Close all files, and release the locks and the memory. Idempotent."""
        self._resources.close()

    def _runs(self, name: str, box: Box, piece: Piece) -> Iterator[tuple[StoredBox, int, int, int]]:
        """Yield where the elements of a piece are stored.

        Yields:
            The stored box, the first element in the wanted box, the first element in the stored
            box, and the number of elements.
        """
        for _, part in flat_boxes(box.sizes, piece.start, piece.stop):
            offsets = tuple(p + o for p, o in zip(part.offsets, box.offsets, strict=True))
            whole = Box(offsets, part.sizes)
            for stored in self._recut.stored[name]:
                for run in stretches(stored.box, box, whole):
                    yield stored, run.target, run.source, run.num

    def _copy(self, stored: StoredBox, array: str, first: int, num: int, out: memoryview) -> None:
        """Copy the values of neighbouring elements of a stored box to the start of `out`."""
        layout, files = stored.owner.layout, stored.owner.files
        form, done = layout.formats[array], 0
        chunks = layout.chunks_of(stored.index)
        while done < num:
            element = layout.starts[stored.index] + first + done
            chunk = bisect_right(chunks, element, key=lambda one: layout.plans[one].first) - 1
            plan = layout.plans[chunks[chunk]]
            number = next(n for n, p in enumerate(plan.pieces) if p.parameter == stored.index)
            piece, share = plan.pieces[number], plan.arrays[array]
            last = min(first + num, piece.stop)
            start = share.starts[number] + (first + done - piece.start) // form.block
            stop = share.starts[number] - (-(last - piece.start) // form.block)
            nbytes = (stop - start) * form.nbytes
            digest = files.digests[array][chunks[chunk]]
            if digest is not None:  # otherwise no parameter of the chunk has state
                sealed = SealedRange(
                    array, chunks[chunk], share.offset, share.nbytes, digest, plan.drive
                )
                self._leaves.copy(
                    files.file(sealed),
                    sealed,
                    files.context,
                    start * form.nbytes,
                    stop * form.nbytes,
                    out[:nbytes],
                )
            out = out[nbytes:]
            done = last - first
