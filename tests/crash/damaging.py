"""Damage to a store of two checkpoints, and what a run that goes on from one of them must do."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, MemoryBackend
from offload import AdamW, Checkpoint, open_checkpoint
from tests.crash.crash_backend import CrashBackend, Disk
from tests.stores.files import flip, write
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    same_bits,
    take_step,
    train,
)

STORE = "/run"
OTHER = "/other"
BOTH = [STORE, OTHER]
NEWEST = f"{STORE}/step-00000002"
SEED = 20261121
MARK = "damaged.txt"

STATE = ["master", "exp_avg", "exp_avg_sq"]
READ_AT_ONCE = ["model", "train_state"]


def store_with(backend: Backend, directory: str | list[str] = STORE, keep: int = 2) -> None:
    """Make checkpoints of steps 1 and 2."""
    model = Model()
    with optimizer_for(model, directory, options(backend), keep=keep) as optimizer:
        train(model, optimizer, 1, 2)


def damage(backend: Backend, name: str, checkpoint: str = NEWEST) -> str:
    """Flip a bit of a file, or flip it back; returns its path."""
    path = f"{checkpoint}/{name}.safetensors"
    flip(backend, path, 40 if name == "train_state" else -9)
    return path


def part_of(backend: Backend, checkpoint: str = NEWEST) -> str:
    """Return the directory of a checkpoint's part on the other drive."""
    with open_checkpoint(checkpoint, even_quarantined=True, backend=backend) as found:
        return found.parts[0]


def mark(backend: Backend, checkpoint: str = NEWEST) -> None:
    """Mark a checkpoint as damaged, as another process does."""
    write(backend, f"{checkpoint}/{MARK}", b"somebody thought so")


def reason(backend: Backend, checkpoint: str = NEWEST) -> str:
    """Return why a checkpoint is marked; empty if it is not."""
    with open_checkpoint(checkpoint, even_quarantined=True, backend=backend) as found:
        return found.quarantined


def after_power_cuts(backend: CrashBackend, number: int = 10) -> Iterator[MemoryBackend]:
    """Yield what losses of power may leave, the one that leaves least among them."""
    disk, rng = Disk(backend.log), random.Random(SEED)
    yield disk.power_cut(rng, names=0.0, pages=0.0).backend()
    for _ in range(number):
        yield disk.power_cut(rng).backend()


def train_through(model: Model, optimizer: AdamW, step: int) -> None:
    """Take a step, and wait for it where it runs beside the model."""
    take_step(model, optimizer, step)
    optimizer.synchronize()


@contextmanager
def warned(*parts: str) -> Iterator[None]:
    """Expect one warning with all these words in it, and only warnings about checkpoints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught]
    assert all(w.category is RuntimeWarning for w in caught), messages
    assert sum(all(part in m for part in parts) for m in messages) == 1, messages


@contextmanager
def unheeded() -> Iterator[None]:
    """Let the store warn of what it does not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def goes_on_from(checkpoint: Checkpoint | None, model: Model, optimizer: AdamW, step: int) -> None:
    """Check that training continues from a step as if nothing had been after it."""
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.train_state) == (step, {"step": step})
    reference = Reference()
    assert same_bits(dict(model.state_dict()), reference.after(step).model)
    for number in (step + 1, step + 2):
        take_step(model, optimizer, number)
        sealed = optimizer.checkpoint({"step": number}).result()
        assert differences(sealed, sealed.backend, reference.after(number)) == []
