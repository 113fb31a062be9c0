"""Files of one slot: which file holds which chunk, and the digest that its content must have.

`SlotFiles` is shared by readers and by the writer of a store, which adds what a writer needs.
`SealedSlot` opens the files of a sealed checkpoint for reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from gds import Backend, File
from offload.checkpoint.sealed_ranges import SealedRange, model_file
from offload.format.digests import DigestContext
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import Manifest
from offload.format.shares.part_table import OwnerTable


class SlotFiles:
    """Open files of one slot and its parts, and the digests of their content.

    Args:
        layout: Layout of the slot.
        files: Open files of the slot's directory, by name.
    """

    def __init__(self, layout: Layout, files: Mapping[str, File]) -> None:
        self.layout = layout
        self.files_by_drive: tuple[Mapping[str, File], ...] = (files,)
        """Open files by name: those of the slot's directory, and those of each part in order."""
        self.context = DigestContext("", 0)
        """Store and generation that the digests are bound to."""
        self.digests: dict[str, list[str | None]] = {}
        """For each state array, the digest of each chunk; None for a chunk that holds no state."""
        self.unchecked = False
        """Whether state must be compared with its digests when it is read: an earlier process wrote
        it, it was restored, or other programs may have changed its files."""

    def has_arrived(self, chunk: int) -> bool:  # noqa: ARG002  (a slot that is being filled)
        """Return whether the files hold a chunk; False while it is on its way from elsewhere."""
        return True

    def wait_arrived(self, chunk: int) -> None:
        """Wait until the files hold a chunk; raises the error of a chunk that will not arrive."""

    def distrust(self) -> None:
        """Require that state is compared with its digests when it is read."""
        self.unchecked = True

    def trust(self) -> None:
        """Allow reads of state without a comparison, because all state is as it was written."""
        self.unchecked = False

    @property
    def model(self) -> File:
        """The file with the slot's tensors of the model; see `Layout.model_name`."""
        return self.files_by_drive[0][self.layout.model_name]

    def array(self, name: str, chunk: int) -> File:
        """Return the file that holds a chunk of a state array."""
        return self.files_by_drive[self.layout.drives[chunk]][array_file_name(name)]

    def state_range(self, array: str, chunk: int) -> SealedRange | None:
        """Return a chunk of a state array with its digest; None if it holds no state."""
        digest, plan = self.digests[array][chunk], self.layout.plans[chunk]
        share = plan.arrays[array]
        if digest is None:
            return None
        return SealedRange(array, chunk, share.offset, share.nbytes, digest, plan.drive)

    def _take_digests(self, sealed: Manifest | OwnerTable) -> None:
        """Use the digests of a checkpoint, with which state is compared when it is read."""
        self.context = DigestContext(sealed.store_id, sealed.generation)
        self.digests = {name: list(digests) for name, digests in sealed.digests.items()}
        self.distrust()


class SealedSlot(SlotFiles):
    """Files of a sealed checkpoint, or of an owner's part of one; a ``with`` block closes them.

    A file is opened when it is first needed, and stays open. So a reader of one parameter needs
    only the drives that hold it.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint, or of the part.
        parts: Paths of the checkpoint's parts on other drives, in order.
        sealed: Manifest of the checkpoint, or table of the part.
        tables: Tables of the owners whose boxes of a common model file are wanted, besides those of
            owner 0.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        parts: Sequence[str],
        sealed: Manifest | OwnerTable,
        tables: Sequence[OwnerTable] = (),
    ) -> None:
        opened = tuple(_OpenedWhenNeeded(backend, directory) for directory in (path, *parts))
        super().__init__(sealed.layout, opened[0])
        self.files_by_drive = self._opened = opened
        self._take_digests(sealed)
        self._sealed = sealed
        self._tables = tables
        self.path = path

    def file(self, sealed: SealedRange) -> File:
        """Return the file that holds a range.

        Raises:
            gds.StorageError: The file cannot be opened.
        """
        return self.model if sealed.is_of_model else self.array(sealed.array, sealed.index)

    def open_all(self) -> None:
        """Open all tensor files now.

        Raises:
            gds.StorageError: A file cannot be opened.
        """
        for drive, files in enumerate(self._opened):
            for name in self.layout.file_sizes(drive):
                _ = files[name]

    def model_ranges(self) -> Sequence[SealedRange]:
        """Return the blocks, or the pieces of boxes, of `model`, in order."""
        return model_file(self._sealed, self._tables).ranges

    def ranges(self) -> Iterator[SealedRange]:
        """Yield all ranges that have a digest: those of the model, then each state array."""
        yield from self.model_ranges()
        for name, digests in self.digests.items():
            for chunk in range(len(digests)):
                found = self.state_range(name, chunk)
                if found is not None and found.nbytes:
                    yield found

    def close(self) -> None:
        """Close all files. They are opened again if they are needed. Idempotent."""
        for files in self._opened:
            while files:
                files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _OpenedWhenNeeded(dict[str, File]):
    """Files of one directory by name, each opened for reading when it is first looked up."""

    def __init__(self, backend: Backend, directory: str) -> None:
        super().__init__()
        self._backend = backend
        self._directory = directory

    def __missing__(self, name: str) -> File:
        self[name] = file = self._backend.open(f"{self._directory}/{name}")
        return file
