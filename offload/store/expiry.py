"""What a store's retention policy and its pins say about its checkpoints at this moment."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Collection, Iterable, Sequence

from gds import Backend
from gds.waiting import Monitor
from offload.errors import CheckpointNotFoundError, PinError
from offload.format.manifest import Manifest
from offload.format.unreadable import stopping
from offload.retention.pins import FoundPins, Pin, read_pins, remove_pin, sync_pins, write_pin
from offload.retention.policy import (
    BestBy,
    Record,
    Retention,
    describe,
    kept_generations,
    num_wanted,
)
from offload.store.census import Census
from offload.store.opening import StoredCheckpoint, find_stored
from offload.store.places import NOTHING_CHANGED
from offload.store.poison import Poison
from offload.store.writer_lock import WriterLock


class Keeping:
    """Retention and pins of one store.

    Pins are read anew for each answer: other processes make and remove them meanwhile. While one
    cannot be read, nothing counts as expired.

    Args:
        backend: Where the store is.
        directory: The store.
        policy: Which checkpoints to keep, besides pinned ones.
        checkpoints: The store's own list of those there are, oldest first.
        changed: Held where `checkpoints` changes, and while a pin is made.
        poison: Taken note of where pins are made and removed.
        lock: The right to write to the store.
        census: Keeps `checkpoints` true to what is on the drives.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        policy: Retention,
        checkpoints: Sequence[StoredCheckpoint],
        changed: Monitor,
        poison: Poison,
        lock: WriterLock,
        census: Census,
    ) -> None:
        self._backend = backend
        self._directory = directory
        self._policy = policy
        self._checkpoints = checkpoints
        self._changed = changed
        self._poison = poison
        self._lock = lock
        self._census = census
        self._ranked: set[str] = set()
        """Metrics of the policy that were given once, or have been warned of."""
        self._missed: dict[str, int] = {}
        """Others: the first step that was sealed without."""

    @property
    def current(self) -> list[StoredCheckpoint]:
        """All checkpoints but those that were given up, oldest first."""
        return [c for c in self._checkpoints if not c.superseded]

    def pins(self) -> FoundPins:
        """Return the pins that there are."""
        return read_pins(self._backend, self._directory)

    def expired(self, incoming: Record | None = None) -> list[StoredCheckpoint]:
        """Return the checkpoints that nothing keeps, oldest first.

        Args:
            incoming: One that is being sealed, and counts as the newest.
        """
        found = self.pins()
        if found.unreadable:
            return []
        current = self.current
        if (
            incoming is not None
        ):  # which takes the place of the one of its own step, if there is one
            current = [c for c in current if c.manifest.step != incoming.step]
        records = _records(current, found)
        if incoming is not None:
            records.append(incoming)
        kept = kept_generations(self._policy, records)
        return [c for c in current if c.manifest.generation not in kept]

    def num_slots(self) -> int:
        """Return how many slots the store needs: what is kept, and one to work in."""
        return num_wanted(self._policy, _records(self.current, self.pins())) + 1

    def warn(self, refused: Sequence[str]) -> None:
        """Warn about pins that cannot be read, and those of checkpoints that are not there.

        Args:
            refused: Paths of what is there and is not usable, of which others speak.

        Raises:
            gds.StorageError: A pin cannot be read at this moment, which says nothing about it.
        """
        found = self.pins()
        if found.failures:
            raise found.failures[0]
        messages = [f"{reason}; until then no checkpoint expires" for reason in found.unreadable]
        messages += [
            f"{self._directory}: the checkpoint that was pinned as {pin.name!r}, {pin.checkpoint} "
            f"of generation {pin.generation}, is not there any more; "
            f"`offload unpin {self._directory} {pin.name}` removes the pin"
            for pin in found.dangling([(c.path, c.manifest) for c in self._checkpoints])
            if f"{self._directory}/{pin.checkpoint}" not in refused
        ]
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def warn_unranked(self, step: int, metrics: Collection[str]) -> None:
        """Warn once, at the second step sealed without it, of a metric that nobody has ever given.

        At the first it may still be measured: it can be given afterwards.

        Args:
            step: That is being sealed.
            metrics: Names of what it is given, finite or not.
        """
        for metric in {part.metric for part in self._policy.parts if isinstance(part, BestBy)}:
            if metric in metrics or any(metric in c.manifest.metrics for c in self.current):
                self._ranked.add(metric)
            if metric in self._ranked or self._missed.setdefault(metric, step) == step:
                continue
            self._ranked.add(metric)
            given = f"got {', '.join(map(repr, metrics))}" if metrics else "got no metrics"
            warnings.warn(
                f"{self._directory}: no checkpoint has the metric {metric!r}, so "
                f"BestBy({metric!r}) keeps none; {given} for step {step}. Call "
                f"checkpoint(train_state, metrics={{{metric!r}: value}}) where it is measured",
                RuntimeWarning,
                stacklevel=3,
            )

    def is_pinned(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint must not be withdrawn; asked with an exclusive lock on it.

        Makes what it goes by durable: a pin that has been moved away from this checkpoint might
        else be found on it again after a loss of power, and have lost what it was moved to keep.
        """
        with self._poison.on_error("the pins could not be made durable"):
            sync_pins(self._backend, self._directory)
        found = self.pins()
        return bool(found.unreadable or found.of(checkpoint.path, checkpoint.manifest))

    def pin(self, name: str, which: int | str | None = None) -> None:
        """Pin a checkpoint, by default the newest; durable on return.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            PinError: A pin cannot be called that.
            StoreError: This process may not write to the store any more.
            gds.StorageError: It could not be made durable, or there is no space for it.
        """
        with self._changed:  # so that it is not withdrawn meanwhile
            self._lock.require()
            self._census.take()
            if which is not None:
                checkpoint = find_stored(self._checkpoints, which, self._directory)
            elif self.current:
                checkpoint = self.current[-1]
            else:
                raise CheckpointNotFoundError(
                    errno.ENOENT, "there is no checkpoint in this store yet", self._directory
                )
            guard = self._poison.on_error("a pin could not be made durable")
            pin = pin_of(name, checkpoint.path, checkpoint.manifest)
            write_pin(self._backend, self._directory, pin, guard)

    def unpin(self, name: str) -> None:
        """Remove a pin; durable on return.

        Raises:
            CheckpointNotFoundError: There is no pin of this name.
            gds.StorageError: It could not be removed durably.
        """
        with self._changed:
            self._lock.require()
            guard = self._poison.on_error("a pin could not be removed")
            remove_pin(self._backend, self._directory, name, guard)

    def require_none(self, what: str) -> None:
        """Check that no checkpoint is pinned; as `require_none_after`.

        Raises:
            UnreadableError: A pin cannot be read at this moment, which says nothing about it.
        """
        with stopping(NOTHING_CHANGED):
            if failures := self.pins().failures:
                raise failures[0]
        self._require_unpinned(self._checkpoints, what)

    def require_none_after(self, checkpoint: StoredCheckpoint) -> None:
        """Check that everything newer than a checkpoint may be withdrawn.

        Raises:
            PinError: Some of it is pinned, or it cannot be told.
        """
        generation = checkpoint.manifest.generation
        newer = [c for c in self._checkpoints if c.manifest.generation > generation]
        self._require_unpinned(newer, f"going back to step {checkpoint.manifest.step}")

    def require_replaceable(self, path: str) -> None:
        """Check that another checkpoint may take the place of what is at a path, if anything is.

        Makes what it goes by durable, as `is_pinned` does.

        Raises:
            PinError: That is pinned, usable or not.
        """
        if self._backend.stat(path) is None:
            return
        with self._poison.on_error("the pins could not be made durable"):
            sync_pins(self._backend, self._directory)
        found = self.pins()
        if names := found.at(path):
            raise PinError(
                f"{path}: pinned as {_listed(names)}, and sealing this step anew would replace it. "
                f"{self._remedy(names)}, or take another step first"
            )
        if found.unreadable:
            raise PinError(f"{path}: would be replaced, and {found.unreadable[0]}")

    def describe(self) -> str:
        """Return what is kept, in words that go after "keeping"."""
        words = describe(self._policy)
        pins = [f"{pin.name!r} ({pin.checkpoint})" for pin in self.pins().pins]
        return f"{words} and the pinned {', '.join(pins)}" if pins else words

    def advice(self) -> str:
        """Return what could make room, besides removing other things; may be empty."""
        found = self.pins()
        unpin = f"unpin with `offload unpin {self._directory} NAME`" if found.pins else ""
        return "; ".join(part for part in (unpin, *found.unreadable) if part)

    def _require_unpinned(self, checkpoints: Iterable[StoredCheckpoint], what: str) -> None:
        found = self.pins()
        for checkpoint in checkpoints:
            if names := found.of(checkpoint.path, checkpoint.manifest):
                raise PinError(
                    f"{checkpoint.path}: pinned as {_listed(names)}, and {what} would withdraw "
                    f"it. {self._remedy(names)} if you no longer want it"
                )
            if found.unreadable:
                raise PinError(f"{what} would withdraw checkpoints, and {found.unreadable[0]}")

    def _remedy(self, names: Sequence[str]) -> str:
        calls = " and ".join(f"unpin({name!r})" for name in names)
        return f"Call {calls}, or run `offload unpin {self._directory} {names[0]}`,"


def record_of(manifest: Manifest, pins: tuple[str, ...] = ()) -> Record:
    """Return what a policy is told of a checkpoint."""
    return Record(manifest.step, manifest.generation, manifest.created, manifest.metrics, pins)


def pin_of(name: str, path: str, manifest: Manifest) -> Pin:
    """Return the pin that gives a checkpoint a name."""
    return Pin(
        name=name,
        checkpoint=path.rpartition("/")[2],
        store_id=manifest.store_id,
        generation=manifest.generation,
    )


def _records(checkpoints: Iterable[StoredCheckpoint], found: FoundPins) -> list[Record]:
    return [record_of(c.manifest, found.of(c.path, c.manifest)) for c in checkpoints]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
