"""Space that a store takes now, by kind, and can take at most. Writes nothing, and needs no torch.

Sizes are those of files, as ``ls -l`` and `CheckpointInfo.bytes` count them. A file system that
shares frozen parameters between checkpoints (XFS, btrfs) needs less.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.listing import list_checkpoints
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError
from offload.format.names import (
    MANIFEST_NAME,
    MODEL_NAME,
    PART_FILE_NAME,
    SHARD_FOLDER,
    TABLE_NAME,
    TRAIN_STATE_NAME,
    is_slot_name,
    owner_number,
    part_number,
)
from offload.format.unreadable import reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a store takes. Sizes are in bytes."""

    path: str
    """Directory of the store; the first one, if there are several."""

    kinds: dict[str, int]
    """Bytes by kind: ``state``, ``parameters``, ``train_state`` and ``manifests`` of checkpoints,
    ``free_slots`` that steps write again, ``not_usable`` checkpoints, and ``other`` files."""

    num_checkpoints: int
    """Number of usable checkpoints."""

    num_parameters_only: int
    """Number of them that have parameters only."""

    num_pinned: int
    """Number of the others that are pinned."""

    num_free: int
    """Number of free slots in the first directory. A step may be writing one of them."""

    slot_bytes: int
    """Bytes of the largest checkpoint on all drives; without one, of the largest free slot."""

    parameters_only_bytes: int
    """Bytes of the checkpoints that have parameters only."""

    directories: dict[str, int]
    """Bytes in each directory of the store that is seen here."""

    free_bytes: dict[str, int]
    """Free bytes on the drive of each of these directories."""

    @property
    def total_bytes(self) -> int:
        """Bytes of everything in the store."""
        return sum(self.kinds.values())

    def num_slots(self, keep: int) -> int:
        """Return the number of slots that training needs with ``keep=`` this number.

        It needs one for each checkpoint that is kept or pinned, and one that steps write.
        """
        return keep + self.num_pinned + 1

    def at_most_bytes(self, keep: int) -> int:
        """Return the bytes that the store takes if all slots exist that ``keep=`` needs.

        For a while it may be one slot more: if a reader or an upload holds a checkpoint that is no
        longer kept.
        """
        constant = self.kinds["other"] + self.kinds["not_usable"] + self.parameters_only_bytes
        return max(self.num_slots(keep) * self.slot_bytes + constant, self.total_bytes)


def usage_of(
    store: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> Usage:
    """Measure what a store takes. This may run beside a process that trains in it.

    Args:
        store: Directory of the store; the first one, if there are several.
        parts: Directories of the parts on other drives, as in `open_checkpoint`.
        backend: Storage backend of the store; the local file system by default.

    Raises:
        CheckpointNotFoundError: Nothing exists at `store`.
        CheckpointError: `store` is not a store.
        UnreadableError: Something could not be read, which says nothing about its content.
    """
    directory = os.path.abspath(os.fsdecode(store))
    with given_or_local(backend) as storage:
        infos = list_checkpoints(directory, parts=parts, backend=storage)
        named: set[str] = set()
        for info in infos:
            if info.valid:
                named |= {info.path, *_parts_of(storage, info.path, parts)}
        further = {os.path.dirname(path) for path in named} - {directory}
        # A part of another rank is in a directory of its owner, in a directory of the store.
        further = {os.path.dirname(p) if owner_number(os.path.basename(p)) else p for p in further}
        further |= {os.path.abspath(os.fsdecode(part)) for part in parts or ()}
        kinds = Counter(dict.fromkeys(_KINDS, 0))
        free: dict[str, Counter[str]] = {}
        directories: dict[str, int] = {}
        with reading():
            for one in (directory, *sorted(further - {directory})):
                found = Counter[str]()
                for folder, name, num_bytes in _files(storage, one, is_first=one == directory):
                    kind = _kind(folder, name, named)
                    found[kind] += num_bytes
                    if kind == "free_slots":
                        where, name = os.path.split(folder)
                        free.setdefault(where, Counter())[name] += num_bytes
                kinds.update(found)
                directories[one] = found.total()
            free_bytes = {one: storage.free_bytes(one) for one in directories}
    usable = [info for info in infos if info.valid]
    # A free slot has one folder on each drive, and of each owner.
    slot_bytes = sum(max(folders.values()) for folders in free.values())
    return Usage(
        path=directory,
        kinds=dict(kinds),
        num_checkpoints=len(usable),
        num_parameters_only=sum(info.parameters_only for info in usable),
        num_pinned=sum(bool(info.pins) and not info.parameters_only for info in usable),
        num_free=sum(map(is_slot_name, free.get(directory, ()))),
        slot_bytes=max((info.bytes for info in usable), default=slot_bytes),
        parameters_only_bytes=sum(info.bytes for info in usable if info.parameters_only),
        directories=directories,
        free_bytes=free_bytes,
    )


_KINDS = (
    *("state", "parameters", "train_state", "manifests"),
    *("free_slots", "not_usable", "other"),
)

_DOCUMENTS = (MANIFEST_NAME, PART_FILE_NAME, TABLE_NAME)


def _parts_of(backend: Backend, path: str, parts: PartDirectories) -> list[str]:
    """Return the paths of a checkpoint's parts that are seen here; none if it is gone by now."""
    try:
        checkpoint = Checkpoint(backend, path, decode_manifest(backend, path), parts)
        owners = checkpoint.owners if checkpoint.manifest.owners else []
        return [*checkpoint.parts, *(one.path for one in owners if one.table is not None)]
    except CheckpointError:
        return []


def _files(backend: Backend, top: str, *, is_first: bool) -> Iterator[tuple[str, str, int]]:
    """Yield folder, name in it, and size of each file of a store in one of its directories.

    The folder is a slot, a checkpoint or a part; empty if the file is in none. A directory that is
    not the first has only parts, since it may be that of other things as well.
    """
    for name in _names(backend, top):
        path = f"{top}/{name}"
        if owner_number(name) is not None:
            for part in _names(backend, path):
                yield from _below(backend, f"{path}/{part}")
        elif is_first or part_number(name) is not None:
            yield from _below(backend, path)


def _below(backend: Backend, folder: str, inside: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield what `_files` does, of everything at and below a path; links are not followed."""
    path = f"{folder}/{inside}" if inside else folder
    stat = backend.stat(path)
    if stat is None:
        return  # training has recycled it
    if stat.kind == "file":
        yield (folder, inside, stat.size_bytes) if inside else ("", folder, stat.size_bytes)
    elif stat.kind == "directory":
        for name in _names(backend, path):
            yield from _below(backend, folder, f"{inside}/{name}" if inside else name)


def _names(backend: Backend, path: str) -> list[str]:
    """Return the names in a directory; none if it is gone, or is none."""
    stat = backend.stat(path)
    return backend.list_dir(path) if stat is not None and stat.kind == "directory" else []


def _kind(folder: str, name: str, named: set[str]) -> str:
    """Return the kind of a file, given its folder and the folders that checkpoints consist of."""
    if folder in named:
        if name == MODEL_NAME or name.startswith(f"{SHARD_FOLDER}/"):
            return "parameters"
        if name == TRAIN_STATE_NAME:
            return "train_state"
        if name in _DOCUMENTS:
            return "manifests"
        return "state" if name.endswith(".safetensors") else "other"
    base = os.path.basename(folder)
    if is_slot_name(base) or part_number(base) is not None:
        return "free_slots"
    return "not_usable" if base.startswith("step-") else "other"
