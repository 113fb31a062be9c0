"""Finding and checking of checkpoints, without writing anything and without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from gds import Backend
from gds.contract import Stat
from offload.checkpoint.file_check import PartDirectories, check_header, kind_of, read_quarantine
from offload.checkpoint.owner_parts import find_owner_parts
from offload.checkpoint.second_read import read_document
from offload.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
)
from offload.format.layout import array_file_name
from offload.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from offload.format.names import (
    MANIFEST_NAME,
    PART_FILE_NAME,
    QUARANTINE_NAME,
    TRAIN_STATE_NAME,
    is_checkpoint_path,
    part_number,
    step_of,
)
from offload.format.part_file import PART_FILE_BYTES, SealedPart, decode_part
from offload.format.unreadable import reading
from offload.units import seen_from

_FIRST_BYTES = 4096
"""Number of bytes that are read and checked before the rest. A hole at the start of the file, which
reads as zeros, shows in them."""


def read_manifest(
    backend: Backend,
    path: str,
    parts: PartDirectories = None,
    *,
    need_parts: bool = True,
    even_quarantined: bool = False,
) -> Manifest:
    """Read and check the manifest of a checkpoint directory, and the files that it describes.

    The manifest itself is checked. Every tensor file must exist, be a regular file of the right
    size, and have exactly the header that the layout asks for. The parts on other drives must be
    those that were sealed with the manifest. The same holds for the parts of owners that are seen
    here; see `offload.checkpoint.owner_parts`. The train state must be a regular file. Tensor data
    and the content of the train state are not checked.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        parts: Directories of the parts on other drives, or directories to search for owners.
        need_parts: Whether the parts on other drives, and those of owners, are checked.
        even_quarantined: Whether a checkpoint that is marked as damaged is read like any other.

    Raises:
        CheckpointError: Something is missing, damaged or contradictory. The message says what.
        UnreadableError: Something could not be read, so nothing is known about it.
    """
    manifest = decode_manifest(backend, path)
    check_files(
        backend,
        path,
        manifest,
        parts,
        need_parts=need_parts,
        even_quarantined=even_quarantined,
    )
    return manifest


def decode_manifest(backend: Backend, path: str) -> Manifest:
    """Read the manifest of a checkpoint directory, and look at nothing else.

    The errors are those of `read_manifest`.
    """
    with reading(path):
        return _decode_manifest(backend, path)


def _decode_manifest(backend: Backend, path: str) -> Manifest:
    manifest_path = f"{path}/{MANIFEST_NAME}"
    refuse_link(backend, path)
    stat = backend.stat(manifest_path)
    if stat is None:
        raise ManifestError(f"{path}: no {MANIFEST_NAME}: not a complete checkpoint")
    if stat.kind != "file" or stat.size_bytes > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"{manifest_path}: {kind_of(stat)} of {stat.size_bytes} bytes, expected a file of at "
            f"most {MAX_MANIFEST_BYTES}"
        )
    with backend.open(manifest_path) as file:
        read_document(
            file,
            min(_FIRST_BYTES, file.size_bytes),
            lambda first: _refuse_zeros(first, manifest_path),
            ManifestError,
        )
        return read_document(
            file,
            file.size_bytes,
            lambda data: decode(data, manifest_path),
            ManifestError,
        )


def _refuse_zeros(first: bytes, path: str) -> None:
    if b"\0" in first:
        raise ManifestError(f"{path}: not a JSON document (it has zero bytes)")


def read_in_store(
    backend: Backend,
    path: str,
    parts: PartDirectories = None,
    *,
    need_parts: bool = True,
) -> Manifest:
    """Read and check a directory of a store as `read_manifest` does, and check its name."""
    manifest = decode_manifest(backend, path)
    check_name(path, manifest)
    return check_unlocked(backend, path, manifest, parts, need_parts=need_parts)


def check_unlocked(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories = None,
    *,
    need_parts: bool = True,
) -> Manifest:
    """Check the files of a checkpoint that the caller has not locked, as `check_files` does.

    Returns its manifest, which is another one if training has taken the checkpoint's state since
    `manifest` was read.
    """
    try:
        check_files(backend, path, manifest, parts, need_parts=need_parts)
    except CheckpointError as error:
        try:
            found = decode_manifest(backend, path)
        except CheckpointError:
            raise error from None
        if found.has_state or not manifest.has_state:
            raise
        check_files(backend, path, found, parts, need_parts=need_parts)
        return found
    return manifest


def check_name(path: str, manifest: Manifest) -> None:
    """Check that a directory of a store is named for the step of its manifest.

    Raises:
        CheckpointError: The manifest belongs to another checkpoint, because the drive has lost a
            write or somebody has renamed the directory.
    """
    named = step_of(os.path.basename(path))
    if named is not None and named != manifest.step:
        raise CheckpointError(
            f"{path}: its manifest is of step {manifest.step}, expected {named}: the "
            "directory was renamed, or a drive has lost what was written last"
        )


def refuse_link(backend: Backend, path: str) -> None:
    """Refuse a link in the place of a checkpoint's directory."""
    own = backend.stat(path)
    if own is not None and own.kind == "other":
        raise ManifestError(
            f"{path}: {kind_of(own)}, expected the directory of a checkpoint: links to one are "
            "not followed; name, or put in its place, the directory itself"
        )


def check_files(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories = None,
    *,
    need_parts: bool = True,
    even_quarantined: bool = False,
) -> None:
    """Check the files of a checkpoint against its manifest, as `read_manifest` does."""
    with reading(path):
        if not even_quarantined:
            _refuse_quarantined(backend, path)
        _check_files(
            backend, path, manifest, parts,
            need_parts=need_parts, even_quarantined=even_quarantined,
        )  # fmt: skip


def _refuse_quarantined(backend: Backend, path: str) -> None:
    reason = read_quarantine(backend, path)
    if reason is not None:
        raise DamagedError(
            f"{path}: quarantined, because it was found damaged ({seen_from(path, reason)}). If it "
            f"has been repaired, lift the mark ({QUARANTINE_NAME}) with offload verify --quarantine"
        )


def _check_files(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories,
    *,
    need_parts: bool,
    even_quarantined: bool,
) -> None:
    layout = manifest.layout
    check_header(backend, f"{path}/{layout.model_name}", layout.model_file_header)
    for name, header in layout.array_headers[0].items():
        check_header(backend, f"{path}/{array_file_name(name)}", header)
    train_state = backend.stat(f"{path}/{TRAIN_STATE_NAME}")
    if train_state is None or train_state.kind != "file":
        found = "missing" if train_state is None else f"{kind_of(train_state)}, expected a file"
        raise CheckpointError(f"{path}/{TRAIN_STATE_NAME}: {found}")
    if need_parts:
        check_parts(backend, path, manifest, parts)
        find_owner_parts(backend, path, manifest, parts, even_quarantined=even_quarantined)


def check_parts(backend: Backend, path: str, manifest: Manifest, parts: PartDirectories) -> None:
    """Check the parts of a checkpoint on other drives against its manifest.

    The errors are those of `read_manifest`.
    """
    with reading(path):
        for drive, part in enumerate(part_paths(manifest, parts, path), 1):
            _check_part(backend, part, manifest, drive, path)


def are_only_recorded(manifest: Manifest, parts: PartDirectories) -> bool:
    """Return whether only the manifest says where the parts of a checkpoint are.

    Directories that only the manifest names may belong to the store that this one is a copy of. So
    they are only read: nothing is written, locked or removed in them, and their content is no
    reason to mark a checkpoint or to lift its mark.
    """
    return parts is None and bool(manifest.parts)


def part_paths(manifest: Manifest, parts: PartDirectories, path: str) -> list[str]:
    """Return the paths of a checkpoint's parts."""
    if manifest.owners or not manifest.parts:  # parts of owners are searched for
        return []
    recorded = [part.directory for part in manifest.parts]
    given = recorded if parts is None else [os.path.abspath(os.fsdecode(part)) for part in parts]
    if len(given) != len(recorded):
        raise CheckpointError(
            f"{path}: its state is on {len(recorded)} drives besides the first "
            f"({', '.join(recorded) or 'none'}), and {len(given)} directories were given for them "
            f"({', '.join(given) or 'none'}): give one for each, in the same order"
        )
    return [
        f"{directory}/{part.name}" for directory, part in zip(given, manifest.parts, strict=True)
    ]


def directories_of_parts(
    backend: Backend, manifest: Manifest, directories: Sequence[str]
) -> list[str]:
    """Return the directory that has each part of a checkpoint of one process, in order.

    Args:
        backend: Backend of the parts.
        manifest: Manifest that names the parts.
        directories: Directories to search, in any order. A part that is in none of them is expected
            where the manifest says.

    Raises:
        UnreadableError: A part could not be read, so nothing is known about it.
    """
    found = []
    for part in manifest.parts:
        where = part.directory
        for directory in directories:
            with suppress(CheckpointError):
                if read_part(backend, f"{directory}/{part.name}").digest == part.digest:
                    where = directory
        found.append(where)
    return found


def read_part(backend: Backend, path: str) -> SealedPart:
    """Read the ``part.json`` of a part.

    Raises:
        CheckpointError: The part is not sealed, or is damaged.
        UnreadableError: The file could not be read, so nothing is known about it.
    """
    with reading():
        return _read_part(backend, path)


def _read_part(backend: Backend, path: str) -> SealedPart:
    own = f"{path}/{PART_FILE_NAME}"
    stat = backend.stat(own)
    if stat is None or stat.kind != "file" or stat.size_bytes != PART_FILE_BYTES:
        found = f"{kind_of(stat)} of {stat.size_bytes} bytes" if stat else "nothing"
        raise CheckpointError(f"{own}: {found}, expected a file of {PART_FILE_BYTES} bytes")
    with backend.open(own) as file:
        return read_document(
            file, PART_FILE_BYTES, lambda data: decode_part(data, own), CheckpointError
        )


def _has_parts(backend: Backend, directory: str) -> bool:
    stat = backend.stat(directory)
    if stat is None or stat.kind != "directory":
        return False
    return any(part_number(name) is not None for name in backend.list_dir(directory))


def _check_part(
    backend: Backend, path: str, manifest: Manifest, drive: int, checkpoint: str
) -> None:
    """Check that a part is the one that was sealed with a checkpoint, and check its files."""
    reference = manifest.parts[drive - 1]
    sealed_as = f"{reference.directory}/{reference.name}"
    own = backend.stat(path)
    if own is not None and own.kind != "directory":
        raise CheckpointError(
            f"{checkpoint}: a part of its state is {kind_of(own)}, expected a directory: {path}"
        )
    if own is None:
        directory = os.path.dirname(path)
        missing, sealed = path, sealed_as
        if not _has_parts(backend, directory):  # the same text for all checkpoints: see `grouped`
            missing, sealed = f"{directory} has no parts", reference.directory
        was = "" if os.path.dirname(sealed_as) == directory else f" (sealed as {sealed})"
        raise CheckpointError(
            f"{checkpoint}: a part of its state is missing: "
            f"{missing}{was}. If the drive is not mounted, mount it; if the directory has moved, "
            "pass its present path: "
            "directory=[...] of the optimizer takes all directories in their original order, "
            "open_checkpoint(path, parts=[...]) and --part of the commands take all but the first"
        )
    found = read_part(backend, path)
    if found.digest != reference.digest:
        raise CheckpointError(
            f"{checkpoint}: {path} is not the part that was sealed with it: store "
            f"{found.store_id}, generation {found.generation}, drive {found.drive}, expected "
            f"store {manifest.store_id}, generation {manifest.generation}, drive {drive}. It has "
            "been rewritten since, or this is the wrong directory"
        )
    for name, header in manifest.layout.array_headers[drive].items():
        check_header(backend, f"{path}/{array_file_name(name)}", header)


def stat_given_path(backend: Backend, path: str) -> Stat | None:
    """Return the status of a path that a user gave; None if nothing exists at it.

    A store's path may be a symbolic link to a directory. A checkpoint's path may not.
    """
    stat = backend.stat(path)
    if stat is None or stat.kind != "other" or is_checkpoint_path(path):
        return stat
    return backend.stat(f"{path}/.") or stat


def checkpoint_paths(backend: Backend, store: str) -> list[str]:
    """Return the paths in a store that are named like checkpoints, by rising step."""
    steps = {name: step_of(name) for name in backend.list_dir(store)}
    found = [(step, name) for name, step in steps.items() if step is not None]
    return [f"{store}/{name}" for _, name in sorted(found)]
