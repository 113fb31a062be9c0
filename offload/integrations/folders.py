"""Checkpoints that another library keeps as folders, and what each of them needs of the store.

Such a library writes the model and its own state into a folder, `optimizer.state_dict()` among it,
and removes folders that it no longer wants. The optimizer's state stays in the store. So for each
folder there must be a checkpoint of the same moment: durable before the folder refers to it, and
pinned for as long as the folder exists. Which folders refer to a checkpoint is kept in its train
state, under the library's name.

A folder that is missing may have been removed, or moved, or not be mounted. It counts as removed if
it was there in the life of this process, or if it was in a directory that is still the same one,
by its inode; libraries make a directory anew where it is missing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from offload import (
    Checkpoint,
    CheckpointError,
    CheckpointInfo,
    MismatchError,
    OffloadedOptimizer,
    PinError,
    Position,
    open_checkpoint,
    reference_of,
)


def unwrap(optimizer: object, remedy: str) -> OffloadedOptimizer:
    """Return the optimizer within the wrappers that libraries put around it.

    Raises:
        TypeError: There is none of this package; says what there is, and `remedy`.
    """
    inner = optimizer
    while not isinstance(inner, OffloadedOptimizer):
        if not hasattr(inner, "optimizer"):
            raise TypeError(f"expected an OffloadedOptimizer, got {_name(inner)}: {remedy}")
        inner = inner.optimizer
    return inner


class Folders:
    """The folders of one library that refer to checkpoints of a store.

    Args:
        library: Its name. Begins the names of pins, and is the key in train states.
        is_complete: Says whether the library could go on from a folder.
        discard_newer: Whether going back may give up newer checkpoints that are in use.
        remedy: What to do where that is refused, for people.
        attach: How to have folders refer to checkpoints, for those who did not.
    """

    def __init__(
        self,
        library: str,
        is_complete: Callable[[str], bool],
        *,
        discard_newer: bool,
        remedy: str,
        attach: str,
    ) -> None:
        self._library = library
        self._is_complete = is_complete
        self._discard_newer = discard_newer
        self._remedy = remedy
        self._attach = attach
        self._read: dict[int, dict[str, int] | None] = {}
        """What `_folders` has read, by generation."""
        self._seen: set[str] = set()
        """Folders that have been there in the life of this process."""

    def seal(
        self,
        optimizer: OffloadedOptimizer,
        folder: str,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint:
        """Make the present state a checkpoint for a folder; durable, and pinned, on return.

        Args:
            optimizer: Of the state.
            folder: Of the library.
            metrics: What has been measured of this state, as `OffloadedOptimizer.checkpoint` takes.

        Raises:
            SealError: It could not be sealed.
            PinError: Somebody else has pinned another checkpoint of this step.
            gds.StorageError: It could not be written durably.
        """
        optimizer.synchronize()  # a seal of this step may be in flight, with the caller's own state
        step = optimizer.num_steps
        name = f"{self._library}-{step}"
        train_state, path = self._train_state(optimizer, step), os.path.abspath(folder)
        before = self._folders_in(train_state) or {}
        folders = {other: inode for other, inode in before.items() if os.path.isdir(other)}
        folders[path] = os.stat(os.path.dirname(path)).st_ino
        self._seen.add(path)
        train_state[self._library] = {"folders": folders}
        try:
            checkpoint = optimizer.checkpoint(train_state, metrics=metrics).result()
        except PinError:
            if name not in optimizer.pins():
                raise
            # The same step with another state: a scheduler has changed the learning rate since it
            # was saved, say. The library writes over its folder as well.
            optimizer.unpin(name)
            checkpoint = optimizer.checkpoint(train_state, metrics=metrics).result()
        self._read[checkpoint.generation] = folders
        optimizer.pin(name, checkpoint)
        return checkpoint

    def sync(self, optimizer: OffloadedOptimizer) -> None:
        """Pin what complete folders refer to, and unpin what removed folders referred to.

        Raises:
            gds.StorageError: A pin could not be written or removed durably.
        """
        for checkpoint in optimizer.checkpoints():
            folders = self._folders(optimizer, checkpoint)
            if folders is None:
                continue
            self._seen.update(filter(os.path.isdir, folders))
            name = f"{self._library}-{checkpoint.step}"
            is_pinned = name in checkpoint.pins
            if is_pinned and all(self._is_removed(*folder) for folder in folders.items()):
                optimizer.unpin(name)
            elif not is_pinned and any(map(self._is_complete, folders)):
                optimizer.pin(name, checkpoint)

    def go_back(self, optimizer: OffloadedOptimizer, state_dict: Mapping[str, Any]) -> None:
        """Restore what a reference names if there are newer checkpoints, parameters included.

        Checkpoints that were made for a folder which was never finished, or has been removed, are
        given up, with a warning. To be called before `load_state_dict`, which refuses references to
        anything but the newest checkpoint.

        Raises:
            MismatchError: Newer checkpoints are in use, or there is no such checkpoint any more, or
                there never was; says what to do. Nothing has been changed.
            PinError: Somebody else has pinned a newer one. Nothing has been changed.
        """
        wanted = reference_of(state_dict)
        if wanted is None:
            return
        present = optimizer.position
        if present.is_same_as(wanted):
            return
        if not wanted.sealed:  # said first: a store without checkpoints has no lasting identity
            raise MismatchError(
                f"load_state_dict() got a reference to {wanted}: the folder was saved without "
                f"sealing the state, which is lost. {self._attach}"
            )
        if wanted.store != present.store:
            return
        found = self._find(optimizer, wanted)
        if found is None:
            return
        newer = [c for c in optimizer.checkpoints() if c.generation > found.generation]
        used = [use for c in newer if (use := self._use_of(optimizer, c))]
        if used and not self._discard_newer:
            raise MismatchError(
                f"going on from step {wanted.step} would give up newer checkpoints of "
                f"{optimizer.directories[0]}: {'; '.join(used)}. {self._remedy}"
            )
        if newer:
            self._give_up(optimizer, found, newer)

    def _give_up(
        self,
        optimizer: OffloadedOptimizer,
        found: CheckpointInfo,
        newer: list[CheckpointInfo],
    ) -> None:
        own = {f"{self._library}-{c.step}" for c in newer}
        names = {name for c in newer for name in c.pins}
        if names <= own:  # else restore() refuses, and all pins stay
            for name in names:
                optimizer.unpin(name)
            listed = ", ".join(os.path.basename(c.path) for c in newer)
            warnings.warn(
                f"going on from {found.path}; giving up what was made after it: {listed}",
                RuntimeWarning,
                stacklevel=2,
            )
        optimizer.restore(found, discard_newer=True)

    def _find(self, optimizer: OffloadedOptimizer, wanted: Position) -> CheckpointInfo | None:
        """Return what a reference names; None if there is nothing to go on from at all.

        Raises:
            MismatchError: It is not there any more; says which are.
        """
        usable: list[str] = []
        for checkpoint in optimizer.checkpoints():
            if (checkpoint.step, checkpoint.generation) == (wanted.step, wanted.generation):
                return checkpoint
            usable += filter(self._is_complete, self._folders(optimizer, checkpoint) or {})
        if usable:
            raise MismatchError(
                f"load_state_dict() got a reference to {wanted}, which {optimizer.directories[0]} "
                f"does not have any more. What can be gone on from: {', '.join(usable)}"
            )
        return None

    def _use_of(self, optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo) -> str:
        """Return what a checkpoint is used by, for people; empty if by nothing."""
        base = os.path.basename(checkpoint.path)
        folders = self._folders(optimizer, checkpoint)
        if folders is None:
            return f"{base}, which was not made for a folder of {self._library}"
        using = [
            folder
            for folder, inode in folders.items()
            if self._is_complete(folder)
            or not (os.path.isdir(folder) or self._is_removed(folder, inode))
        ]
        return f"{base}, which {', '.join(using)} refers to" if using else ""

    def _is_removed(self, folder: str, inode: int) -> bool:
        """Return whether a folder is known to have been removed.

        Args:
            folder: Its path.
            inode: Of the directory that it was in.
        """
        if os.path.isdir(folder):
            return False
        try:
            return folder in self._seen or os.stat(os.path.dirname(folder)).st_ino == inode
        except OSError:
            return False

    def _folders(
        self, optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo
    ) -> dict[str, int] | None:
        """Return the folders that refer to a checkpoint; None if it was not made for any.

        By path; with the inode of the directory that each was in.
        """
        generation = checkpoint.generation
        if generation not in self._read:
            self._read[generation] = self._folders_in(_read_train_state(optimizer, checkpoint))
        return self._read[generation]

    def _folders_in(self, train_state: Mapping[Any, Any]) -> dict[str, int] | None:
        own = train_state.get(self._library)
        folders = own.get("folders") if isinstance(own, dict) else None
        return folders if isinstance(folders, dict) else None

    def _train_state(self, optimizer: OffloadedOptimizer, step: int) -> dict[Any, Any]:
        """Return a copy of what has been stored with a step, if it has been sealed already."""
        for checkpoint in optimizer.checkpoints():
            if checkpoint.step == step:
                return dict(_read_train_state(optimizer, checkpoint))
        return {}


def _read_train_state(
    optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo
) -> Mapping[Any, Any]:
    try:
        with open_checkpoint(checkpoint.path, parts=optimizer.directories[1:]) as opened:
            train_state = opened.train_state
    except CheckpointError:
        return {}  # damaged: whoever restores it is told
    return train_state if isinstance(train_state, dict) else {}


def _name(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__module__}.{type(value).__name__}"
