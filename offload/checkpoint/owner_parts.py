"""Parts of a checkpoint that other owners than the first hold: where they are, and what they say.

An owner's directory, ``owner-<i>``, is in a directory of the store on some node. A node need not
see the directories of all owners. An owner is *seen* here if one of the directories that are
searched has a directory of that owner. Parts are recognized by the digest of their table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gds import Backend, LockHeldError
from gds.contract import Lock
from offload.checkpoint.file_check import PartDirectories, check_header, kind_of, read_quarantine
from offload.checkpoint.second_read import read_document
from offload.errors import CheckpointError, DamagedError, StoreBusyError
from offload.format.layout import array_file_name
from offload.format.manifest import Manifest
from offload.format.names import (
    QUARANTINE_NAME,
    TABLE_NAME,
    owner_name,
    owner_number,
    part_number,
)
from offload.format.shares.owners import (
    OwnerReference,
    parameter_boxes,
    require_exact_cover,
)
from offload.format.shares.part_table import (
    MAX_TABLE_BYTES,
    OwnerTable,
    TableHeader,
    decode_table,
    decode_table_header,
)
from offload.format.unreadable import reading
from offload.units import seen_from


@dataclass(frozen=True, slots=True)
class OwnerPart:
    """An owner's part of a checkpoint, as it was found."""

    reference: OwnerReference
    """Reference of the checkpoint's manifest to the part."""

    path: str
    """Path of the part; the path at which it was sealed if the owner is not seen here."""

    table: OwnerTable | None
    """Description of the part; None if the owner is not seen here."""


@dataclass(frozen=True, slots=True)
class PartFound:
    """A directory of an owner that is named like a part, as it was found."""

    owner: int
    """Number of the owner."""

    path: str
    """Path of the directory."""

    header: TableHeader | None
    """What its table says; None if it is not the sealed part of any checkpoint."""

    reason: str
    """Reason why the part is not usable; empty if it may be."""

    @property
    def name(self) -> str:
        """Name of the part."""
        return os.path.basename(self.path)


def owner_directories(backend: Backend, directory: str) -> dict[int, str]:
    """Return the directories of owners in a directory of a store, by number of the owner.

    Raises:
        gds.StorageError: The directory could not be read.
    """
    found = {}
    for name in backend.list_dir(directory):
        owner = owner_number(name)
        if owner is not None:
            stat = backend.stat(f"{directory}/{name}")
            if stat is not None and stat.kind == "directory":
                found[owner] = f"{directory}/{name}"
    return dict(sorted(found.items()))


def parts_of_owner(backend: Backend, directory: str) -> list[PartFound]:
    """Describe everything in an owner's directory that is named like a part, by rising number.

    Args:
        backend: Backend of the directory.
        directory: Path that ends in ``owner-<i>``.

    Raises:
        UnreadableError: A table could not be read, so it is not known what the part is.
    """
    owner = owner_number(os.path.basename(directory)) or 0
    return [
        look_at_part(backend, f"{directory}/{name}", owner)
        for name in part_names(backend, directory)
    ]


def usable_parts(backend: Backend, directory: str) -> dict[str, dict[int, dict[str, str]]]:
    """Return the usable parts of owners in a directory of a store; nothing is locked or written.

    Args:
        backend: Backend of the directory.
        directory: Directory of a store, which may be missing.

    Returns:
        For each store, by identity, and each owner: digest of the table of each sealed part that is
        not marked as damaged, by name of the part.

    Raises:
        UnreadableError: A part could not be read, so it is not known what it is.
    """
    found: dict[str, dict[int, dict[str, str]]] = {}
    with reading():
        if backend.stat(directory) is None:
            return found
        for owner, path in owner_directories(backend, directory).items():
            for part in parts_of_owner(backend, path):
                if part.header is not None and not part.reason:
                    of_store = found.setdefault(part.header.store_id, {})
                    of_store.setdefault(owner, {})[part.name] = part.header.digest
    return found


def part_names(backend: Backend, directory: str) -> list[str]:
    """Return the names of the parts in an owner's directory, by rising number.

    Raises:
        UnreadableError: The directory could not be read.
    """
    with reading():
        numbers = {name: part_number(name) for name in backend.list_dir(directory)}
        found = sorted((number, name) for name, number in numbers.items() if number is not None)
        stats = {name: backend.stat(f"{directory}/{name}") for _, name in found}
    return [name for name, stat in stats.items() if stat and stat.kind == "directory"]


def look_at_part(backend: Backend, path: str, owner: int) -> PartFound:
    """Describe a directory of an owner that is named like a part.

    Args:
        backend: Backend of the part.
        path: Path of the directory.
        owner: Number of the owner in whose directory it is.

    Raises:
        UnreadableError: Its table could not be read, so it is not known what the part is.
    """
    try:
        header = read_table_header(backend, path)
        mark = read_quarantine(backend, path)
    except CheckpointError as error:
        return PartFound(owner, path, None, str(error))
    if header.owner != owner:
        reason = f"{path}: sealed as a part of owner {header.owner}, expected owner {owner}"
        return PartFound(owner, path, header, reason)
    return PartFound(owner, path, header, "" if mark is None else _quarantined(path, mark))


def read_table_header(backend: Backend, path: str) -> TableHeader:
    """Return what the table of a part says without a manifest.

    Raises:
        CheckpointError: The part is not sealed, or its table is damaged.
        UnreadableError: The table could not be read.
    """
    with reading():
        own = f"{path}/{TABLE_NAME}"
        size_bytes = _table_bytes(backend, own)
        with backend.open(own) as file:
            return read_document(
                file, size_bytes, lambda data: decode_table_header(data, own), CheckpointError
            )


def read_table(backend: Backend, path: str, manifest: Manifest) -> OwnerTable:
    """Return the table of a part of a checkpoint.

    Args:
        backend: Backend of the part.
        path: Directory of the part.
        manifest: Manifest of the checkpoint.

    Raises:
        CheckpointError: The part is not sealed, or its table is damaged or does not fit.
        UnreadableError: The table could not be read.
    """
    with reading():
        own = f"{path}/{TABLE_NAME}"
        size_bytes = _table_bytes(backend, own)
        layout = manifest.layout
        with backend.open(own) as file:
            return read_document(
                file,
                size_bytes,
                lambda data: decode_table(
                    data,
                    own,
                    layout.model,
                    num_groups=len(manifest.groups),
                    state_dtype=layout.state_dtype,
                ),
                CheckpointError,
            )


def _table_bytes(backend: Backend, path: str) -> int:
    stat = backend.stat(path)
    if stat is None or stat.kind != "file" or stat.size_bytes > MAX_TABLE_BYTES:
        found = f"{kind_of(stat)} of {stat.size_bytes} bytes" if stat else "nothing"
        raise CheckpointError(
            f"{path}: {found}, expected a file of at most {MAX_TABLE_BYTES} bytes"
        )
    return stat.size_bytes


def find_owner_parts(
    backend: Backend,
    path: str,
    manifest: Manifest,
    directories: PartDirectories = None,
    *,
    even_quarantined: bool = False,
) -> list[OwnerPart]:
    """Find the parts of a checkpoint that its other owners hold, and check those that are here.

    The part of an owner that is seen here must be the one that was sealed with the checkpoint. Its
    files must have the sizes and headers that its table implies. State is not read.
    """
    return [
        find_owner_part(
            backend, path, manifest, reference, directories, even_quarantined=even_quarantined
        )
        for reference in manifest.owners
    ]


def find_owner_part(
    backend: Backend,
    path: str,
    manifest: Manifest,
    reference: OwnerReference,
    directories: PartDirectories = None,
    *,
    even_quarantined: bool = False,
) -> OwnerPart:
    """Find one of the parts that `find_owner_parts` finds, with the same errors."""
    with reading(path):
        return _find(backend, path, manifest, reference, directories, even_quarantined)


def _find(
    backend: Backend,
    path: str,
    manifest: Manifest,
    reference: OwnerReference,
    directories: PartDirectories,
    even_quarantined: bool,
) -> OwnerPart:
    tried: list[str] = []
    for directory in _searched(path, reference, directories):
        stat = backend.stat(f"{directory}/{owner_name(reference.owner)}")
        if stat is None or stat.kind != "directory":
            continue
        part = reference.path_in(directory)
        reason = _mismatch(backend, part, reference)
        if not reason:
            table = check_owner_part(
                backend, part, manifest, reference, path, even_quarantined=even_quarantined
            )
            return OwnerPart(reference, part, table)
        tried.append(reason)
    if tried:
        raise CheckpointError(f"{path}: {'; '.join(tried)}")
    return OwnerPart(reference, reference.path, None)


def _searched(path: str, reference: OwnerReference, directories: PartDirectories) -> Iterable[str]:
    given = [reference.directory] if directories is None else directories
    own = os.path.dirname(os.path.abspath(path))
    return dict.fromkeys([own, *(os.path.abspath(os.fsdecode(one)) for one in given)])


def _mismatch(backend: Backend, part: str, reference: OwnerReference) -> str:
    """Return why a directory is not the part of a reference; empty if it is."""
    of = f"the part of owner {reference.owner} in its state"
    stat = backend.stat(part)
    if stat is None:
        return f"{of} is missing: {part}"
    if stat.kind != "directory":
        return f"{of} is {kind_of(stat)}, expected a directory: {part}"
    try:
        header = read_table_header(backend, part)
    except CheckpointError as error:
        return f"{of} cannot be used: {error}"
    if header.digest == reference.digest:
        return ""
    return (
        f"{part} is not the part that was sealed with it: store {header.store_id}, generation "
        f"{header.generation}, owner {header.owner}, digest {header.digest}, expected digest "
        f"{reference.digest}. It has been rewritten since, or this is the wrong directory"
    )


def check_owner_part(
    backend: Backend,
    part: str,
    manifest: Manifest,
    reference: OwnerReference,
    checkpoint: str = "",
    *,
    even_quarantined: bool = False,
) -> OwnerTable:
    """Check the files of an owner's part of a checkpoint, and return its table.

    Args:
        backend: Backend of the part.
        part: Directory of the part.
        manifest: Manifest of the checkpoint.
        reference: The manifest's reference to the part.
        checkpoint: Directory of the checkpoint, for messages; empty if it is not seen here.
        even_quarantined: Whether a part that is marked as damaged is accepted.

    Raises:
        CheckpointError: The part is not that of the checkpoint, is damaged, or is marked as
            damaged. The message names it.
        UnreadableError: Something could not be read, so nothing is known about it.
    """
    of = f"{checkpoint}: " if checkpoint else ""
    with reading(checkpoint):
        mark = None if even_quarantined else read_quarantine(backend, part)
        if mark is not None:
            raise DamagedError(of + _quarantined(part, mark))
        if reason := _mismatch(backend, part, reference):
            raise CheckpointError(of + reason)
        table = read_table(backend, part, manifest)
        found = (table.store_id, table.generation, table.owner)
        expected = (manifest.store_id, manifest.generation, reference.owner)
        if found != expected:
            raise CheckpointError(
                f"{of}{part}: its table is of store, generation and owner {found}, expected "
                f"{expected}"
            )
        layout = table.layout
        if (layout.shard is None) != (manifest.layout.shard is None):
            raise CheckpointError(
                f"{of}{part}: contradictory content: its table and the manifest differ in whether "
                "the model is in shard files"
            )
        for name, header in layout.array_headers[0].items():
            check_header(backend, f"{part}/{array_file_name(name)}", header)
        if layout.shard is not None:
            check_header(backend, f"{part}/{layout.model_name}", layout.model_file_header)
        return table


def check_cover(path: str, manifest: Manifest, tables: Sequence[OwnerTable]) -> None:
    """Check that a checkpoint has each element of the model, and of the state, exactly once.

    Args:
        path: Directory of the checkpoint, for messages.
        manifest: Manifest of the checkpoint.
        tables: Tables of the parts of all its owners.

    Raises:
        CheckpointError: Boxes overlap, or leave elements out. The message names the tensor.
    """
    model = manifest.layout.model
    layouts = [manifest.layout, *(table.layout for table in tables)]
    state = [parameter_boxes(layout) for layout in layouts]
    boxes = [manifest.model_boxes, *(table.model_boxes for table in tables)]
    written = [[(box.name, box.box) for box in each] for each in boxes]
    of_model = "model.safetensors" if manifest.layout.shard is None else "the model"
    for what, owned, every in (("the state", state, False), (of_model, written, True)):
        try:
            require_exact_cover(model, owned, every=every)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the parts of {what} do not have each element once: {error}. The "
                "checkpoint was written wrongly, and cannot be mended: use another one"
            ) from error


def _quarantined(part: str, reason: str) -> str:
    return (
        f"{part}: quarantined, because it was found damaged ({seen_from(part, reason)}). If it has "
        f"been repaired, remove the mark ({QUARANTINE_NAME})"
    )


def lock_owner_parts(backend: Backend, found: Sequence[OwnerPart]) -> list[Lock]:
    """Take a shared lock on each part that is here, and check that it is still the same part."""
    locks: list[Lock] = []
    try:
        for part in found:
            if part.table is None:
                continue
            try:
                locks.append(backend.lock(part.path, shared=True))
            except LockHeldError as error:
                raise StoreBusyError(
                    error.errno, "this part is being rewritten; open a newer checkpoint", part.path
                ) from error
            if read_table_header(backend, part.path).digest != part.reference.digest:
                raise CheckpointError(f"{part.path}: rewritten since it was found")
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return locks
