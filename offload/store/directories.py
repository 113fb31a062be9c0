"""Directories given for a store: checks of what is in them, and the creation of missing ones.

The checks come before anything is created or locked. They read only names, manifests,
``store.json`` and ``part.json``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gds import Backend, StorageError
from gds.probe import describe_remote
from offload.checkpoint.owner_parts import usable_parts
from offload.checkpoint.reading import checkpoint_paths, decode_manifest, read_part, stat_given_path
from offload.errors import CheckpointError, RemoteStoreError, StoreError, VolatileStoreError
from offload.format.layout import array_file_name
from offload.format.manifest import Manifest
from offload.format.names import (
    CALIBRATION_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PART_FILE_NAME,
    STORE_FILE_NAME,
    TABLE_NAME,
    is_slot_name,
    owner_name,
    owner_number,
    part_number,
    step_of,
)
from offload.store.store_errors import as_store_errors, nearest_existing
from offload.store.store_id import read_store_id

_NOTHING = frozenset({"lost+found", CALIBRATION_NAME})
"""Names that an empty directory may hold, besides names that begin with a dot."""

_ARRAY_SUFFIX = array_file_name("")
"""Suffix of the names of state-array files."""

_MOST_SHOWN = 3


@dataclass(slots=True)
class _Place:
    """One of the given directories, as it was found."""

    directory: str
    exists: bool
    names: list[str]
    store_id: str | None = None
    """Identity in the directory's ``store.json``; None if the file is missing or damaged."""

    parts: list[str] = field(default_factory=list)
    """Names of the parts in the directory, sealed or not."""

    unfinished: set[str] = field(default_factory=set)
    """Names of directories of parts whose creation was interrupted."""

    drives: dict[str, set[int]] = field(default_factory=dict)
    """Positions of the directory's sealed parts in their stores, by identity of the store."""

    @property
    def is_first(self) -> bool:
        """Whether the directory is the first one of a store."""
        return self.store_id is not None or any(
            step_of(name) is not None or is_slot_name(name) for name in self.names
        )

    @property
    def is_store(self) -> bool:
        """Whether the directory belongs to a store, as its first directory or as another one."""
        return LOCK_NAME in self.names or self.is_first or bool(self.parts)

    @property
    def others(self) -> list[str]:
        """Names in the directory other than those that an empty directory may hold."""
        nothing = _NOTHING | self.unfinished
        return [
            n
            for n in self.names
            if n not in nothing and not n.startswith(".") and owner_number(n) is None
        ]


def check_directories(drives: Sequence[tuple[Backend, str]], *, fresh: bool) -> None:
    """Refuse directories that do not fit the store that they are given for. Nothing is written."""
    places = []
    for backend, directory in drives:
        with as_store_errors(backend, directory):
            places.append(_look_at(backend, directory))
    for place in places:
        if place.exists and not place.is_store and place.others:
            raise StoreError(errno.ENOTEMPTY, _holds_other_things(place), place.directory)
    first, *others = places
    with as_store_errors(*drives[0]):
        _require_not_of_owners_only(drives[0][0], first, others)
    with as_store_errors(*drives[0]):
        paths = checkpoint_paths(*drives[0]) if others and first.exists else []
        manifests = _manifests(drives[0][0], paths)
    for manifest in manifests:
        require_number_of_directories(manifest, first.directory, len(drives))
    is_spread = any(manifest.parts for manifest in manifests)
    known = {manifest.store_id for manifest in manifests} | {first.store_id or ""}
    _require_all(places)
    if first.parts and not first.is_first:
        raise _misplaced(places, first, known)
    for position, place in enumerate(others, 1):
        if place.is_first:
            raise _misplaced(places, place, known)
        _check_parts(places, position, known, all_known=len(manifests) == len(paths))
        if is_spread and not fresh and not place.is_store:
            raise StoreError(
                errno.ENOENT,
                "this directory is empty, and the checkpoints of the store in "
                f"{first.directory} have parts of their state there. Is the drive mounted? If what "
                "was on it is lost, load_parameters() still loads the parameters of a checkpoint, "
                "and fresh=True starts over",
                place.directory,
            )


def spread_directories(
    backend: Backend, first: str, directories: Sequence[str], store_id: str
) -> list[str]:
    """Return those of some further directories over which one process has spread a store.

    Those with parts of checkpoints come first, in the order of the drives.
    """
    with as_store_errors(backend, first):
        paths = checkpoint_paths(backend, first) if backend.stat(first) is not None else []
        is_spread = any(manifest.parts for manifest in _manifests(backend, paths))
    known: dict[str, list[int]] = {}
    unsealed: list[str] = []
    for directory in directories:
        with as_store_errors(backend, directory):
            place = _look_at(backend, directory)
        if store_id in place.drives:
            known[directory] = sorted(place.drives[store_id])
        elif paths and not is_spread and place.parts and not place.drives and not place.is_first:
            unsealed.append(directory)  # a process has ended before its first checkpoint
    return [*sorted(known, key=lambda directory: known[directory]), *unsealed]


def check_further_directories(
    backend: Backend, directories: Sequence[str], spread: Collection[str] = ()
) -> None:
    """Refuse directories that cannot hold parts of owners. Nothing is written.

    They are those that ranks were given besides the first. Only those of `spread_directories` may
    have parts of a store of one process.
    """
    for directory in directories:
        with as_store_errors(backend, directory):
            place = _look_at(backend, directory)
        if place.others and not place.is_store:
            raise StoreError(errno.ENOTEMPTY, _holds_other_things(place), directory)
        if place.is_first or (place.parts and directory not in spread):
            raise StoreError(
                errno.EINVAL,
                f"this directory is {_role(place, set())}, and was given for parts of ranks: give "
                "each store directories of its own",
                directory,
            )


def _require_not_of_owners_only(backend: Backend, place: _Place, others: Sequence[_Place]) -> None:
    """Refuse a directory with parts of owners whose first directory is on another node."""
    if not place.exists or place.is_first:
        return
    owners = sorted({o for found in usable_parts(backend, place.directory).values() for o in found})
    given = [other.directory for other in others if other.is_first]
    if owners and given:
        raise StoreError(
            errno.EINVAL,
            f"this directory has state that ranks have stored ({', '.join(map(owner_name, owners))}"
            f"), and the first directory of their store is {given[0]}: put that one first",
            place.directory,
        )
    if owners:
        raise StoreError(
            errno.EINVAL,
            "this directory has state of a store that several ranks write "
            f"({', '.join(map(owner_name, owners))}), and not that store's first directory, which "
            "is on another node: start the same ranks again. If that store is gone, remove these "
            "directories first",
            place.directory,
        )


def require_number_of_directories(manifest: Manifest, directory: str, num_given: int) -> None:
    """Check that the number of given directories matches a checkpoint of the store.

    A checkpoint of several ranks has its state in directories of owners, which are looked for in
    all given directories, whatever their number. One with parameters only has no state anywhere.
    """
    if manifest.owners or not manifest.has_state or len(manifest.layout.shares) == num_given:
        return
    sealed = [directory, *(part.directory for part in manifest.parts)]
    raise StoreError(
        errno.EINVAL,
        f"step {manifest.step} of this store is spread over {len(sealed)} directories, and "
        f"{num_given} were given: pass directory={sealed!r}, or their present paths, in this "
        "order. To start a new store in other directories, put another directory first",
        directory,
    )


def _look_at(backend: Backend, directory: str) -> _Place:
    stat = stat_given_path(backend, directory)
    if stat is None:
        return _Place(directory, exists=False, names=[])
    if stat.kind != "directory":
        raise StorageError(errno.ENOTDIR, "looking for a store", directory)
    place = _Place(directory, exists=True, names=backend.list_dir(directory))
    if MANIFEST_NAME in place.names:
        raise StoreError(
            errno.EINVAL,
            "this is a checkpoint, not a store: pass the directory that it is in, "
            f"{os.path.dirname(directory)!r}, and name the checkpoint to restore()",
            directory,
        )
    if STORE_FILE_NAME in place.names:
        place.store_id = read_store_id(backend, directory, durable=False)
    for name in place.names:
        path = f"{directory}/{name}"
        if part_number(name) is None or not _is_directory(backend, path):
            continue
        if backend.stat(f"{path}/{TABLE_NAME}") is not None:
            raise StoreError(
                errno.EINVAL,
                "this is the directory of one owner of a store that several ranks write, not a "
                f"store: pass the directory that it is in, {os.path.dirname(directory)!r}",
                directory,
            )
        if backend.stat(f"{path}/{PART_FILE_NAME}") is None:
            if all(inside.endswith(_ARRAY_SUFFIX) for inside in backend.list_dir(path)):
                place.unfinished.add(name)
            continue
        place.parts.append(name)
        try:
            part = read_part(backend, path)
        except CheckpointError:
            continue  # an unsealed part belongs to no store
        place.drives.setdefault(part.store_id, set()).add(part.drive)
    return place


def _is_directory(backend: Backend, path: str) -> bool:
    stat = backend.stat(path)
    return stat is not None and stat.kind == "directory"


def _holds_other_things(place: _Place) -> str:
    shown = ", ".join(map(repr, place.others[:_MOST_SHOWN]))
    more = len(place.others) - _MOST_SHOWN
    return (
        "this directory is not a store, and holds other files: "
        f"{shown}{f' and {more} more' if more > 0 else ''}. Give the store a directory of its "
        f"own, such as {os.path.join(place.directory, 'store')!r}"
    )


def _manifests(backend: Backend, paths: Sequence[str]) -> list[Manifest]:
    """Return the manifests of the given checkpoint directories, without damaged ones."""
    found = []
    for path in paths:
        try:
            found.append(decode_manifest(backend, path))
        except CheckpointError:
            continue  # opening the store reports it
    return found


def _require_all(places: Sequence[_Place]) -> None:
    """Refuse a missing directory if another given directory belongs to a store."""
    stores = [place for place in places if place.is_store]
    missing = [place.directory for place in places if not place.exists]
    if stores and missing:
        raise StoreError(
            errno.ENOENT,
            f"this directory does not exist, and {stores[0].directory} is "
            f"{_role(stores[0], set())}. Is the drive mounted? If you mean a new directory, make "
            "it first",
            missing[0],
        )


def _check_parts(
    places: Sequence[_Place], position: int, known: set[str], *, all_known: bool
) -> None:
    """Refuse a directory if all its sealed parts belong to other stores or to other positions."""
    place = places[position]
    own = set[int]().union(*(drives for store, drives in place.drives.items() if store in known))
    if own and position not in own:
        raise _misplaced(places, place, known)
    if not own and place.drives and all_known:
        raise _misplaced(places, place, known)


def _misplaced(places: Sequence[_Place], place: _Place, known: set[str]) -> StoreError:
    """Return the error for a misplaced directory: its role, and the right order if it is known."""
    what = f"this directory is {_role(place, known)}, but was given as number "
    what += str(places.index(place) + 1)
    order = _order(places)
    advice = (
        f"pass directory={order!r}"
        if order is not None
        else "pass the directories of that store in their order; for a new store pass others. If "
        "that store is gone, remove its part-<k> and step-<N> directories first"
    )
    return StoreError(errno.EINVAL, f"{what}: {advice}", place.directory)


def _role(place: _Place, known: set[str]) -> str:
    """Describe the role of a directory in the store that it belongs to."""
    if place.is_first:
        return "the first directory of a store"
    if not place.parts:
        return "a directory of a store"
    if not place.drives:
        return "one of several directories of a store, but not the first"
    store = next((s for s in place.drives if s in known), next(iter(place.drives)))
    numbers = " and ".join(str(drive + 1) for drive in sorted(place.drives[store]))
    return f"number {numbers} of {'this store' if store in known else f'the store {store}'}"


def _order(places: Sequence[_Place]) -> list[str] | None:
    """Return the directories in their store's order; None unless they form one whole store."""
    first = [place for place in places if place.is_first]
    others = [place for place in places if not place.is_first]
    if len(first) != 1 or not others:
        return None
    for store in set(others[0].drives).intersection(*(place.drives for place in others)):
        by_drive = {drive: place for place in others for drive in place.drives[store]}
        is_its = first[0].store_id in (store, None)
        if is_its and sorted(by_drive) == list(range(1, len(places))):
            return [first[0].directory, *(by_drive[d].directory for d in sorted(by_drive))]
    return None


_LONGEST_PATH_BYTES = 4095
"""Largest length of a path that Linux takes."""

_BELOW_BYTES = 128
"""Largest length of what the store adds to the path of its directory.

The longest is a state array of a rank, ``/owner-<9 digits>/part-<18 digits>/<64>.safetensors``. The
file of a pin that is being made is ``/pins/.<64>.<10 digits>-<20 digits>.new``.
"""


def make_directories(
    drives: Sequence[tuple[Backend, str]], *, allow_volatile: bool, allow_remote: bool
) -> None:
    """Create missing directories and their parents, durably."""
    for backend, directory in drives:
        _require_short(directory)
        with as_store_errors(backend, directory):
            # A new directory is on the file system of its nearest existing parent.
            capabilities = backend.capabilities(nearest_existing(backend, directory))
        if capabilities.volatile and not allow_volatile:
            raise VolatileStoreError(
                errno.EINVAL,
                f"the file system ({capabilities.filesystem}) loses its content at power-off, so "
                "checkpoints there would not survive. Choose a directory on a drive, or pass "
                "options=Options(allow_volatile=True), or --allow-volatile to `offload import`, "
                "if that is what you want",
                directory,
            )
        if capabilities.remote and not allow_remote:
            raise RemoteStoreError(
                errno.EINVAL,
                f"{describe_remote(capabilities.filesystem)}, so this package guarantees nothing "
                "for checkpoints there; choose a directory on a local drive, or pass "
                "options=Options(allow_remote=True), or --allow-remote to `offload import`, "
                "if that is what you want",
                directory,
            )
    for backend, directory in drives:
        with as_store_errors(backend, directory):
            _make(backend, directory)


def _require_short(directory: str) -> None:
    nbytes, most = len(os.fsencode(directory)), _LONGEST_PATH_BYTES - _BELOW_BYTES
    if nbytes > most:
        raise StoreError(
            errno.ENAMETOOLONG,
            f"this path has {nbytes} bytes, and that of a store has at most {most}, because the "
            "files in it have longer paths: choose a shorter one",
            directory,
        )


def _make(backend: Backend, directory: str) -> None:
    """Create a directory and its parents, durably. Other processes may do so at the same time."""
    missing: list[str] = []
    path = directory
    while backend.stat(path) is None:
        missing.insert(0, path)
        path = os.path.dirname(path)
    try:
        # A process that created the directory may have died before it synced the name.
        backend.sync_dir(os.path.dirname(path))
    except StorageError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
            raise
    for new in missing:
        try:
            backend.make_dir(new)
        except StorageError as error:
            made = backend.stat(new)
            if error.errno != errno.EEXIST or made is None or made.kind != "directory":
                raise
        backend.sync_dir(os.path.dirname(new))
