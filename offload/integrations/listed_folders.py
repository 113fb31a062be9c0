"""The files and folders that the checkpoints of a store list, and what each refers to now.

References are read from the files that libraries write with torch, without any tensor.
"""

from __future__ import annotations

import errno
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from offload import (
    Checkpoint,
    CheckpointError,
    CheckpointInfo,
    OffloadedOptimizer,
    Position,
    open_checkpoint,
    reference_of,
)
from offload.integrations.first_rank import decide
from offload.integrations.places import Places, is_remote

_log = logging.getLogger("offload")

Status = Literal["refers", "unreadable", "unfinished", "removed", "missing"]
"""``removed`` means as well that the folder refers to something else now. ``missing`` means that it
may still come back."""

_BY_WEIGHT: tuple[Status, ...] = ("refers", "unreadable", "unfinished", "removed", "missing")
"""What counts if a folder may be at several places."""


_MOST_NEARBY = 1000
"""Number of directories in which a missing folder is looked for."""


@dataclass(frozen=True, slots=True)
class Use:
    """What has become of a folder that a checkpoint was sealed for."""

    folder: str
    """Path where the folder is, or was last."""

    listed: str
    """Path that the checkpoint lists."""

    inode: int
    """Inode that is listed for its parent directory."""

    status: Status
    why: str = ""
    is_in_doubt: bool = False
    """Whether nobody has seen a removal: the folder has gone between two runs."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What the folders of a library refer to at one moment."""

    uses: Mapping[int, list[Use] | None]
    """Uses of each checkpoint, by its generation; None if it was not sealed for a folder."""

    known: frozenset[tuple[str, int]]
    """Directories with folders of this store, each with the inode that is listed for it."""


class ListedFolders:
    """Folders of one library, which may be files as well; the arguments are those of `Folders`."""

    def __init__(self, library: str, read: Callable[[str], list[Position] | None]) -> None:
        self._library = library
        self._read = read
        self._places: dict[str, Places] = {}
        self._used: dict[str, None] = {}
        """Directories that the library has used in this process, in their order."""
        self._entries: dict[tuple[str, int], Mapping[str, Any]] = {}
        """The library's entry of train states, by store and generation of the checkpoint."""
        self._positions: dict[str, tuple[object, list[Position]]] = {}
        """Results of `read`, each with the times and sizes of the files that it was read from."""

    def use(self, directory: str) -> None:
        """Note a directory that the library reads from or writes into: files may be there, too."""
        self._used[os.path.abspath(directory)] = None

    def sealed(self, checkpoint: Checkpoint, entry: Mapping[str, Any], folder: str) -> None:
        """Note that a checkpoint has been sealed for a folder, which is about to be written."""
        self._entries[checkpoint.manifest.store_id, checkpoint.generation] = _without_files(entry)
        self._positions.pop(folder, None)

    def survey(self, optimizer: OffloadedOptimizer) -> Survey:
        """Look at all folders that the checkpoints of a store list."""
        store = optimizer.directories[0]
        places = self._places.setdefault(store, Places(store, self._used))
        found: dict[str, list[Position] | OSError | None] = {}
        known: set[tuple[str, int]] = set()
        checkpoints = optimizer.checkpoints()
        for checkpoint in checkpoints:
            for path, inode in self._folders(optimizer, checkpoint):
                for place in places.of(path, self._store_of(checkpoint)):
                    if place not in found:
                        found[place] = self._look(place)
                    if _names(found[place], checkpoint):
                        places.see(place)
                        known.add((os.path.dirname(place), inode))
        uses: dict[int, list[Use] | None] = {}
        for checkpoint in checkpoints:
            uses[checkpoint.generation] = None
            if not self._is_listing(optimizer, checkpoint):
                continue
            each = uses[checkpoint.generation] = []
            for path, inode in self._folders(optimizer, checkpoint):
                at = [
                    _use_at(
                        place, path, inode, found[place], checkpoint, places, known if all_ else ()
                    )
                    for place, all_ in places.of(path, self._store_of(checkpoint)).items()
                ]
                use = min(at, key=lambda use: _BY_WEIGHT.index(use.status))
                if use.is_in_doubt and any(places.has_seen(one.folder) for one in at):
                    use = replace(use, why="has been removed", is_in_doubt=False)
                if use.status == "removed" and not os.path.lexists(use.folder):
                    use = self._moved(use, checkpoint) or use
                each.append(use)
        return Survey(uses, frozenset(known))

    def _moved(self, use: Use, checkpoint: CheckpointInfo) -> Use | None:
        """Return where a folder is now, if it was moved to a place nearby; None if it was not."""
        for folder in islice(_nearby(use.folder, self._used), _MOST_NEARBY):
            try:
                found = self._read(folder)
            except OSError:
                continue
            if _names(found, checkpoint):
                inode = os.stat(os.path.dirname(folder)).st_ino
                return Use(folder, use.listed, inode, "refers")
        return None

    def entry(self, optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo) -> Mapping[str, Any]:
        """Return the library's entry of a checkpoint's train state; empty if it has none."""
        key = (checkpoint.store, checkpoint.generation)
        if key not in self._entries:
            own = read_train_state(optimizer, checkpoint).get(self._library)
            self._entries[key] = _without_files(own) if isinstance(own, dict) else {}
        return self._entries[key]

    def _is_listing(self, optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo) -> bool:
        return isinstance(self.entry(optimizer, checkpoint).get("folders"), dict)

    def _folders(
        self, optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo
    ) -> Iterator[tuple[str, int]]:
        """Yield the path of each folder that a checkpoint lists, and its parent's inode."""
        if self._is_listing(optimizer, checkpoint):
            yield from self.entry(optimizer, checkpoint)["folders"].items()

    def _store_of(self, checkpoint: CheckpointInfo) -> str | None:
        store = self._entries[checkpoint.store, checkpoint.generation].get("store")
        return store if isinstance(store, str) else None

    def _look(self, folder: str) -> list[Position] | OSError | None:
        """Return the positions that a folder refers to, or the error; None if it is unfinished."""
        if is_remote(folder):
            return OSError(errno.EREMOTE, os.strerror(errno.EREMOTE), folder)
        try:
            stats = [("", os.stat(folder))]
            if os.path.isdir(folder):
                with os.scandir(folder) as entries:
                    stats += [(e.name, e.stat(follow_symlinks=False)) for e in entries]
            now = sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
            before = self._positions.get(folder)
            if before is not None and before[0] == now:
                return before[1]
            found = self._read(folder)
        except OSError as error:
            return error
        if found is not None:
            self._positions[folder] = (now, found)
        return found


def _nearby(folder: str, used: Collection[str]) -> Iterator[str]:
    """Yield directories in those that are used, and beside a folder and its parent, two levels."""
    parent = os.path.dirname(folder)
    for directory in used:
        yield from _directories(directory)
    for root in (parent, os.path.dirname(parent)):
        for each in _directories(root):
            yield each
            if each != parent:
                yield from _directories(each)


def _directories(path: str) -> list[str]:
    """Return the directories within a directory; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _use_at(
    place: str,
    listed: str,
    inode: int,
    found: list[Position] | OSError | None,
    checkpoint: CheckpointInfo,
    places: Places,
    known: Collection[tuple[str, int]],
) -> Use:
    """Return what has become of a folder, if this is its place."""
    if isinstance(found, FileNotFoundError):
        if places.is_removed(place, inode, known):
            if places.has_seen(place):
                return Use(place, listed, inode, "removed", "has been removed")
            return Use(place, listed, inode, "removed", "is gone since the last run", True)
        return Use(place, listed, inode, "missing", "is not there, and may have been moved")
    if isinstance(found, OSError):
        return Use(place, listed, inode, "unreadable", f"cannot be read ({found.strerror})")
    if found is None:
        return Use(place, listed, inode, "unfinished", "is not finished")
    if _names(found, checkpoint):
        return Use(place, listed, inode, "refers")
    is_ours = any(position.store == checkpoint.store for position in found)
    if is_ours or places.is_known(place, inode, known):
        return Use(place, listed, inode, "removed", "refers to something else now")
    return Use(place, listed, inode, "missing", "is of another run")


def _without_files(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry without the content of files, which need not stay in memory."""
    return {key: value for key, value in entry.items() if key != "files"}


def _names(found: list[Position] | OSError | None, checkpoint: CheckpointInfo) -> bool:
    wanted = (checkpoint.store, checkpoint.step, checkpoint.generation)
    return isinstance(found, list) and any(
        position.sealed and (position.store, position.step, position.generation) == wanted
        for position in found
    )


def change_pins(
    optimizer: OffloadedOptimizer, find: Callable[[], Mapping[str, str | None]]
) -> None:
    """Pin and unpin as a function says that the first rank calls. Collective.

    It returns the path of the checkpoint for each pin to add, and None for each pin to remove.
    """
    for name, path in decide(optimizer, find).items():
        if path is None:
            optimizer.unpin(name)
        else:
            optimizer.pin(name, path)


def log_released(checkpoint: CheckpointInfo, name: str, uses: Sequence[Use]) -> None:
    """Log that a pin is removed, and why; as a warning if a folder may have been moved far away."""
    is_in_doubt = any(use.is_in_doubt for use in uses)
    _log.log(
        logging.WARNING if is_in_doubt else logging.INFO,
        "%s is no longer pinned as %s: %s%s",
        checkpoint.path, name, _reasons(uses),
        f". If it was moved, pin this before the next save: offload pin {checkpoint.path} NAME"
        if is_in_doubt
        else "",
    )  # fmt: skip


def log_kept(checkpoint: CheckpointInfo, name: str, uses: Sequence[Use], store: str) -> None:
    """Log that a pin stays although no folder is known to need it, and why."""
    _log.warning(
        "%s stays pinned as %s: %s. If nobody needs it: offload unpin %s %s",
        checkpoint.path, name, _reasons(uses), store, name,
    )  # fmt: skip


def _reasons(uses: Sequence[Use]) -> str:
    return "; ".join(f"{use.folder} {use.why}" for use in uses)


def read_train_state(
    optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo, rank: int = 0
) -> Mapping[Any, Any]:
    """Return the train state that a rank has passed; empty if it cannot be read."""
    try:
        with open_checkpoint(checkpoint.path, parts=optimizer.directories[1:]) as opened:
            states = opened.train_states
            train_state = states[rank] if rank < len(states) else states[0]
    except CheckpointError:
        return {}  # the checkpoint is damaged, which a restore of it reports
    return train_state if isinstance(train_state, dict) else {}


_CARRIED = "offload_reference"
"""Key of the reference in the groups that are saved there."""


def is_sharded(directory: str) -> bool:
    """Return whether a directory was written by `torch.distributed.checkpoint`, to its end."""
    return os.path.isfile(os.path.join(directory, ".metadata"))


def reference_in(directory: str, optimizer: str) -> Position | None:
    """Return the position that an optimizer's state dict in such a directory refers to, if any.

    This process reads alone, a few hundred bytes.
    """
    group = {_CARRIED: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this process reads alone
        try:
            load({optimizer: {"param_groups": [group]}}, checkpoint_id=directory, no_dist=True)
        except CheckpointException:
            return None
    return reference_of({"param_groups": [group]})


def positions_in_file(path: str) -> list[Position] | None:
    """Return the position that a saved state dict refers to; empty if it has the state itself.

    None means that there is no such file, or that it is torn. No tensor is read.

    Raises:
        OSError: The file cannot be read, which says nothing about what it has.
    """
    try:
        saved = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        position = reference_of(saved)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise
    except Exception:  # noqa: BLE001  (a file may be damaged in any way)
        return None
    return [] if position is None else [position]
