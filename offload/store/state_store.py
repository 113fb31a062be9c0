"""The store as the training state uses it: what a store of one process and one of ranks offer.

`offload.store.store.Store` is the store of one process. `offload.distributed` has the store of a
rank, in which these calls are agreed with all other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from gds import Backend
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.recut.source import Recode, RecutSource
from offload.errors import DamagedError
from offload.format.boxes import Cut
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.train_state import EncodedState
from offload.journal import Journal
from offload.retention.pins import FoundPins
from offload.store.expiry import Leaving
from offload.store.opening import StoredCheckpoint
from offload.store.owner_store import OwnerStore
from offload.store.quarantine import quarantined_after, two_in_a_row_message
from offload.store.sealing import Composition
from offload.store.slots.slot import OwnerSlot, Slot
from offload.store.store import Store
from offload.units import size

StateSlot: TypeAlias = Slot | OwnerSlot
"""Slot that holds the state of this process: the whole state, or that of one owner."""

StateSource: TypeAlias = StateSlot | RecutSource
"""What a step reads: a slot, or a checkpoint that was made in another cut."""


class Keeper(Protocol):
    """Retention policy and pins of a store; see `offload.store.expiry.Keeping`."""

    @property
    def current(self) -> list[StoredCheckpoint]:
        """Usable checkpoints that no fresh start has given up."""

    @property
    def leaving(self) -> Leaving:
        """Checkpoints that are being copied to a tier, or wait for it."""

    def pins(self) -> FoundPins:
        """Read the pins from the drive."""

    def num_slots(self) -> int:
        """Return the number of slots that retention is sure to need."""

    def warn(self, refused: Sequence[str]) -> None:
        """Warn about pins of checkpoints that do not exist."""

    def warn_unranked(self, step: int, metrics: Collection[str]) -> None:
        """Warn if a checkpoint lacks a metric that the policy ranks by."""

    def pin(self, name: str, which: int | str | None = None) -> None:
        """Pin a checkpoint, durably."""

    def unpin(self, name: str) -> None:
        """Remove a pin, durably."""

    def require_no_newer_pins(self, checkpoint: StoredCheckpoint) -> None:
        """Raise `PinError` if a checkpoint newer than the given one is pinned."""

    def require_replaceable(self, path: str) -> None:
        """Raise an error if a checkpoint is at a path and may not be replaced."""


class Sealer(Protocol):
    """What turns a written slot into a checkpoint; see `offload.store.sealing.Sealing`."""

    def path_of(self, step: int) -> str:
        """Return the path that the checkpoint of a step has."""

    def begin(self, manifest: Manifest) -> None:
        """Record that a seal is in flight."""

    def end(self) -> None:
        """Record that no seal is in flight."""

    def compose(self, slot: Any, train_state: EncodedState, **content: Any) -> Composition:
        """Describe the checkpoint that a slot will be; see `offload.store.sealing.compose`.

        Args:
            slot: Slot that `StateStore.acquire` has returned.
            train_state: Train state of the user.
            content: Keyword arguments of `offload.store.sealing.compose`.
        """

    def seal(
        self, slot: Any, composition: Composition, model_digests: Sequence[str]
    ) -> StoredCheckpoint:
        """Make a slot the newest checkpoint; durable on return."""

    def abandon(self, error: BaseException) -> None:
        """Record that the seal that `begin` has announced failed. Never raises."""


class StateStore(Protocol):
    """Checkpoints, slots and locks of a training; see `offload.store.store.Store`."""

    @property
    def backend(self) -> Backend:
        """Backend of the first directory."""

    @property
    def directory(self) -> str:
        """Absolute path of the first directory."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Absolute paths of all directories, one on each drive."""

    @property
    def state_directories(self) -> tuple[str, ...]:
        """Directories that have the state of this process, one on each drive."""

    @property
    def store_id(self) -> str:
        """Identity of the store."""

    @property
    def served(self) -> Store | OwnerStore:
        """What this process writes: the store, or the parts of one of its owners."""

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """All usable checkpoints, oldest first."""

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Paths that look like checkpoints but are not usable, each with the reason."""

    @property
    def newest(self) -> StoredCheckpoint | None:
        """Usable checkpoint of the highest generation, or None; superseded ones do not count."""

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed in this process."""

    @property
    def journal(self) -> Journal:
        """Events that are logged when this process holds none of the store's locks."""

    @property
    def keeping(self) -> Keeper:
        """Retention policy and pins."""

    @property
    def sealing(self) -> Sealer:
        """What turns written slots into checkpoints."""

    def find(self, which: int | str) -> StoredCheckpoint:
        """Return the checkpoint with a step number, or with a path or directory name."""

    def warn_of_lost(self) -> None:
        """Warn of checkpoints that were found unusable because of other programs."""

    def refresh(self, *, warn_of_refused: bool = True) -> None:
        """Compare `checkpoints` with the drives."""

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is unchanged and not quarantined."""

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check that the drives have room for all slots that retention is sure to need."""

    def acquire(self, layout: Layout, num_groups: int, *, is_new: bool = False) -> StateSlot:
        """Return a slot to write the next generation into.

        Args:
            layout: Layout of the slot.
            num_groups: Number of parameter groups.
            is_new: Whether it must not be the slot of a seal that was aborted, in which ranks go on
                otherwise; the same on all ranks.
        """

    def release(self, slot: Any) -> None:
        """Take back a slot that was acquired and will not be sealed."""

    def expire(self) -> None:
        """Free a slot for the next step if none is free."""

    def replace_train_state(self, checkpoint: StoredCheckpoint, train_state: EncodedState) -> None:
        """Replace a checkpoint's train state atomically; durable on return."""

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest atomically; durable on return."""

    def fits(self, checkpoint: StoredCheckpoint, cuts: Mapping[str, Cut] | None) -> bool:
        """Return whether this process has stored its state of a checkpoint in its present cut.

        Args:
            checkpoint: One of `checkpoints`.
            cuts: Box of each parameter that this process steps, by name; None for whole ones.
        """

    def seen_state(self, checkpoint: StoredCheckpoint) -> Collection[int]:
        """Return which parameters have state that this process sees, for `recut`.

        Returns:
            Indices in `Layout.model`; none if every rank sees everything.
        """

    def recut(
        self,
        checkpoint: StoredCheckpoint,
        cuts: Mapping[str, Cut] | None,
        *,
        with_state: Collection[int] = (),
        recode: Recode | None = None,
        shares: Sequence[int] = (1,),
    ) -> RecutSource:
        """Return the state of a checkpoint in the present cut of this process, for reading.

        Args:
            checkpoint: One of `checkpoints`.
            cuts: Box of each parameter that this process steps, by name; None for whole ones.
            with_state: What `seen_state` returns on any rank.
            recode: Function that encodes 8-bit state anew where the cut divides its blocks; None
                if that is not allowed.
            shares: Shares of the drives over which one process spreads the state.
        """

    def require_recut_room(self, layout: Layout, num_groups: int) -> None:
        """Check that there is room for the first slot of another cut. Collective."""

    def slot_of(self, checkpoint: StoredCheckpoint) -> StateSlot:
        """Return a checkpoint's open files."""

    def checkpoint_of(self, slot: Any) -> StoredCheckpoint | None:
        """Return the usable checkpoint that a slot is; None if it is none."""

    def reader_of(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        """Return a checkpoint as readers see it."""

    def fetch(self, checkpoint: StoredCheckpoint) -> None:
        """Bring what ranks do not see of a checkpoint to them. Collective."""

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a damaged checkpoint from use, durably."""

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw, durably, every checkpoint that is newer than the given one."""

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""


def try_to_quarantine(store: StateStore, damaged: StoredCheckpoint, error: DamagedError) -> str:
    """Quarantine a damaged checkpoint, unless a newer one is quarantined already.

    Returns:
        Empty if the checkpoint has been quarantined; otherwise the reason why not, and advice.
    """
    refused = [path for path, _ in store.refused]
    newer = quarantined_after(store.backend, refused, damaged.manifest.generation)
    if newer is None:
        store.quarantine(damaged, str(error))
        return ""
    return two_in_a_row_message(damaged.path, newer, store.directories)


_LEAST_BYTES = 1 << 30
"""Smallest number of frozen bytes in a checkpoint that is worth a warning."""

_RATIO = 10
"""Smallest ratio of frozen bytes to trained bytes that is worth a warning. Smaller ratios occur in
models with large buffers as well."""


class FrozenSpace:
    """Warns once if most of each checkpoint will be parameters and buffers that are not trained."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._has_looked = False

    @property
    def is_due(self) -> bool:
        """Whether `warn` is due: it has not been called yet, and the store has no checkpoint."""
        return not self._has_looked and not self._store.keeping.current

    def warn(self, layout: Layout) -> None:
        """Warn of the disk space that frozen bytes will take, if the amount is large.

        The warning names the line of code of the caller's caller, which should be the user's call.
        """
        self._has_looked = True
        trained_names = {parameter.name for parameter in layout.parameters}
        trained = sum(t.nbytes for t in layout.model if t.name in trained_names)
        frozen = sum(t.nbytes for t in layout.model) - trained
        if frozen < _LEAST_BYTES or frozen < _RATIO * trained:
            return
        store = self._store
        num_slots = store.keeping.num_slots()
        if not num_slots:
            return  # another rank writes the store, and warns
        space = size(num_slots * frozen)
        if store.backend.capabilities(store.directory).clones:
            space = (
                f"{size(frozen)} in all, and not {space}, as this file system lets checkpoints "
                "share what is the same in them"
            )
        warnings.warn(
            f"{store.directory}: each checkpoint holds {size(frozen)} of frozen parameters and "
            f"buffers beside {size(trained)} that are trained, and the store keeps {num_slots} "
            f"slots: {space}. To keep only what is trained, construct without model=, give the "
            "optimizer only the parameters that are trained, and use another directory",
            RuntimeWarning,
            stacklevel=3,
        )
