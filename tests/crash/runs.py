"""Runs on one drive or two: how they begin, what people do to them, and whether they go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gds import Backend, MemoryBackend
from offload import AdamW, open_checkpoint, verify_and_mark
from offload.retention import Retention
from tests.crash.damaging import OTHER, STORE, part_of
from tests.stores.files import contents, flip, read, remove_tree, write
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    same_bits,
    train,
)

AWAY = "/away"

Meddle = Callable[[Backend, str], None]


def step_path(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


def start(
    backend: Backend,
    num_drives: int = 1,
    keep: int | Retention = 2,
    history: int = 0,
    **changes: object,
) -> tuple[Model, AdamW]:
    """Return a model and its optimizer; of another history, so that what is not restored shows."""
    model = Model(history)
    directories = [STORE, OTHER][:num_drives]
    return model, optimizer_for(model, directories, options(backend), keep=keep, **changes)


def slots_in(backend: Backend) -> list[str]:
    return [n for n in backend.list_dir(STORE) if n.startswith((".slot-", "step-"))]


def copy_tree(backend: Backend, source: str, target: str) -> None:
    backend.make_dir(target)
    for name, data in contents(backend, source).items():
        write(backend, f"{target}/{name}", data)


def replace_files(backend: Backend, path: str, *names: str) -> None:
    """Do what ``rsync`` does: write a copy of each file beside it, and rename that over it."""
    for name in names or backend.list_dir(path):
        write(backend, f"{path}/.{name}.tmp", read(backend, f"{path}/{name}"))
        backend.rename(f"{path}/.{name}.tmp", f"{path}/{name}")


def replace_directory(backend: Backend, path: str) -> None:
    """Do what ``mv step-N away; cp -a away step-N`` does."""
    backend.rename(path, AWAY)
    copy_tree(backend, AWAY, path)


def replace_state(backend: Backend, path: str) -> None:
    replace_files(backend, path, "exp_avg.safetensors")


def replace_manifest(backend: Backend, path: str) -> None:
    replace_files(backend, path, "manifest.json")


def replace_part(backend: Backend, path: str) -> None:
    replace_files(backend, part_of(backend, path))


def replace_directory_of_part(backend: Backend, path: str) -> None:
    replace_directory(backend, part_of(backend, path))


def mark(backend: Backend, path: str, name: str = "exp_avg.safetensors") -> None:
    """Do what ``offload verify --quarantine`` does, after a bit has flipped."""
    flip(backend, f"{path}/{name}")
    with open_checkpoint(path, backend=backend) as checkpoint:
        assert verify_and_mark(checkpoint).quarantined


def mark_for_part(backend: Backend, path: str) -> None:
    part = part_of(backend, path)
    flip(backend, f"{part}/exp_avg.safetensors")
    drive = part.rpartition("/")[0]  # damage there is marked only if the drive was given
    with open_checkpoint(path, parts=[drive], backend=backend) as checkpoint:
        assert verify_and_mark(checkpoint).quarantined


def move_away(backend: Backend, path: str) -> None:
    backend.rename(path, AWAY)


def cut(backend: Backend, path: str) -> None:
    """Leave a file that has lost its second half."""
    data = read(backend, f"{path}/exp_avg.safetensors")
    write(backend, f"{path}/exp_avg.safetensors", data[: len(data) // 2])


def remove_part(backend: Backend, path: str) -> None:
    remove_tree(backend, part_of(backend, path))


REPLACE = [
    (replace_files, 1), (replace_directory, 2), (replace_state, 1), (replace_manifest, 2),
    (replace_part, 2), (replace_directory_of_part, 2),
]  # fmt: skip
LOSE = [
    (mark, 1), (remove_tree, 2), (move_away, 1), (cut, 2), (remove_part, 2), (mark_for_part, 2),
]  # fmt: skip
"""What is done, and the number of drives of the store."""


def ids(cases: list[tuple[Meddle, int]]) -> list[str]:
    return [f"{how.__name__}, {drives}" for how, drives in cases]


def assert_at_step(backend: Backend, step: int) -> None:
    """Check that a reader finds a step as the newest, with the bits of plain torch."""
    with open_checkpoint(STORE, backend=backend) as newest:
        assert newest.step == step
        assert differences(newest, backend, Reference().after(step)) == []


def assert_goes_on(backend: MemoryBackend, num_drives: int, step: int) -> None:
    """Check that a new process restores a step, and takes more of them, to the bit."""
    backend = backend.reopened()
    model, optimizer = start(backend, num_drives)
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is not usable
        restored = optimizer.restore(verify=True)
        assert restored is not None
        assert restored.step == step
        train(model, optimizer, step + 1, step + 2)
        assert same_bits(dict(model.state_dict()), Reference().after(step + 2).model)
    assert_at_step(backend, step + 2)


@contextmanager
def warned_of(path: str) -> Iterator[None]:
    """Expect one warning of a path; others are of what a test has done to other paths."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert all(w.category is RuntimeWarning for w in caught)
    assert sum(path in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]
