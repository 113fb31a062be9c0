"""The copies in a tier: which are there, and which are complete; and what they say."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from offload.errors import CheckpointError, DamagedError, TierNotFoundError
from offload.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from offload.format.names import MANIFEST_NAME
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import MAX_TABLE_BYTES, OwnerTable, decode_table
from offload.tiers.contents import (
    MARKER_NAME,
    PARAMETERS_NAME,
    WRITER_NAME,
    table_name,
    wrong_sizes,
)
from offload.tiers.marker import MOST_BYTES, Identity, Marker, decode_marker
from offload.tiers.services.address import TierAddress
from offload.tiers.services.objects import Objects
from offload.tiers.services.presence import STORE, read_identity

GENERATION = re.compile(r"gen-([0-9]{8,19})")
"""Names of the folders that have the copies of a generation."""

UNFINISHED = "not complete: its upload has not ended, or was interrupted"


@dataclass(frozen=True, slots=True)
class TierCopy:
    """One copy of a checkpoint in a tier, complete or not."""

    identity: Identity

    url: str
    """URL of the copy; `pull` and `verify` accept it."""

    marker: Marker | None
    """Content of the marker; None if the copy is not complete."""

    reason: str = ""
    """Reason for people why the copy is not complete, or not whole any more; empty if it is."""

    parameters: Marker | None = None
    """Marker of the parameters, if they are complete and the state is not; None otherwise."""

    @property
    def folder(self) -> str:
        """Folder of the copy in the tier."""
        return self.identity.folder


def list_copies(objects: Objects, address: TierAddress) -> list[TierCopy]:
    """Return all copies that an address names, those of one store together, oldest first.

    Folders with other names are foreign, and left out.
    """
    found = _list_copies(objects, address)
    if not found:
        read_identity(objects)
    return found


def _list_copies(objects: Objects, address: TierAddress) -> list[TierCopy]:
    if address.copy:
        store_id, generation, writer = address.copy.split("/")
        identity = Identity(store_id, int(generation.removeprefix("gen-")), writer)
        return [one for one in [copy_of(objects, identity)] if one is not None]
    found: list[TierCopy] = []
    stores = [address.store_id] if address.store_id else objects.folders("")
    for store_id in (name for name in stores if STORE.fullmatch(name)):
        for folder in objects.folders(store_id):
            match = GENERATION.fullmatch(folder)
            if match is not None and folder == f"gen-{int(match[1]):08d}":
                found += copies_of(objects, store_id, int(match[1]))
    return sorted(found, key=lambda copy: (copy.identity.store_id, copy.identity.generation))


def copies_of(objects: Objects, store_id: str, generation: int) -> list[TierCopy]:
    """Return the copies of one generation of a store.

    Raises:
        TierError: The tier cannot be read.
    """
    folder = Identity(store_id, generation, "").folder.rstrip("/")
    writers = [name for name in objects.folders(folder) if STORE.fullmatch(name)]
    found = [copy_of(objects, Identity(store_id, generation, writer)) for writer in writers]
    return [copy for copy in found if copy is not None]


def copy_of(objects: Objects, identity: Identity) -> TierCopy | None:
    """Describe a copy; return None if its folder has neither a marker nor a writer's name."""
    folder = identity.folder
    url = f"{objects.url}/{folder}"
    try:
        data = objects.get(f"{folder}/{MARKER_NAME}", MOST_BYTES)
    except TierNotFoundError:
        parameters = _parameters_of(objects, identity)
        if parameters is not None:
            reason = "only its parameters are complete: its state has not been sent"
            return TierCopy(identity, url, None, reason, parameters)
        if objects.size(f"{folder}/{WRITER_NAME}") is None:
            return None
        return TierCopy(identity, url, None, UNFINISHED)
    try:
        marker = decode_marker(data, f"{url}/{MARKER_NAME}")
        if marker.identity != identity or marker.parameters_only:
            raise DamagedError(f"{url}/{MARKER_NAME}: it is the marker of another copy")
    except DamagedError as error:
        return TierCopy(identity, url, None, str(error))
    return TierCopy(identity, url, marker)


def _parameters_of(objects: Objects, identity: Identity) -> Marker | None:
    """Return the marker of a copy's parameters; None if there is none, or it is damaged."""
    name = f"{identity.folder}/{PARAMETERS_NAME}"
    try:
        marker = decode_marker(objects.get(name, MOST_BYTES), f"{objects.url}/{name}")
    except (TierNotFoundError, DamagedError):
        return None
    return marker if marker.identity == identity and marker.parameters_only else None


def what_is_missing(
    objects: Objects, folder: str, marker: Marker, *, may_be_longer: bool = False
) -> list[str]:
    """Return a sentence for each object of a copy that a tier lacks, or has with another size."""
    found = {
        name.removeprefix(f"{folder}/"): nbytes
        for name, nbytes in objects.sizes_below(folder).items()
    }
    for name in [name for name in marker.sizes if name not in found]:
        size = objects.size(f"{folder}/{name}")  # lists of some services lag behind
        if size is not None:
            found[name] = size
    if may_be_longer:
        found = {name: min(size, marker.sizes.get(name, size)) for name, size in found.items()}
    return wrong_sizes(marker.sizes, found)


def read_manifest(objects: Objects, copy: TierCopy) -> Manifest:
    """Read the manifest of a copy, and check that it is the one that was sent.

    The copy, or its parameters, must be complete.

    Raises:
        DamagedError: It differs.
        TierError: It cannot be read.
    """
    place = f"{copy.url}/{MANIFEST_NAME}"
    marker = copy.parameters or _require_complete(copy)
    try:
        data = objects.get(f"{copy.folder}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
    except TierNotFoundError as error:
        raise DamagedError(f"{place}: the object is missing") from error
    try:
        manifest = decode(data.removesuffix(b"\n").rstrip(b" "), place)
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    if manifest.digest != marker.manifest_digest:
        raise DamagedError(f"{place}: not the manifest that was sent with this copy")
    return manifest


def read_tables(objects: Objects, copy: TierCopy, manifest: Manifest) -> list[OwnerTable]:
    """Read the tables of all owners besides the first; none if one process made the checkpoint."""
    return [read_table(objects, copy, manifest, one) for one in manifest.owners]


def read_table(
    objects: Objects, copy: TierCopy, manifest: Manifest, reference: OwnerReference
) -> OwnerTable:
    """Read the table of an owner that a manifest refers to; see `read_tables` for the errors."""
    name = table_name(reference.owner)
    place = f"{copy.url}/{name}"
    try:
        data = objects.get(f"{copy.folder}/{name}", MAX_TABLE_BYTES)
    except TierNotFoundError as error:
        raise DamagedError(f"{place}: the object is missing") from error
    try:
        table = decode_table(
            data,
            place,
            manifest.layout.model,
            num_groups=len(manifest.groups),
            state_dtype=manifest.layout.state_dtype,
        )
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    if (table.header.digest, table.owner) != (reference.digest, reference.owner):
        raise DamagedError(f"{place}: not the table that was sealed with this checkpoint")
    return table


def _require_complete(copy: TierCopy) -> Marker:
    if copy.marker is None:
        raise TierNotFoundError(errno.ENOENT, copy.reason, copy.url)
    return copy.marker
