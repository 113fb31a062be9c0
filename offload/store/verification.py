"""Verification of checkpoints and of whole stores, even beside a training process.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gds import PosixBackend
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import checkpoints_of
from offload.checkpoint.opening import open_checkpoint
from offload.checkpoint.verify import VerifyReport
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    OffloadError,
    RecycledError,
    StoreBusyError,
)
from offload.format.names import LOCK_NAME, MANIFEST_NAME, is_checkpoint_path, owner_number
from offload.store.quarantine import verify_and_mark

Progress: TypeAlias = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Function that is called with the path of a checkpoint before it is read. It returns a context
with a function that is called with the bytes done and the total."""

_BUSY_S = 60.0
"""Longest wait in seconds for a checkpoint that a writer is about to recycle or to replace."""

_BUSY_POLL_S = 0.1

_MOST_ROUNDS = 100
"""Largest number of attempts to open the newest checkpoint of a store before it is recycled."""


@dataclass(slots=True)
class Verified:
    """Result for one checkpoint, or for a store that could not be examined."""

    path: str
    report: VerifyReport
    lifted: bool = False
    """Whether a mark was removed."""
    recorded: list[str] = field(default_factory=list)
    """Directories on further drives that were read because the manifest names them."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        found = dataclasses.asdict(self.report)
        del found["damaged_parts"], found["whole_parts"]
        own = {"lifted": self.lifted, "recorded": self.recorded}
        return {"path": self.path, "ok": self.report.ok, **found, **own}


class Verification:
    """Verifies paths one after the other, and collects the results.

    Args:
        parts: Present directories of the state on further drives; None for those in the manifests.
        mark: Whether to mark damaged checkpoints, and to lift the marks of whole ones.
        progress: Function that shows how far it is.
    """

    def __init__(self, parts: list[str] | None, *, mark: bool, progress: Progress) -> None:
        self._parts = parts
        self._mark = mark
        self._progress = progress
        self.results: list[Verified] = []
        self.recycled: list[str] = []
        """Paths of checkpoints that were recycled before they could be opened."""

    def verify_below(self, directory: str) -> None:
        """Verify all stores in and below a directory. An error in one does not stop the others.

        Raises:
            CheckpointError: There is no store.
        """
        unlisted: list[OSError] = []
        stores = list(_stores_below(directory, unlisted))
        if not stores and not unlisted:
            raise CheckpointError(f"{directory}: no store in this directory or below it")
        for error in unlisted:
            name = os.fsdecode(error.filename or directory)
            self._add(name, unreadable=(f"{name}: {error.strerror}",))
        for store in stores:
            try:
                self.verify(store, may_be_empty=True)
            except (OffloadError, OSError) as error:
                self._add(store, unreadable=(str(error),))

    def verify(self, path: str, *, may_be_empty: bool) -> None:
        """Verify a checkpoint, or all checkpoints of a store.

        Raises:
            CheckpointError: The path is no store, or one without a checkpoint.
            UnreadableError: The store could not be listed.
        """
        # A directory with a manifest, or with the name of a checkpoint, is a checkpoint. Any other
        # directory may be a store.
        if is_checkpoint_path(path) or os.path.exists(os.path.join(path, MANIFEST_NAME)):
            self._verify_checkpoint(path)
            return
        names: list[str] = []
        for _ in range(_MOST_ROUNDS):
            names = _checkpoints_of(path)
            # Start with the newest: if it has been recycled all the same, list the store again.
            if not names or not self._is_recycled_at(names[-1]):
                break
        if not names and not may_be_empty:
            raise CheckpointError(f"{path}: holds no checkpoint")
        for name in names[:-1]:
            self._is_recycled_at(name)

    def _is_recycled_at(self, name: str) -> bool:
        """Verify a listed checkpoint; return whether it was recycled before it could be opened."""
        before = len(self.recycled)
        try:
            self._verify_checkpoint(name)
        except CheckpointNotFoundError:
            self.recycled.append(name)
        return len(self.recycled) > before

    def _verify_checkpoint(self, name: str) -> None:
        try:
            opened = self._open(name)
        except RecycledError:
            self.recycled.append(name)
            return
        except StoreBusyError as error:
            self._add(name, unreadable=(f"{name}: {error.strerror}",))
            return
        except CheckpointError as error:  # so damaged that it cannot even be opened
            self._add(name, problems=(str(error),))
            return
        recorded = opened.parts if opened.parts_are_only_recorded else []
        with opened, self._progress(name) as progress:
            was_quarantined = bool(opened.quarantined)
            report = verify_and_mark(opened, progress) if self._mark else opened.verify(progress)
        self.results.append(
            Verified(
                name,
                report,
                lifted=was_quarantined and not report.quarantined,
                recorded=[os.path.dirname(part) for part in recorded],
            )
        )

    def _add(
        self, path: str, *, problems: tuple[str, ...] = (), unreadable: tuple[str, ...] = ()
    ) -> None:
        """Add the result for a checkpoint of which nothing was read, or for a store."""
        self.results.append(Verified(path, VerifyReport(problems, 0, unreadable)))

    def _open(self, name: str) -> Checkpoint:
        """Open a checkpoint. Wait if a writer is about to recycle or to replace it."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                return open_checkpoint(name, parts=self._parts, even_quarantined=True)
            except RecycledError:
                raise
            except StoreBusyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_POLL_S)


def _checkpoints_of(store: str) -> list[str]:
    with PosixBackend() as backend:
        return checkpoints_of(backend, os.path.abspath(store))


def _stores_below(directory: str, unlisted: list[OSError]) -> Iterator[str]:
    """Yield every store in and below a directory, which may itself be a store."""
    for folder, folders, names in os.walk(directory, onerror=unlisted.append):
        if LOCK_NAME in names or any(name.startswith("step-") for name in folders):
            yield folder
        parts_of_a_store = ("step-", ".slot-", "part-")
        # lost+found holds files that fsck has recovered. It belongs to root, and is not a store.
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(parts_of_a_store)
            and f != "lost+found"
            and not (LOCK_NAME in names and owner_number(f) is not None)
        )
