"""Expiry of checkpoints, which a store's retention policy and pins decide.

Retention keeps a checkpoint that is leaving for a tier, although its policy would let it go, as
long as there is room for another slot. If there is none and the next step needs a slot, the
checkpoint is recycled, and its copy is given up. An upload never holds up a step.
"""

from __future__ import annotations

import errno
import shlex
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from offload.errors import CheckpointNotFoundError, PinError
from offload.format.manifest import Manifest
from offload.format.unreadable import as_unreadable
from offload.retention.pins import FoundPins, Pin, PinReader, remove_pin, sync_pins, write_pin
from offload.retention.policy import (
    Record,
    Retention,
    as_prune_options,
    describe,
    keeps_parameters_only,
    kept_generations,
    metrics_of,
    num_wanted,
    whole_generations,
)
from offload.store.census import Census
from offload.store.opening import StoreContent, StoredCheckpoint, find_stored
from offload.store.store_errors import NOTHING_CHANGED

Stage = Literal["sending", "waiting"]
"""What happens to a checkpoint that is leaving: it is being sent, or waits until it can be."""


class Leaving:
    """The checkpoints of one store that are leaving. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[int, Stage] = {}
        self._has_room: bool | None = None

    def begin(self, generation: int, stage: Stage) -> None:
        """Record that a checkpoint is leaving, or that it has come to another stage."""
        with self._lock:
            self._stages[generation] = stage

    def end(self, generation: int) -> None:
        """Record that a checkpoint is not leaving any more: its copy is verified, or given up."""
        with self._lock:
            self._stages.pop(generation, None)

    def stage_of(self, generation: int) -> Stage | None:
        """Return what happens to a checkpoint; None if it is not leaving."""
        with self._lock:
            return self._stages.get(generation)

    def found_room(self, has_room: bool) -> None:
        """Record whether there was room for another slot, so that nothing had to give way."""
        with self._lock:
            self._has_room = has_room

    @property
    def has_room(self) -> bool | None:
        """Whether there was room when it was last needed; None if it has not been needed."""
        with self._lock:
            return self._has_room


class Keeping:
    """Retention policy and pins of one store.

    Pins are looked at again for each answer, because other processes make and remove them. While a
    pin cannot be read, no checkpoint counts as expired.
    """

    def __init__(self, opened: StoreContent, policy: Retention, census: Census) -> None:
        self._backend = opened.backend
        self._directory = opened.directory
        self._policy = policy
        self._checkpoints = opened.checkpoints
        self._changed = opened.changed
        self._poison = opened.poison
        self._lock = opened.lock
        self._census = census
        self._pins = PinReader(opened.backend, opened.directory)
        self.leaving = Leaving()
        """Checkpoints that are being copied to a tier, or wait for it."""
        self._ranked: set[str] = set()
        """Metrics of the policy that need no warning: a checkpoint has had the metric, or a warning
        has been given."""
        self._missed: dict[str, int] = {}
        """First step that was sealed without a metric, by name of the metric."""

    @property
    def current(self) -> list[StoredCheckpoint]:
        """All checkpoints except superseded ones, oldest first."""
        return [c for c in self._checkpoints if not c.superseded]

    @property
    def newest(self) -> StoredCheckpoint | None:
        """The checkpoint of the highest generation, or None.

        Superseded ones do not count, nor those of which only the parameters are left.
        """
        usable = [c for c in self.current if c.manifest.has_state]
        return max(usable, key=lambda c: c.manifest.generation, default=None)

    def pins(self) -> FoundPins:
        """Read the pins of the store."""
        return self._pins.read(each=False)

    def expired(self, incoming: Record | None = None) -> list[StoredCheckpoint]:
        """Return the checkpoints that neither the policy nor a pin keeps, oldest first.

        Nothing is expired while a pin cannot be read.
        """
        return self._not_among(kept_generations, incoming)

    def reducible(self, incoming: Record | None = None) -> list[StoredCheckpoint]:
        """Return the checkpoints with state of which only parameters are kept, oldest first."""
        if not keeps_parameters_only(self._policy):
            return []
        expired = {c.path for c in self.expired(incoming)}
        found = self._not_among(whole_generations, incoming)
        return [c for c in found if c.manifest.can_drop_state and c.path not in expired]

    def _not_among(
        self, choose: Callable[[Retention, list[Record]], set[int]], incoming: Record | None
    ) -> list[StoredCheckpoint]:
        found = self.pins()
        if found.unreadable:
            return []
        current = self.current
        if incoming is not None:
            current = [c for c in current if c.manifest.step != incoming.step]
        records = _records(current, found)
        if incoming is not None:
            records.append(incoming)
        kept = choose(self._policy, records)
        return [c for c in current if c.manifest.generation not in kept]

    def num_slots(self) -> int:
        """Return the number of slots needed for the kept checkpoints and the working slot."""
        return num_wanted(self._policy, _records(self.current, self.pins())) + 1

    def warn(self, refused: Sequence[str]) -> None:
        """Warn about pins that cannot be read, and about pins of checkpoints that do not exist.

        Pins of the unusable checkpoints at the paths `refused` are left out, because other warnings
        report these. A storage error says nothing about the content of a pin.
        """
        found = self.pins()
        if found.failures:
            raise found.failures[0]
        messages = [f"{reason}; until then no checkpoint expires" for reason in found.unreadable]
        messages += [
            f"{self._directory}: the checkpoint that was pinned as {pin.name!r}, {pin.checkpoint} "
            f"of generation {pin.generation}, no longer exists; `offload unpin {self._directory} "
            f"{pin.name}` removes the pin"
            for pin in found.dangling([(c.path, c.manifest) for c in self._checkpoints])
            if f"{self._directory}/{pin.checkpoint}" not in refused
        ]
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def warn_unranked(self, step: int, metrics: Collection[str]) -> None:
        """Warn once about each metric that the policy ranks by but no checkpoint has.

        The warning comes at the second step that is sealed without the metric: after the first one
        it may still be measured, and can be added to the checkpoint. `metrics` are those that were
        given for the step, finite or not.
        """
        for metric in metrics_of(self._policy):
            if metric in metrics or any(metric in c.manifest.metrics for c in self.current):
                self._ranked.add(metric)
            if metric in self._ranked or self._missed.setdefault(metric, step) == step:
                continue
            self._ranked.add(metric)
            given = f"got {', '.join(map(repr, metrics))}" if metrics else "got no metrics"
            warnings.warn(
                f"{self._directory}: no checkpoint has the metric {metric!r}, so "
                f"BestBy({metric!r}) keeps none; {given} for step {step}. Call "
                f"checkpoint(train_state, metrics={{{metric!r}: value}}) when it has been measured",
                RuntimeWarning,
                stacklevel=3,
            )

    def unpinned(self, checkpoints: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Return those of some checkpoints that no pin keeps; the caller has locked all of them.

        If a pin cannot be read, all of them count as pinned.
        """
        found = self._durable_pins() if checkpoints else FoundPins()
        if found.unreadable:
            return []
        return [c for c in checkpoints if not found.names_of(c.path, c.manifest)]

    def pin(self, name: str, which: int | str | None = None) -> None:
        """Pin a checkpoint, by its step, path or name, or else the newest; durable on return."""
        with self._changed:  # prevents a withdrawal meanwhile
            self._lock.require()
            self._census.update()
            if which is not None:
                checkpoint = find_stored(self._checkpoints, which, self._directory)
            elif self.current:
                checkpoint = self.newest or self.current[-1]
            else:
                raise CheckpointNotFoundError(
                    errno.ENOENT, "there is no checkpoint in this store yet", self._directory
                )
            guard = self._poison.fatal("a pin could not be made durable")
            pin = pin_of(name, checkpoint.path, checkpoint.manifest)
            write_pin(self._backend, self._directory, pin, guard)

    def unpin(self, name: str) -> None:
        """Remove a pin; durable on return."""
        with self._changed:
            self._lock.require()
            guard = self._poison.fatal("a pin could not be removed")
            remove_pin(self._backend, self._directory, name, guard)

    def require_no_pins(self, what: str) -> None:
        """Check that no checkpoint is pinned."""
        with as_unreadable(NOTHING_CHANGED):
            if failures := self.pins().failures:
                raise failures[0]
        self._require_unpinned(self._checkpoints, what)

    def given_up_for(self, checkpoint: StoredCheckpoint) -> list[StoredCheckpoint]:
        """Return the newer checkpoints, which going on from this one gives up, newest first.

        If all of them have parameters only, they stay: no restore takes them by itself.
        """
        generation = checkpoint.manifest.generation
        newer = [c for c in self._checkpoints if c.manifest.generation > generation]
        if not any(c.manifest.has_state for c in newer):
            return []
        return sorted(newer, key=lambda c: -c.manifest.generation)

    def require_no_newer_pins(self, checkpoint: StoredCheckpoint) -> None:
        """Check that no checkpoint is pinned that going on from the given one would give up."""
        newer = reversed(self.given_up_for(checkpoint))
        self._require_unpinned(newer, f"going back to step {checkpoint.manifest.step}")

    def require_replaceable(self, path: str) -> None:
        """Check that no pin keeps the checkpoint at a path, which the caller has locked."""
        if self._backend.stat(path) is None:
            return
        found = self._durable_pins()
        if names := found.names_at(path):
            raise PinError(
                f"{path}: pinned as {_listed(names)}, and sealing this step anew would replace it. "
                f"{self._remedy(names)}, or take another step first"
            )
        if found.unreadable:
            raise PinError(
                f"{path}: would be replaced, but it is not known whether it is pinned: "
                f"{found.unreadable[0]}"
            )

    def describe(self) -> str:
        """Return a description of the kept checkpoints that can follow the word "keeping"."""
        words = describe(self._policy)
        pins = [f"{pin.name!r} ({pin.checkpoint})" for pin in self.pins().pins]
        return f"{words} and the pinned {', '.join(pins)}" if pins else words

    def advice(self) -> str:
        """Return advice on removing pins to make room; empty if the store has no pins."""
        found = self.pins()
        unpin = f"unpin with `offload unpin {self._directory} NAME`" if found.pins else ""
        return "; ".join(part for part in (unpin, *found.unreadable) if part)

    def room_advice(self, further: Sequence[str]) -> str:
        """Return advice on making room that gives up nothing which the policy keeps."""
        directory, advice = shlex.quote(self._directory), self.advice()
        lasting = [repr(p) for p in self._policy.parts if p.most is None]
        sentences = [f"{advice[:1].upper()}{advice[1:]}"] if advice else []
        if lasting:
            sentences.append(
                f"{' | '.join(lasting)} keeps more with time: move the store to a larger drive, or "
                f"copy it with `offload push {directory} URL` before you remove any"
            )
        options = as_prune_options(self._policy)
        if options is not None:
            parts = "".join(f" --part {shlex.quote(path)}" for path in further)
            sentences.append(
                f"Once this process has ended, `offload prune {directory} {options}{parts} "
                "--verify` removes only what is not kept"
            )
        return ". ".join(sentences)

    def _durable_pins(self) -> FoundPins:
        """Return the pins, and make durable what can be concluded from them.

        If no pin is on a checkpoint, another process may just have moved one away, and not have
        synced that. Power loss could then move it back after the checkpoint had been recycled, and
        the checkpoint that it had been moved to would lose its pin. So the pins are synced after
        they have been read: a sync before that would miss a pin that is moved in between.
        """
        found = self._pins.read()
        with self._poison.fatal("the pins could not be made durable"):
            sync_pins(self._backend, self._directory)
        return found

    def _require_unpinned(self, checkpoints: Iterable[StoredCheckpoint], what: str) -> None:
        found = self.pins()
        for checkpoint in checkpoints:
            if names := found.names_of(checkpoint.path, checkpoint.manifest):
                raise PinError(
                    f"{checkpoint.path}: pinned as {_listed(names)}, and {what} would withdraw "
                    f"it. {self._remedy(names)} if you no longer want it"
                )
            if found.unreadable:
                raise PinError(
                    f"{what} would withdraw checkpoints, but it is not known whether they are "
                    f"pinned: {found.unreadable[0]}"
                )

    def _remedy(self, names: Sequence[str]) -> str:
        calls = " and ".join(f"unpin({name!r})" for name in names)
        return f"Call {calls}, or run `offload unpin {self._directory} {names[0]}`"


def pin_of(name: str, path: str, manifest: Manifest) -> Pin:
    """Return a pin of a checkpoint."""
    return Pin(
        name=name,
        checkpoint=path.rpartition("/")[2],
        store_id=manifest.store_id,
        generation=manifest.generation,
    )


def _records(checkpoints: Iterable[StoredCheckpoint], found: FoundPins) -> list[Record]:
    if not found.pins:
        return [c.record for c in checkpoints]
    return [replace(c.record, pins=found.names_of(c.path, c.manifest)) for c in checkpoints]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
