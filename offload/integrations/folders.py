"""Relation between another library's checkpoint folders and the checkpoints of a store.

Such a library writes the model and its own state, with `optimizer.state_dict()`, into a folder, and
removes folders that it no longer needs. The optimizer's state stays in the store. So each folder
needs a checkpoint of the same moment, which is durable before the folder refers to it, and is
pinned as long as the folder exists. The train state of a checkpoint lists the folders that refer to
it, under the library's name.

With several ranks, one of them writes and removes folders. So the first rank decides what each call
is to do, see `offload.integrations.first_rank`, and all ranks make the same calls of the optimizer.

A checkpoint is pinned as long as one of its folders refers to it, or may do so. What is missing and
may come back, or cannot be read, keeps its pin; see `offload.integrations.places`.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.hooks import RemovableHandle

from offload import (
    Checkpoint,
    CheckpointInfo,
    MismatchError,
    OffloadedOptimizer,
    PinError,
    Position,
    add_hf_files,
    reference_of,
)
from offload.integrations.carried_files import pack, write_newest
from offload.integrations.first_rank import all_arrived, decide, rank_of
from offload.integrations.listed_folders import (
    ListedFolders,
    Survey,
    Use,
    change_pins,
    log_kept,
    log_released,
    read_train_state,
)
from offload.integrations.places import inode_of_parent, make_durable

_log = logging.getLogger("offload")

_Unfinished = tuple[str, Checkpoint, dict[Any, Any], Mapping[str, float] | None]
"""Folder that a checkpoint was sealed for, the checkpoint, its train state, and metrics."""


def unwrap(optimizer: object, remedy: str) -> OffloadedOptimizer:
    """Return the optimizer within the wrappers that libraries put around it, or raise TypeError."""
    inner = optimizer
    while not isinstance(inner, OffloadedOptimizer):
        if not hasattr(inner, "optimizer"):
            kind = type(inner)
            found = "nothing" if inner is None else f"{kind.__module__}.{kind.__name__}"
            raise TypeError(f"expected an OffloadedOptimizer, got {found}: {remedy}")
        inner = inner.optimizer
    return inner


def make_steps_wait(optimizer: OffloadedOptimizer) -> RemovableHandle:
    """Let each step wait for its end, as one with post hooks does if it cannot observe readers."""
    return optimizer.register_step_post_hook(lambda *_: None)


class Folders:
    """The folders of one library that refer to checkpoints of a store.

    Args:
        library: Name of the library. It is the prefix of pins, and the key in train states.
        read: Function that returns the positions that a finished folder refers to; None if the
            library has not finished it. `OSError` says that it cannot be read.
        discard_newer: Whether going back may withdraw newer checkpoints that are in use.
        remedy: Advice for a user, for the message that refuses to withdraw checkpoints in use.
        attach: Advice for a user, for the message about a folder without a sealed checkpoint.
    """

    def __init__(
        self,
        library: str,
        read: Callable[[str], list[Position] | None],
        *,
        discard_newer: bool,
        remedy: str,
        attach: str,
    ) -> None:
        self._library = library
        self._read = read
        self._listed = ListedFolders(library, read)
        self._discard_newer = discard_newer
        self._remedy = remedy
        self._attach = attach
        self._unfinished: _Unfinished | None = None
        self._told: set[str] = set()
        """Pins about which a line of the log has said why they stay."""

    def use(self, directory: str | os.PathLike[str]) -> None:
        """Note a directory that the library reads folders from, or writes them into."""
        self._listed.use(os.path.abspath(directory))

    def seal(
        self,
        optimizer: OffloadedOptimizer,
        folder: str,
        metrics: Mapping[str, float] | None = None,
        totals: Callable[[], Mapping[str, float]] | None = None,
        *,
        finishes: bool = True,
    ) -> None:
        """Make the present state a checkpoint for a folder. It is durable and pinned on return.

        If the folder has a ``config.json``, this and its like are copied to the checkpoint, so that
        ``from_pretrained`` opens it. A warning says if that fails.

        Args:
            optimizer: Optimizer of the state.
            folder: Folder of the library. Its parent directory must exist.
            metrics: Metrics of this state, as for `OffloadedOptimizer.checkpoint`.
            totals: Function that returns totals to keep with the checkpoint. It is called when no
                transfer is in flight.
            finishes: Whether `finish` is called when the library has written the folder. Until then
                the checkpoint is not uploaded to a tier.
        """
        optimizer.synchronize()  # a seal of this step may be in flight, with the caller's own state
        step = optimizer.num_steps
        name, path = f"{self._library}-{step}", os.path.abspath(folder)
        train_state = self._train_state(optimizer, step)

        def entry() -> tuple[dict[str, Any], Mapping[str, float] | None, bool, list[str]]:
            """Return the library's entry, metrics, whether it is pinned, and other folders."""
            survey = self._listed.survey(optimizer)
            uses = [use for use in _uses_of_step(optimizer, survey, step) if use.folder != path]
            folders = {use.folder: use.inode for use in uses if use.status != "removed"}
            folders[path] = inode_of_parent(path, survey.known)
            kept = {"totals": dict(totals())} if totals else {}
            own = {"folders": folders, "store": optimizer.directories[0], **kept}
            others = [use.folder for use in uses if use.status in ("refers", "unreadable")]
            return own, metrics, name in optimizer.pins(), others

        self.use(os.path.dirname(path))
        own, metrics, is_pinned, others = decide(optimizer, entry)
        train_state[self._library] = own
        if is_pinned and optimizer.num_ranks > 1:  # several ranks learn of a PinError too late
            optimizer.unpin(name)
        optimizer.upload_sealed = not finishes
        try:
            checkpoint = optimizer.checkpoint(train_state, metrics=metrics).result()
        except PinError as error:
            if name not in optimizer.pins():
                raise
            if others:
                raise PinError(
                    f"{path} cannot be saved: {others[0]} refers to step {step} as it was before "
                    "the learning rate, or another value, changed. Save both before the change, or "
                    "remove the other one"
                ) from error
            # The state differs although the step is the same. For example, a scheduler may have
            # changed the learning rate since the last save. The library overwrites its folder, too.
            optimizer.unpin(name)
            checkpoint = optimizer.checkpoint(train_state, metrics=metrics).result()
        finally:
            optimizer.upload_sealed = True
        self._listed.sealed(checkpoint, own, path)
        optimizer.pin(name, checkpoint)
        if rank_of(optimizer) == 0:
            _add_hf_files(checkpoint, path)
        self._unfinished = (path, checkpoint, train_state, metrics) if finishes else None

    @property
    def is_unfinished(self) -> bool:
        """Whether the state was sealed for a folder, and `finish` has not been called since."""
        return self._unfinished is not None

    def finish(self, optimizer: OffloadedOptimizer) -> None:
        """Take the small files of the folder that has just been written into the train state.

        Then the checkpoint is uploaded, if the optimizer has a tier. Pins follow what folders refer
        to now.
        """
        if self._unfinished is not None:
            (path, checkpoint, train_state, metrics), self._unfinished = self._unfinished, None
            if optimizer.num_steps != checkpoint.step:  # its train state can no longer change
                _log.warning("%s goes to no tier: %s", checkpoint.path, "training has gone on")
                return
            all_arrived(optimizer)  # each rank writes files of its own into the folder
            files = decide(optimizer, lambda: self._small_files(optimizer, path, checkpoint))
            if files and rank_of(optimizer) == 0:
                own = train_state[self._library]
                train_state[self._library] = {
                    **own,
                    "folder": os.path.basename(path),
                    "files": files,
                }
            try:
                optimizer.checkpoint(train_state, metrics=metrics).result()
            except PinError as error:
                _log.warning("%s goes to no tier: %s", checkpoint.path, error)
        self.sync(optimizer)

    def _small_files(
        self, optimizer: OffloadedOptimizer, folder: str, checkpoint: Checkpoint
    ) -> dict[str, Any]:
        """Return the small files of a folder; none if the library has not finished it."""
        if optimizer.torch_form:  # FSDP2 writes shards
            return {}
        try:
            return pack(checkpoint, folder) if self._read(folder) else {}
        except OSError as error:
            _log.warning("%s: a tier gets no files of this folder: %s", folder, error)
            return {}

    def write_missing(self, optimizer: OffloadedOptimizer, parent: str, name: str) -> None:
        """Write a folder anew if a checkpoint carries its files, and otherwise do nothing.

        Without a name it is the folder of the newest checkpoint that carries files.
        """

        def write() -> None:
            """Write it, from the newest checkpoint that has it."""
            pattern = re.compile(re.escape(name) if name else r"[^/]+")
            parts = optimizer.directories[1:]
            found = [c for c in optimizer.checkpoints()[::-1] if not c.parameters_only]
            folder, why = write_newest(self._library, parent, found, parts, pattern)
            if why and folder is None:
                _log.warning("%s", why)

        decide(optimizer, write)

    def totals(self, optimizer: OffloadedOptimizer) -> object:
        """Return the totals that `seal` has kept with the present state; None if there are none."""
        present = optimizer.position
        for checkpoint in optimizer.checkpoints():
            if present.sealed and checkpoint.generation == present.generation:
                return self._listed.entry(optimizer, checkpoint).get("totals")
        return None

    def sync(self, optimizer: OffloadedOptimizer) -> None:
        """Let pins follow what folders refer to now, between two saves."""
        change_pins(optimizer, lambda: self._changed_pins(optimizer))

    def _changed_pins(self, optimizer: OffloadedOptimizer) -> dict[str, str | None]:
        """Return names of pins to add, with the checkpoint's path, and to remove, with None."""
        changed: dict[str, str | None] = {}
        survey = self._listed.survey(optimizer)
        for checkpoint in optimizer.checkpoints():
            uses = survey.uses.get(checkpoint.generation)
            if uses is None:
                continue
            name = f"{self._library}-{checkpoint.step}"
            is_pinned = name in checkpoint.pins
            is_used = any(use.status == "refers" for use in uses)
            if not is_pinned and is_used:
                changed[name] = checkpoint.path
            elif is_pinned and all(use.status == "removed" for use in uses):
                try:  # power loss must not bring back a folder whose checkpoint is gone
                    for use in uses:
                        make_durable(use.folder)
                except OSError as error:
                    _log.warning("%s stays pinned as %s: %s", checkpoint.path, name, error)
                    continue
                log_released(checkpoint, name, uses)
                changed[name] = None
            elif is_pinned and not is_used and name not in self._told:
                self._told.add(name)
                log_kept(checkpoint, name, uses, optimizer.directories[0])
        return changed

    def go_back(self, optimizer: OffloadedOptimizer, state_dict: Mapping[str, Any]) -> None:
        """Restore the checkpoint that a reference names, with its parameters, if newer ones exist.

        Call this before `load_state_dict`, which refuses references to any checkpoint but the
        newest. Newer checkpoints of folders that were never finished, or have been removed, are
        withdrawn, with a warning. A state dict that is not a reference is ignored.

        Raises:
            MismatchError: Newer checkpoints are in use, or the checkpoint does not exist any more,
                or was never sealed. The message says what to do. Nothing has been changed.
            PinError: A newer checkpoint has a pin that is not of this library. Nothing has been
                changed.
        """
        wanted = reference_of(state_dict)
        if wanted is None:
            return
        present = optimizer.position  # on every rank, since it may wait for a step of all of them
        going = decide(optimizer, lambda: self._way_back(optimizer, wanted, present))
        if going is None:
            return
        path, names = going
        for name in names:
            optimizer.unpin(name)
        optimizer.restore(path, discard_newer=True)

    def _way_back(
        self, optimizer: OffloadedOptimizer, wanted: Position, present: Position
    ) -> tuple[str, list[str]] | None:
        """Return the checkpoint to restore, and the pins to remove before; None for neither."""
        if present.is_same_as(wanted):
            return None
        if not wanted.sealed:  # checked before the store: without checkpoints it has no lasting id
            raise MismatchError(
                f"load_state_dict() got a reference to {wanted}: the folder was saved without "
                f"sealing the state, which is lost. {self._attach}"
            )
        if wanted.store != present.store:
            return None
        found = self._find(optimizer, wanted)
        if found is None:
            return None
        newer = [c for c in optimizer.checkpoints() if c.generation > found.generation]
        survey = self._listed.survey(optimizer)
        store = optimizer.directories[0]
        used = [use for c in newer if (use := self._describe_use(survey, c, store))]
        if used and not self._discard_newer:
            raise MismatchError(
                f"continuing from step {wanted.step} would withdraw newer checkpoints of "
                f"{store}: {'; '.join(used)}. {self._remedy}"
            )
        return (found.path, self._given_up(found, newer)) if newer else None

    def _given_up(self, found: CheckpointInfo, newer: list[CheckpointInfo]) -> list[str]:
        """Return the pins of checkpoints that are about to be withdrawn, with a warning.

        None are returned if there are pins of others. Then restoring raises PinError.
        """
        own = {f"{self._library}-{c.step}" for c in newer}
        names = {name for c in newer for name in c.pins}
        if not names <= own:
            return []
        listed = ", ".join(os.path.basename(c.path) for c in newer)
        warnings.warn(
            f"continuing from {found.path}; the newer checkpoints are withdrawn: {listed}",
            RuntimeWarning,
            stacklevel=2,
        )
        return sorted(names)

    def _find(self, optimizer: OffloadedOptimizer, wanted: Position) -> CheckpointInfo | None:
        """Return the checkpoint that a reference names.

        The result is None if the checkpoint is gone, and no complete folder has one either. If one
        has, the error names it.
        """
        for checkpoint in optimizer.checkpoints():
            if (checkpoint.step, checkpoint.generation) == (wanted.step, wanted.generation):
                return checkpoint
        listed = self._listed.survey(optimizer).uses.values()
        uses = [use for each in listed for use in each or ()]
        usable = [use.folder for use in uses if use.status == "refers"]
        if usable:
            raise MismatchError(
                f"load_state_dict() got a reference to {wanted}, which {optimizer.directories[0]} "
                f"does not have any more. Folders to continue from: {', '.join(usable)}"
            )
        return None

    def _describe_use(self, survey: Survey, checkpoint: CheckpointInfo, store: str) -> str:
        """Return the text that says which folders use a checkpoint; empty if it is not in use."""
        base = os.path.basename(checkpoint.path)
        uses = survey.uses.get(checkpoint.generation)
        if uses is None:
            return f"{base}, which was not made for a folder of {self._library}"
        using = [use.folder for use in uses if use.status in ("refers", "unreadable", "missing")]
        if using:
            return f"{base}, which {', '.join(using)} refers to"
        name = f"{self._library}-{checkpoint.step}"
        gone = [use.folder for use in uses if use.is_in_doubt]
        if not gone or name not in checkpoint.pins:
            return ""
        return (
            f"{base}, pinned as {name} for {gone[0]}, which is gone: if it was moved, continue "
            f"from where it is; if it was removed: offload unpin {store} {name}"
        )

    def _train_state(self, optimizer: OffloadedOptimizer, step: int) -> dict[Any, Any]:
        """Return a copy of the train state of a step; empty if the step has not been sealed."""
        for checkpoint in optimizer.checkpoints():
            if checkpoint.step == step:
                return dict(read_train_state(optimizer, checkpoint, rank_of(optimizer)))
        return {}


def _uses_of_step(optimizer: OffloadedOptimizer, survey: Survey, step: int) -> list[Use]:
    """Return what has become of the folders that the checkpoint of a step was sealed for."""
    found = [c.generation for c in optimizer.checkpoints() if c.step == step]
    return [use for generation in found for use in survey.uses.get(generation) or ()]


def _add_hf_files(checkpoint: Checkpoint, folder: str) -> None:
    """Copy config and tokenizer from a folder to its checkpoint, if the folder has them.

    A checkpoint without the model's names does not get them: ``from_pretrained`` would find none of
    its parameters, and would return random ones with no more than a warning.
    """
    if not checkpoint.has_model_names:
        return
    try:
        if os.path.isdir(folder):
            add_hf_files(checkpoint, folder)
    except OSError as error:
        warnings.warn(
            f"{checkpoint.path} is sealed, but config and tokenizer could not be copied to it from "
            f"{folder}: {error}. from_pretrained opens that folder, and not the checkpoint",
            RuntimeWarning,
            stacklevel=2,
        )
