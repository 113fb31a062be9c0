"""Source of a step that reads the state of a checkpoint in another cut than it was stored in.

The stored values of an element do not depend on the cut: only their places do. So the bytes are
copied as they are, and a step that reads this source computes what it would have computed from a
slot of its own cut.

8-bit values are the exception: 32 of them have one scale, and are copied together. If the new cut
divides them otherwise, they can only be encoded anew, with a rounding; see `reencoding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gds import Backend
from offload.checkpoint.checked_reads import CheckedReads
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.recut.layout import Recut, recut, stretches
from offload.checkpoint.recut.places import Place, places
from offload.checkpoint.recut.reencoding import WINDOW_ELEMENTS, Recode, Reencoder
from offload.checkpoint.sealed_slot import SlotFiles
from offload.checkpoint.state_owners import Reach, open_owners
from offload.format.arrays import MASTER, MASTER_LOW, scale_name
from offload.format.boxes import Cut, cut_range
from offload.format.chunk_plan import ChunkPlan, Piece
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest


class RecutSource(SlotFiles):
    """State of a checkpoint in the cut of one rank, for reading chunk by chunk.

    To the streamer it is a slot whose chunks are not read but filled. Each chunk that is needed is
    compared with its digest when it is first read. The memory is that of `CheckedReads`.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint, as it is on the drive.
        cuts: Box of each parameter that the rank steps, by name; None for whole parameters.
        parts: Directories of the store on other drives, or directories to search for owners.
        recode: Function that encodes 8-bit state anew where the cut divides its blocks; None if
            that is not allowed.
        reach: What is seen here of the checkpoint, if its ranks are on several hosts; None if all
            of it has to be seen.
        shares: Shares of the drives in this cut; see `Layout.shares`.

    Raises:
        RanksError: The rank needs state that is not seen on its host.
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
        *,
        recode: Recode | None = None,
        reach: Reach | None = None,
        shares: Sequence[int] = (1,),
    ) -> None:
        self.path = path
        self._resources = ExitStack()
        try:
            owners = open_owners(
                backend, path, manifest, parts, resources=self._resources, reach=reach
            )
            self._recut: Recut = recut(
                path,
                manifest,
                owners,
                cuts,
                reencode=recode is not None,
                reach=reach,
                shares=shares,
            )
        except BaseException:
            self._resources.close()
            raise
        super().__init__(self._recut.layout, {})
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._leaves = CheckedReads()
        self._resources.callback(self._leaves.close)
        self._reencoder = None if recode is None else Reencoder(recode, self._leaves)
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

    @property
    def reencoded(self) -> frozenset[str]:
        """Names of the parameters whose 8-bit state is encoded anew, at least in part."""
        return self._recut.split_blocks

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
                if array not in plan.kept[number]:
                    continue
                if self._is_8bit(array):
                    if self._recut.scalars[piece.parameter] is None:
                        start, stop = (at * form.nbytes for at in share.starts[number : number + 2])
                        out[start:stop] = bytes(stop - start)  # it has no state: blocks may not fit
                        continue
                    if self._is_split(piece):
                        continue
                for first, place in self._places(piece):
                    at = (share.starts[number] + (first - piece.start) // form.block) * form.nbytes
                    nbytes = place.num_values(form) * form.nbytes
                    place.read(array, self._leaves, out[at : at + nbytes])
        if self._reencoder is not None:
            for number, piece in enumerate(plan.pieces):
                if self._is_split(piece):
                    self._reencode(self._reencoder, plan, number, arrays)

    def close(self) -> None:
        """Close all files, and release the locks and the memory. Idempotent."""
        self._resources.close()

    def _is_split(self, piece: Piece) -> bool:
        return self.layout.parameters[piece.parameter].name in self._recut.split_blocks

    def _is_8bit(self, array: str) -> bool:
        return self.layout.state_dtype == "int8" and array not in (MASTER, MASTER_LOW)

    def _reencode(
        self,
        reencoder: Reencoder,
        plan: ChunkPlan,
        number: int,
        arrays: Mapping[str, memoryview],
    ) -> None:
        """Write the 8-bit state of a piece in blocks of this cut."""
        piece = plan.pieces[number]
        for array in plan.kept[number]:
            if scale_name(array) not in plan.kept[number]:
                continue
            for start in range(piece.start, piece.stop, WINDOW_ELEMENTS):
                stop = min(start + WINDOW_ELEMENTS, piece.stop)
                values = plan.part(number, start, stop).values
                window = replace(piece, start=start, stop=stop)
                out = {}
                for name in (array, scale_name(array)):
                    first, last = (at * self.layout.formats[name].nbytes for at in values[name])
                    out[name] = arrays[name][first:last]
                found = ((at - start, place) for at, place in self._places(window))
                reencoder.fill(array, self.layout, stop - start, found, out)

    def _places(self, piece: Piece) -> Iterator[tuple[int, Place]]:
        """Yield where the elements of a piece are stored."""
        spec = self.layout.parameters[piece.parameter]
        box = spec.box
        for part in cut_range(box.sizes, piece.start, piece.stop):
            whole = part.shifted(box.offsets)
            for stored in self._recut.stored[spec.name]:
                for run in stretches(stored.box, box, whole):
                    first = run.target
                    for place in places(stored, run.source, run.num):
                        yield first, place
                        first += place.num
