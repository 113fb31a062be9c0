"""What a process does with a store, told as short scenes, and what it has promised at each moment.

A `Trainer` plays a scene and notes in the log of its backend which checkpoints may be the newest
from then on. Whoever interrupts the scene anywhere compares what is left with the last note.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

import offload
from gds import Backend
from offload import (
    AdamW,
    Checkpoint,
    DriveTuning,
    EverySteps,
    LastK,
    OffloadError,
    ParametersOnly,
    Retention,
    list_checkpoints,
    open_checkpoint,
)
from tests.stores.training import (
    Model,
    Reference,
    Snapshot,
    add_head,
    backward,
    optimizer_for,
    options,
)

STORE = "/data/run"
DIRECTORIES = (STORE, "/fast/run", "/slow/run")
SHARES = (1, 2, 1)
RESIDENT_BYTES = 40_000
"""Memory for state that stays: some of the chunks."""

HEAD_FROM = 4
"""The step before which the scene ``added group`` begins to train the head."""

EDITED = 7
"""The version in which the scene ``sealed twice`` has edited a buffer."""

MILESTONES = EverySteps(2)


@dataclass(frozen=True)
class Position:
    """Which checkpoint this is, as its train state says."""

    step: int
    history: int = 0
    version: int = 0

    def train_state(self) -> dict[str, object]:
        """Return what is passed to `checkpoint`: also what fills pages, so that it can be torn."""
        seed = self.step * 10_000 + self.history * 100 + self.version
        random_state = torch.Generator().manual_seed(seed).get_state()
        return {**vars(self), "random_state": random_state}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Position:
        """Return which checkpoint it is, all of whose train state must say so."""
        found = dict(checkpoint.train_state)
        random_state = found.pop("random_state")
        position = cls(**found)
        assert torch.equal(random_state, position.train_state()["random_state"])
        return position


@dataclass(frozen=True)
class Promise:
    """What a process may find, whenever it comes."""

    newest: frozenset[Position | None] = frozenset({None})
    """One of these is the newest checkpoint; None stands for an empty store."""

    pins: frozenset[tuple[str, frozenset[int | None]]] = frozenset()
    """By name: the steps one of which it pins; None for no such pin. A pin has a checkpoint."""

    kept: frozenset[int] = frozenset()
    """Steps whose checkpoints are there, because retention keeps them for good."""


@dataclass(frozen=True)
class Case:
    """A scene, how many checkpoints its store keeps, on how many drives, and what steps write."""

    scene: str
    keep: int
    drives: int = 1
    parameters: Literal["drive"] | None = None

    def __str__(self) -> str:
        drives = f"-drives={self.drives}" if self.drives > 1 else ""
        drives += f"-parameters={self.parameters}" if self.parameters else ""
        return f"{self.scene.replace(' ', '-')}-keep={self.keep}{drives}"

    def play(self, backend: Backend, kind: type[Trainer] | None = None) -> None:
        """Play the scene, by trainers of some kind."""
        SCENES[self.scene](functools.partial(kind or Trainer, self, backend))

    @property
    def policy(self) -> int | Retention:
        if self.scene == "parameters only":
            return LastK(self.keep) | ParametersOnly(MILESTONES)
        return LastK(self.keep) | MILESTONES if self.scene == "every second step" else self.keep

    @property
    def has_head(self) -> bool:
        return self.scene == "added group"

    def most_slots(self, last_step: int) -> int:
        milestones = last_step // MILESTONES.steps
        extra = {"every second step": milestones, "parameters only": milestones, "pinned": 2}
        return self.keep + 1 + extra.get(self.scene, 0)

    def expected(self, position: Position) -> Snapshot:
        snapshot = _reference(position.history, self.has_head).after(position.step)
        if position.version != EDITED:
            return snapshot
        edited = torch.zeros_like(snapshot.model["norm.running_mean"])
        return replace(snapshot, model={**snapshot.model, "norm.running_mean": edited})


@functools.cache
def _reference(history: int, with_head: bool) -> Reference:
    return Reference(history, HEAD_FROM if with_head else None)


class Trainer:
    """One process: it trains, seals, and notes what has been promised."""

    def __init__(
        self,
        case: Case,
        backend: Backend,
        *,
        history: int = 0,
        promised: Position | None = None,
        before: Promise = Promise(),
        host_memory: int | str = 0,
        fresh: bool = False,
    ) -> None:
        self.case = case
        self.backend = backend
        self.history = history
        self.promised = promised
        self.pins = dict(before.pins)
        self.kept = before.kept
        self.host_memory = host_memory
        self.open(fresh=fresh)

    def open(self, *, fresh: bool = False) -> None:
        self.model = Model(self.history)
        tuning = DriveTuning(shares=SHARES[: self.case.drives])
        self.optimizer: AdamW = optimizer_for(
            self.model,
            list(DIRECTORIES[: self.case.drives]),
            options(
                self.backend,
                drives=tuning,
                host_memory=self.host_memory,
                parameters=self.case.parameters,
            ),
            keep=self.case.policy,
            fresh=fresh,
            with_head=self.case.has_head and _num_groups(self.backend) == 2,
        )

    def note(self, *allowed: Position | None) -> None:
        if note := getattr(self.backend, "note", None):
            note(Promise(frozenset(allowed), frozenset(self.pins.items()), self.kept))

    def pin(self, name: str, step: int | None, how: Callable[[], object]) -> None:
        """Pin a step, or nothing: while that goes on the name may be found on either."""
        self.pins[name] = self.pins.get(name, frozenset({None})) | {step}
        self.note(self.promised)
        how()
        self.pins[name] = frozenset({step})
        self.note(self.promised)

    def restore(self, step: int | None = None) -> Position | None:
        """Restore, and promise from then on what was restored."""
        checkpoint = self.optimizer.restore(step, discard_newer=step is not None)
        self.promised = None if checkpoint is None else Position.of(checkpoint)
        self.note(self.promised)
        return self.promised

    def train(self, last: int) -> None:
        while (step := self.optimizer.num_steps + 1) <= last:
            if self.case.has_head and step == HEAD_FROM:
                add_head(self.model, self.optimizer)
            before = {n: buffer.clone() for n, buffer in self.model.named_buffers()}
            backward(self.model, step, self.history)
            try:
                self.optimizer.step()
            except OffloadError:  # a forward counts only if its step is taken
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(before[name])
                raise

    def seal(self, step: int, *, version: int = 0, meanwhile: int = 0, **metrics: float) -> None:
        """Train up to a step and seal it, training up to the step `meanwhile` behind the seal."""
        self.train(step)
        position = Position(step, self.history, version)
        self.note(self.promised, position)
        handle = self.optimizer.checkpoint(position.train_state(), metrics=metrics or None)
        self.train(meanwhile)
        handle.result()
        self.promised = position
        if self.case.policy != self.case.keep and step % MILESTONES.steps == 0:
            self.kept |= {step}
        self.note(position)

    def close(self) -> None:
        self.optimizer.close()


def _num_groups(backend: Backend) -> int:
    """Return how many parameter groups the newest checkpoint of the store has."""
    try:
        with open_checkpoint(STORE, backend=backend) as newest:
            return len(newest.hyperparameters)
    except (OSError, ValueError):
        return 0


Open = Callable[..., Trainer]


def three_checkpoints(process: Open) -> None:
    trainer = process()
    for step in (2, 4, 6):
        trainer.seal(step)
    trainer.close()


def sealed_behind_training(process: Open) -> None:
    trainer = process()
    trainer.seal(1, meanwhile=3)
    trainer.seal(3, meanwhile=5)
    trainer.seal(5, meanwhile=6)
    trainer.close()


def resident_state(process: Open) -> None:
    """Some of the state is written by seals only, while the next step wants to change it."""
    trainer = process(host_memory=RESIDENT_BYTES)
    trainer.seal(2, meanwhile=3)
    assert trainer.optimizer.stats().resident_bytes
    trainer.seal(3, meanwhile=5)
    trainer.seal(5)
    trainer.close()
    trainer = process(host_memory="1GiB", promised=trainer.promised)
    assert trainer.restore() == Position(5)
    trainer.seal(6)
    trainer.close()


def two_processes(process: Open) -> None:
    trainer = process()
    trainer.seal(1)
    trainer.seal(3)
    trainer.train(4)
    trainer.close()
    trainer = process(promised=trainer.promised)
    assert trainer.restore() == Position(3)
    trainer.seal(5)
    trainer.close()


def replaced_train_state(process: Open) -> None:
    trainer = process()
    for version in range(4):
        if version == 3:  # then it is all of it, under the same name
            trainer.optimizer.param_groups[0]["note"] = "changed"
        trainer.seal(2, version=version, measured=version)
    trainer.seal(3)
    trainer.seal(3, version=1, measured=1)
    trainer.seal(4)
    trainer.close()


def added_group(process: Open) -> None:
    trainer = process()
    for step in (2, 4, 5):
        trainer.seal(step)
    trainer.close()


def started_over(process: Open) -> None:
    """`fresh=True`: the old history stays until the new one is durable; its names are met again."""
    trainer = process()
    for step in (1, 2):
        trainer.seal(step)
    trainer.close()
    trainer = process(history=1, promised=trainer.promised, fresh=True)
    for step in (1, 2, 3):
        trainer.seal(step)
    trainer.close()


def gone_back(process: Open) -> None:
    """`discard_newer=True`: until it returns any checkpoint may be the newest; then the chosen."""
    trainer = process()
    for step in (1, 2):
        trainer.seal(step)
    oldest = min(info.step for info in list_checkpoints(STORE, backend=trainer.backend.inner))
    trainer.note(*(Position(step) for step in range(oldest, 3)))
    assert trainer.restore(oldest) == Position(oldest)
    trainer.seal(3)
    trainer.seal(4)
    trainer.close()


def sealed_twice(process: Open) -> None:
    """The same step with an edited buffer, and as it was: the new one takes the old one's name."""
    trainer = process()
    trainer.seal(2)
    saved = trainer.model.norm.running_mean.clone()
    trainer.model.norm.running_mean.zero_()
    trainer.seal(2, version=EDITED)
    trainer.model.norm.running_mean.copy_(saved)
    trainer.seal(2, version=EDITED + 1)
    trainer.seal(3)
    trainer.close()


def pinned(process: Open) -> None:
    """Names are given, moved and removed, by the process that trains and beside it."""
    trainer = process()
    backend = trainer.backend
    trainer.seal(1)
    trainer.pin("best", 1, lambda: trainer.optimizer.pin("best"))
    trainer.seal(2, meanwhile=3)
    trainer.pin("other", 2, lambda: offload.pin(f"{STORE}/step-00000002", "other", backend=backend))
    trainer.seal(3)
    trainer.pin("best", 3, lambda: trainer.optimizer.pin("best", 3))
    trainer.seal(4)
    trainer.close()
    before = Promise(pins=frozenset(trainer.pins.items()))
    second = process(promised=trainer.promised, before=before)
    assert second.restore() == Position(4)
    second.pin("other", None, lambda: offload.unpin(STORE, "other", backend=backend))
    second.pin("best", None, lambda: second.optimizer.unpin("best"))
    second.seal(5)
    second.close()


def every_second_step(process: Open) -> None:
    """More and more checkpoints have come to stay, beside those that are recycled."""
    trainer = process()
    for step in range(1, 4):
        trainer.seal(step)
    trainer.seal(4, meanwhile=5)
    trainer.seal(5)
    trainer.close()


def parameters_only(process: Open) -> None:
    """Every second checkpoint gives up its state, and what it gave up is written again."""
    trainer = process()
    for step in range(1, 4):
        trainer.seal(step)
    trainer.seal(4, meanwhile=5)
    trainer.seal(5)
    trainer.close()
    before = Promise(kept=trainer.kept)
    second = process(promised=trainer.promised, before=before)
    assert second.restore() == Position(5)
    second.seal(6)
    second.seal(7)
    second.close()


SCENES: dict[str, Callable[[Open], None]] = {
    scene.__name__.replace("_", " "): scene
    for scene in (
        three_checkpoints, sealed_behind_training, resident_state, two_processes,
        replaced_train_state, added_group, started_over, gone_back, sealed_twice, pinned,
        every_second_step, parameters_only,
    )
}  # fmt: skip

# A smoke test plays each scene, and some again where more is kept, or on two drives.
SMOKE = [
    *[Case(scene, 1) for scene in SCENES],
    Case("two processes", 2),
    Case("gone back", 2),
    Case("three checkpoints", 1, 2),
    Case("added group", 1, 2),
    Case("parameters only", 1, 2),
    Case("sealed behind training", 1, 2, "drive"),
    Case("resident state", 1, 1, "drive"),
    Case("added group", 1, 1, "drive"),
]
CASES = [
    *SMOKE,
    *[
        Case(scene, 2)
        for scene in SCENES
        if scene not in ("two processes", "gone back", "every second step")
    ],
    Case("sealed behind training", 2, 3),
    Case("two processes", 1, 2),
    Case("started over", 1, 2),
    Case("gone back", 2, 2),
    Case("sealed twice", 1, 3),
    *[
        case
        for scene in SCENES
        for keep in (1, 2)
        if (case := Case(scene, keep, 1, "drive")) not in SMOKE
    ],
]
