"""What the ranks of one store serve: the owners of its state, as each of them knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gds import Backend
from offload.checkpoint.reading import check_files
from offload.errors import CheckpointError
from offload.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class SharedStore:
    """The owners of a store besides the first, over all nodes, when the store is opened."""

    directories: Mapping[int, str] = field(default_factory=dict)
    """For each owner that ranks serve in this run, the store's directory on the owner's node."""

    seen: Mapping[int, Mapping[str, str]] | None = None
    """For each owner, the digest of the table of each usable part of the store, by name of the
    part, as the ranks have found them. None if only parts on this node are compared with the
    manifests, as in a program that does not train."""

    searched: tuple[str, ...] = ()
    """Further directories of the store on this node, in which owners may have their parts."""

    elsewhere: frozenset[int] = frozenset()
    """Owners whose directory is on another node, so that nothing is looked for here."""

    def check_files(
        self, backend: Backend, path: str, manifest: Manifest, others: Sequence[str]
    ) -> None:
        """Check the files of a checkpoint that are on this node against its manifest.

        `others` are the store's directories on other drives, if one process has made it. The errors
        are those of `offload.checkpoint.reading.check_files`.
        """
        if not manifest.owners:
            check_files(backend, path, manifest, others)
            return
        owners = tuple(one for one in manifest.owners if one.owner not in self.elsewhere)
        searched = (*others, *self.searched) if owners else ()
        check_files(backend, path, replace(manifest, owners=owners), searched)

    def require_parts(self, path: str, manifest: Manifest) -> None:
        """Check that ranks have found all parts that a checkpoint names."""
        for reference in manifest.owners if self.seen is not None else ():
            digest = (self.seen or {}).get(reference.owner, {}).get(reference.name)
            if digest is None:
                raise CheckpointError(
                    f"{path}: the part of owner {reference.owner} in its state is missing: no "
                    f"rank has found {reference.path} in a usable state. If its drive is not "
                    "mounted, or its node is not in this run, start again with it"
                )
            if digest != reference.digest:
                raise CheckpointError(
                    f"{path}: {reference.path} is not the part that was sealed with it: the "
                    f"digest of its table is {digest}, expected {reference.digest}. It has been "
                    "rewritten since, or belongs to another checkpoint"
                )


class Mailbox(Protocol):
    """Short texts under keys, which all ranks see. Only one thread may use a mailbox at a time.

    Every method raises an `OffloadError` if the texts cannot be reached any more.
    """

    def put(self, key: str, value: str) -> None:
        """Set the value of a key, whether or not it has one."""
        ...

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none. Never waits for another rank."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def close(self) -> None:
        """Release the connection. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """The part of the state that each rank serves, as one of the ranks sees it."""

    rank: int
    """This rank, from 0."""

    writer: int
    """Rank that has the first directory of the store, and decides for all."""

    owners: tuple[int, ...]
    """Number of the owner that each rank serves, by rank; 0 for the writer."""

    directory: str
    """Directory of the store that has the parts of this rank's owner."""

    connect: Callable[[], Mailbox]
    """Function that returns a mailbox of all ranks. It may take some seconds."""

    sees_all: bool = True
    """Whether all ranks are on the host of the first directory, so that each sees all parts."""

    @property
    def is_writer(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == self.writer

    @property
    def owner(self) -> int:
        """Owner that this rank serves."""
        return self.owners[self.rank]
