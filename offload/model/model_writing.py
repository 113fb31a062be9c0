"""Writer of ``model.safetensors`` in a seal: it writes only content that the file lacks.

Live tensors are copied and digested block by block. Leaves (of 1 MiB) of a block are written only
if they are not known to be in the file. Content that an earlier process left in a slot is not
known. A leaf of such content is then handled in one of these ways:

- If it holds no trained tensor, and the newest checkpoint's file holds the same bytes, it is cloned
  from that file, provided that the file system supports files that share space. Nothing is read or
  written.
- Otherwise, if it holds nothing that a step changes, it is read back, compared with the live
  tensors, and written only if it differs.
- All other leaves are written without a comparison, because they have probably changed. But if
  steps write trained tensors (``Options(parameters="drive")``), these leaves are read back as well:
  they are those that several writes of a step have in common, so that no write tells their digest.

With ``Options(parameters="drive")`` some tensors have no memory. Those that steps have written are
in the file already. Frozen ones are in the file of the newest checkpoint, and are copied from there
unless the digests of both files are known and equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from gds import ALIGNMENT, Buffer, File, IOFuture, StorageError
from gds.contract import CLONE_REACH_BYTES
from offload.errors import DamagedError
from offload.format.digests import (
    LEAF_BYTES,
    MODEL_ARRAY,
    DigestContext,
    KnownLeaves,
    leaf_digest,
    leaf_digests,
)
from offload.format.header import Header
from offload.model.model_file import BlockBuffers, ModelImage, ReadBack, has_failed

_DIGEST_BYTES = 8


class TensorRanges:
    """Byte ranges of some tensors in a model file.

    Args:
        header: Header of the file.
        names: Names of the tensors.
    """

    def __init__(self, header: Header, names: Container[str]) -> None:
        entries = [e for e in header.entries.values() if e.nbytes and e.name in names]
        self._starts = [entry.start for entry in entries]
        self._stops = [entry.stop for entry in entries]

    def touch(self, start: int, stop: int) -> bool:
        """Return whether any of the tensors has bytes in a range of the file's data."""
        last = bisect_right(self._starts, stop - 1) - 1
        return last >= 0 and self._stops[last] > start


@dataclass(frozen=True, slots=True)
class CloneSource:
    """Model file of another slot with the same layout, as a source of clones."""

    file: File
    path: str
    """Path of the slot, for messages."""

    leaves: KnownLeaves
    """Known leaves of the file."""

    trained: TensorRanges
    """Ranges of trained tensors. Neither they nor bytes near them are cloned, so that overwriting
    trained tensors never needs new space."""


@dataclass(slots=True)
class Written:
    """Result of writing a model file."""

    digests: list[str]
    """Digest of each block."""

    written_bytes: int = 0
    read_bytes: int = 0
    """Bytes that were read back for comparison."""

    cloned_bytes: int = 0


def write_model(
    image: ModelImage,
    file: File,
    buffers: BlockBuffers,
    context: DigestContext,
    known: KnownLeaves,
    copied: Callable[[int], None],
    *,
    changing: TensorRanges | None = None,
    source: CloneSource | None = None,
) -> Written:
    """Make a model file's data equal to the live tensors' values. The file is not synced.

    No transfer is in progress when this returns or raises.

    Args:
        image: Live tensors.
        file: File to write.
        buffers: Blocks of memory.
        context: Store and generation of the digests.
        known: Known leaves of the file; updated. If this function raises, they are wrong, and the
            caller must forget them.
        copied: Function that is called after each block with the number of bytes copied so far.
            From then on, live tensors before that byte may change.
        changing: Ranges that are never read back, because they change; None for the whole file.
        source: Source from which unchanged leaves may be cloned; None if there is none.

    Returns:
        Digests and byte counts.

    Raises:
        gds.StorageError: A write failed.
    """
    found = Written([])
    blocks = list(image.blocks())
    memory = buffers.for_writing(len(blocks))
    writer = _Writer(image, file, buffers, len(memory), known, changing, source, found)
    try:
        for index, start, stop in blocks:
            if image.is_in_file(start, stop):
                leaves = _leaves_of_file(image, file, known, index, start, stop)
                found.digests.append(context.digest_leaves(MODEL_ARRAY, index, leaves))
                copied(stop)
                continue
            held = writer.held(index, start, stop)
            if None not in held and held == known.leaves(index, len(held)):
                leaves = b"".join(filter(None, held))
                found.digests.append(context.digest_leaves(MODEL_ARRAY, index, leaves))
                copied(stop)
                continue
            writer.begin(index, start, stop)
            buffer, data = memory[index % len(memory)].first(stop - start)
            image.gather(start, stop, data, on_one_thread=not writer.has_caught_up)
            copied(stop)
            leaves = leaf_digests(buffer.memoryview())
            writer.check(held, leaves)
            found.digests.append(context.digest_leaves(MODEL_ARRAY, index, leaves))
            writer.finish(index, start, buffer, leaves)
        writer.finish_writes()
    finally:
        writer.wait()
    known.readable = True  # from now on, a leaf that is not known has been written by a step
    return found


class _Writer:
    """Moves the leaves of one block after another, while the next block is copied."""

    def __init__(
        self,
        image: ModelImage,
        file: File,
        buffers: BlockBuffers,
        num_buffers: int,
        known: KnownLeaves,
        changing: TensorRanges | None,
        source: CloneSource | None,
        found: Written,
    ) -> None:
        self._image = image
        self._data_start = image.data_start
        self._file = file
        self._num_buffers = num_buffers
        self._known = known
        self._changing = changing
        self._source = source
        self._reference = source if source and image.reads_only(source.file) else None
        self._found = found
        self._writes: dict[int, list[IOFuture]] = {}
        self._back = ReadBack(file, buffers)

    @property
    def has_caught_up(self) -> bool:
        """Whether blocks have been handed over, and all their writes have ended.

        The rate is then limited by copying, and not by the drive.
        """
        handed_over = self._writes.values()
        return bool(handed_over) and all(write.done() for each in handed_over for write in each)

    def held(self, index: int, start: int, stop: int) -> list[bytes | None]:
        """Return the digests of a block's leaves that are frozen, and only in another file.

        None for other leaves, and for those whose digests this process does not know.
        """
        firsts = range(start, stop, LEAF_BYTES)
        if self._reference is None:
            return [None] * len(firsts)
        known = self._reference.leaves.leaves(index, len(firsts))
        return [
            leaf if self._image.is_elsewhere(first, min(first + LEAF_BYTES, stop)) else None
            for first, leaf in zip(firsts, known, strict=True)
        ]

    def check(self, held: Sequence[bytes | None], leaves: bytes) -> None:
        """Compare the leaves of a block, as they were read, with what `held` has returned.

        Raises:
            DamagedError: Leaves in another file are not as they were written there.
        """
        found = _split(leaves)
        if any(one is not None and one != new for one, new in zip(held, found, strict=True)):
            path = "" if self._reference is None else f"{self._reference.path}: "
            raise DamagedError(
                f"{path}frozen parameters differ from the digests that they were written with: "
                "restore an older checkpoint, or import the weights anew"
            )

    def begin(self, index: int, start: int, stop: int) -> None:
        """Wait until a block's memory is free, and begin to read back leaves for comparison."""
        last = index - self._num_buffers  # the block that had this one's memory
        for write in self._writes.get(last, []):
            write.result()
        self._writes.pop(last, None)
        known = self._known.leaves(index, -(-(stop - start) // LEAF_BYTES))
        unknown = [n for n, held in enumerate(known) if held is None]
        if unknown and not self._can_clone(index, start, stop):
            self._start_reading(start, stop, unknown)

    def finish(self, index: int, start: int, buffer: Buffer, leaves: bytes) -> None:
        """Begin to write leaves that a block of the file lacks; the writes go on after return."""
        wanted = _split(leaves)
        known = self._known.leaves(index, len(wanted))
        missing = [n for n, held in enumerate(known) if held != wanted[n]]
        missing = self._clone(index, start, buffer.nbytes, missing, wanted)
        if unknown := [n for n in missing if known[n] is None]:
            if not self._back.is_under_way:
                self._start_reading(start, start + buffer.nbytes, unknown)
            missing = self._not_held(missing, wanted)
        writes = self._writes[index] = []
        for first, last in _spans(missing, buffer.nbytes):
            part = buffer.slice(first, last - first)
            writes.append(self._file.write(part, self._data_start + start + first))
            self._found.written_bytes += last - first
        self._known.note(index, leaves)

    def finish_writes(self) -> None:
        """Wait for all writes; raises the error of the first write that failed."""
        for writes in self._writes.values():
            for write in writes:
                write.result()

    def wait(self) -> None:
        """Wait until no transfer uses the buffers or the file any more; never raises errors."""
        self._back.wait()
        for writes in self._writes.values():
            for write in writes:
                has_failed(write)

    def _can_clone(self, index: int, start: int, stop: int) -> bool:
        source = self._source
        return (
            source is not None
            and None not in source.leaves.leaves(index, -(-(stop - start) // LEAF_BYTES))
            and not source.trained.touch(start - CLONE_REACH_BYTES, stop + CLONE_REACH_BYTES)
        )

    def _clone(
        self, index: int, start: int, nbytes: int, missing: list[int], wanted: Sequence[bytes]
    ) -> list[int]:
        """Clone a block's leaves from the source; return the leaves that are still missing."""
        source = self._source
        if not missing or source is None or not self._can_clone(index, start, start + nbytes):
            return missing
        held = source.leaves.leaves(index, len(wanted))
        # The last leaf of a file may end inside a block of the file system.
        num_whole = nbytes // LEAF_BYTES if nbytes % ALIGNMENT else len(wanted)
        same = [n for n in missing if held[n] == wanted[n] and n < num_whole]
        for first, last in _spans(same, nbytes):
            try:
                done = self._file.clone(source.file, self._data_start + start + first, last - first)
            except StorageError:
                done = False
                self._known.readable = False  # as after any failed write
            if not done:
                self._source = None  # the next clone would fail as well
                return missing
            self._found.cloned_bytes += last - first
        return [n for n in missing if n not in set(same)]

    def _start_reading(self, start: int, stop: int, leaves: Iterable[int]) -> None:
        """Begin to read a block's leaves back, if useful, to their places in the spare memory."""
        changing = self._changing
        if changing is None or not self._known.readable:
            return
        asked = [
            n
            for n in leaves
            if not changing.touch(start + n * LEAF_BYTES, min(start + (n + 1) * LEAF_BYTES, stop))
        ]
        if asked:
            origin, spans = self._data_start + start, _spans(asked, stop - start)
            parts = [(first, last, origin + first) for first, last in spans]
            self._back.start(stop - start, parts)

    def _not_held(self, missing: Sequence[int], wanted: Sequence[bytes]) -> list[int]:
        """Return the leaves that the file does not hold, according to the bytes read back."""
        held: set[int] = set()
        for first, data in self._back.take():
            self._found.read_bytes += data.nbytes
            found = _split(leaf_digests(data))
            numbers = range(first // LEAF_BYTES, first // LEAF_BYTES + len(found))
            held |= {n for n, leaf in zip(numbers, found, strict=True) if leaf == wanted[n]}
        return [n for n in missing if n not in held]


def _leaves_of_file(
    image: ModelImage, file: File, known: KnownLeaves, index: int, start: int, stop: int
) -> bytes:
    """Return the digests of a block that this process has written; unknown leaves are read."""
    digests = known.leaves(index, -(-(stop - start) // LEAF_BYTES))
    for number, held in enumerate(digests):
        if held is None:
            first = start + number * LEAF_BYTES
            data = file.read_bytes(image.data_start + first, min(LEAF_BYTES, stop - first))
            digests[number] = leaf_digest(memoryview(data))
    leaves = b"".join(filter(None, digests))
    known.note(index, leaves)
    return leaves


def _split(leaves: bytes) -> list[bytes]:
    return [leaves[at : at + _DIGEST_BYTES] for at in range(0, len(leaves), _DIGEST_BYTES)]


def _spans(leaves: Iterable[int], nbytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges of ascending leaves in a block of `nbytes`; neighbours are joined."""
    runs: list[list[int]] = []
    for leaf in leaves:
        if runs and runs[-1][1] == leaf:
            runs[-1][1] += 1
        else:
            runs.append([leaf, leaf + 1])
    return [(first * LEAF_BYTES, min(last * LEAF_BYTES, nbytes)) for first, last in runs]
