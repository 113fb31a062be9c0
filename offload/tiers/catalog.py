"""The copies in a tier: which are there, which are complete, what they say, and which is meant."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from offload.errors import CheckpointError, DamagedError, TierError, TierNotFoundError
from offload.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from offload.format.names import MANIFEST_NAME
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import MAX_TABLE_BYTES, OwnerTable, decode_table
from offload.tiers.contents import (
    MARKER_NAME,
    PARAMETERS_NAME,
    WRITER_NAME,
    is_own_name,
    table_name,
    wrong_sizes,
)
from offload.tiers.marker import MOST_BYTES, Identity, Marker, decode_marker
from offload.tiers.services.address import TierAddress, parse_address
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import STORE, damaged_copies, read_identity, require_there

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
    """Return the copies of one generation of a store."""
    folder = Identity(store_id, generation, "").folder.rstrip("/")
    writers = [name for name in objects.folders(folder) if STORE.fullmatch(name)]
    found = [copy_of(objects, Identity(store_id, generation, writer)) for writer in writers]
    return [copy for copy in found if copy is not None]


def copy_of(objects: Objects, identity: Identity) -> TierCopy | None:
    """Describe a copy; return None if its folder has neither a marker nor a writer's name."""
    url = f"{objects.url}/{identity.folder}"
    try:
        return TierCopy(identity, url, _read_marker(objects, identity, MARKER_NAME))
    except DamagedError as error:
        return TierCopy(identity, url, None, str(error))
    except TierNotFoundError:
        pass
    with suppress(TierNotFoundError, DamagedError):
        parameters = _read_marker(objects, identity, PARAMETERS_NAME)
        reason = "only its parameters are complete: its state has not been sent"
        return TierCopy(identity, url, None, reason, parameters)
    if objects.size(f"{identity.folder}/{WRITER_NAME}") is None:
        return None
    return TierCopy(identity, url, None, UNFINISHED)


def _read_marker(objects: Objects, identity: Identity, name: str) -> Marker:
    """Read the marker of a copy, or of its parameters, and check that it is that one's."""
    place = f"{objects.url}/{identity.folder}/{name}"
    marker = decode_marker(objects.get(f"{identity.folder}/{name}", MOST_BYTES), place)
    if marker.identity != identity or marker.parameters_only != (name == PARAMETERS_NAME):
        raise DamagedError(f"{place}: it is the marker of another copy")
    return marker


def sizes_in(objects: Objects, folder: str) -> dict[str, int]:
    """Return the size in bytes of every object of a copy, by its name in the copy's folder."""
    listed = objects.sizes_below(folder)
    return {name.removeprefix(f"{folder}/"): nbytes for name, nbytes in listed.items()}


def what_is_missing(
    objects: Objects, folder: str, marker: Marker, *, may_be_longer: bool = False
) -> list[str]:
    """Return a sentence for each object of a copy that a tier lacks, or has with another size."""
    found = sizes_in(objects, folder)
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
    """
    marker = copy.parameters or copy.marker
    if marker is None:
        raise TierNotFoundError(errno.ENOENT, copy.reason, copy.url)
    with _damaged_if_wrong(copy, MANIFEST_NAME) as place:
        data = objects.get(f"{copy.folder}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
        manifest = decode(data.removesuffix(b"\n").rstrip(b" "), place)
    if manifest.digest != marker.manifest_digest:
        raise DamagedError(f"{place}: not the manifest that was sent with this copy")
    return manifest


def read_table(
    objects: Objects, copy: TierCopy, manifest: Manifest, reference: OwnerReference
) -> OwnerTable:
    """Read the table of an owner that a manifest refers to, and check that it is the one sent."""
    name = table_name(reference.owner)
    with _damaged_if_wrong(copy, name) as place:
        table = decode_table(
            objects.get(f"{copy.folder}/{name}", MAX_TABLE_BYTES),
            place,
            manifest.layout.model,
            num_groups=len(manifest.groups),
            state_dtype=manifest.layout.state_dtype,
        )
    if (table.header.digest, table.owner) != (reference.digest, reference.owner):
        raise DamagedError(f"{place}: not the table that was sealed with this checkpoint")
    return table


@contextmanager
def _damaged_if_wrong(copy: TierCopy, name: str) -> Iterator[str]:
    """Yield the URL of a document; raise `DamagedError` if it is missing or cannot be decoded."""
    place = f"{copy.url}/{name}"
    try:
        yield place
    except TierNotFoundError as error:
        raise DamagedError(f"{place}: the object is missing") from error
    except CheckpointError as error:
        raise DamagedError(str(error)) from error


def find_copy(
    objects: Objects,
    address: TierAddress,
    step: int | None = None,
    without: Collection[str] = (),
) -> TierCopy:
    """Return the complete copy that is meant: the one named, the one of a step, or the newest.

    If a checkpoint has several copies, a copy that still has all its objects is preferred.
    """
    copies = [copy for copy in list_copies(objects, address) if copy.url not in without]
    complete = [copy for copy in copies if copy.marker is not None]
    wanted = [c for c in complete if c.marker and (step is None or c.marker.step == step)]
    url = f"{objects.url}/{address.copy or address.store_id}".rstrip("/")
    if not wanted:
        what = "no complete copy of a checkpoint here" + (
            f" of step {step} (there are: "
            f"{', '.join(str(c.marker.step) for c in complete if c.marker)})"
            if step is not None and complete
            else ""
        )
        others = [f"{copy.url}: {copy.reason}" for copy in copies if copy.marker is None]
        raise TierNotFoundError(errno.ENOENT, "; ".join([what, *others]), url)
    stores = sorted({copy.identity.store_id for copy in wanted})
    if len(stores) > 1:
        raise TierError(
            errno.EINVAL,
            f"copies of {len(stores)} stores are here; name one of them: "
            + ", ".join(f"{objects.url}/{store}" for store in stores),
            url,
        )
    newest = max(copy.identity.generation for copy in wanted)
    equal = [copy for copy in wanted if copy.identity.generation == newest]
    if len(equal) > 1:
        equal = [copy for copy in equal if not whats_wrong(objects, copy)] or equal
    if len({copy.marker.content for copy in equal if copy.marker}) > 1:
        raise TierError(
            errno.EINVAL,
            f"generation {newest} is here from two runs that went on from the same store, and they "
            f"differ; name one of them: {', '.join(copy.url for copy in equal)}",
            url,
        )
    return equal[0]


def whats_wrong(objects: Objects, copy: TierCopy) -> str:
    """Return what a copy lacks, as far as names and sizes of objects tell; empty for nothing."""
    if copy.marker is None:
        return copy.reason
    wrong = what_is_missing(objects, copy.folder, copy.marker, may_be_longer=True)
    return f"not whole any more: {'; '.join(wrong[:3])}" if wrong else ""


def _find_whole(
    objects: Objects,
    address: TierAddress,
    damaged: Mapping[str, str],
    tried: Mapping[str, str],
) -> tuple[TierCopy, Manifest, str]:
    """Return the newest copy that has all its objects, by their sizes, and the right manifest.

    The last result is what is wrong with newer copies, for people; empty if there is nothing.
    """
    passed = {**tried}
    for doubtful in (damaged, {}) if damaged else ({},):
        while True:
            try:
                copy = find_copy(objects, address, without={*passed, *doubtful})
            except TierNotFoundError:
                if not passed and not doubtful:
                    raise
                break
            wrong = whats_wrong(objects, copy)
            try:
                if not wrong:
                    manifest = read_manifest(objects, copy)
                    newer = {**passed, **doubtful, **_damaged_markers(objects, copy)}
                    return copy, manifest, _sentences(newer, copy)
            except DamagedError as error:
                wrong = str(error)
            passed[copy.url] = wrong
    raise DamagedError(f"no copy of a checkpoint here is whole: {_sentences(passed)}")


def _damaged_markers(objects: Objects, chosen: TierCopy) -> dict[str, str]:
    """Return newer copies of the same store that have a marker, which cannot be read."""
    address = TierAddress("", "", "", chosen.identity.store_id)
    return {
        copy.url: copy.reason
        for copy in list_copies(objects, address)
        if copy.marker is None and copy.parameters is None and copy.reason != UNFINISHED
    }


def _sentences(passed: Mapping[str, str], chosen: TierCopy | None = None) -> str:
    """Return what is wrong with copies, or with those of them that are newer than the chosen."""
    found = []
    for url, reason in sorted(passed.items()):
        number = parse_address(url).copy.split("/")[1].removeprefix("gen-")
        if chosen is None or int(number) >= chosen.identity.generation:
            found.append(reason if url in reason else f"{url}: {reason}")
    return "; ".join(found)


def find_newest_whole(
    objects: Objects, url: str, store: str, tried: Mapping[str, str]
) -> tuple[tuple[TierCopy, Manifest] | None, str]:
    """Return the newest whole copy of a tier, and a warning; None if it has no complete copy.

    "None is there" is believed only of a tier that says that it is one; see `require_there`.
    """
    address = parse_address(url)
    copies = list_copies(objects, address)
    if not any(copy.marker is not None for copy in copies):
        require_there(objects, store)
        copies = list_copies(objects, address)
    if any(copy.marker is not None for copy in copies):
        noted = damaged_copies(store, objects.url)
        copy, manifest, passed_over = _find_whole(objects, address, noted, tried)
        return (copy, manifest), passed_over and (
            f"{passed_over}. Restoring the copy before it, {copy.url}. `offload verify "
            f"{url}` reads all copies"
        )
    return None, (
        f"{url}: no complete copy of a checkpoint, so training starts from the beginning "
        f"({copies[-1].url}: {copies[-1].reason})"
        if copies
        else ""
    )


def newest_generation(objects: Objects, store_id: str) -> int:
    """Return the newest generation that a tier has anything of; 0 if there is none."""
    matches = [GENERATION.fullmatch(name) for name in objects.folders(store_id)]
    return max((int(match[1]) for match in matches if match is not None), default=0)


def remove_copy(objects: Objects, copy: TierCopy) -> None:
    """Remove the objects of a copy that this library has written, its markers first."""
    objects.delete(f"{copy.folder}/{name}" for name in (MARKER_NAME, PARAMETERS_NAME))
    own = filter(is_own_name, sizes_in(objects, copy.folder))
    objects.delete(f"{copy.folder}/{name}" for name in own)
