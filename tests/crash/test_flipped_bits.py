"""One bit of a checkpoint is not what was written: wherever it is, a complete read finds it.

Every byte of every file counts, padding included, on both drives of a store. Most runs try some of
them; all takes minutes:

    FLIPS_EVERY=1 pytest tests/crash/test_flipped_bits.py
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Callable

import pytest

from gds import MemoryBackend
from offload import DriveTuning, open_checkpoint
from offload.errors import CheckpointError
from tests.crash.crash_backend import Image
from tests.stores.files import flip
from tests.stores.training import (
    Model,
    Reference,
    backward,
    optimizer_for,
    options,
    same_bits,
    train,
)

EVERY = int(os.environ.get("FLIPS_EVERY", "97"))
"""Try one of so many bytes of each file."""

PROCESS_EVERY = 37
"""Of those, let a new process meet one of so many."""

SEED = 20261121
DRIVES = ["/first/run", "/second/run"]
OLDER, NEWEST = f"{DRIVES[0]}/step-00000001", f"{DRIVES[0]}/step-00000002"
NUM_FILES = {
    "manifest": 1,
    "model": 1,
    "train_state": 1,
    "part": 1,
    "master": 2,
    "exp_avg": 2,
    "exp_avg_sq": 2,
}


@functools.cache
def sealed() -> Image:
    """Return a store on two drives with two checkpoints."""
    backend, model = MemoryBackend(), Model()
    settings = options(backend, drives=DriveTuning(shares=(1, 1)))
    with optimizer_for(model, DRIVES, settings, keep=2) as optimizer:
        train(model, optimizer, 1, 2)
    directories, files = [], {}
    pending = ["/first", "/second"]
    while pending:
        directory = pending.pop()
        directories.append(directory)
        for path in (f"{directory}/{name}" for name in backend.list_dir(directory)):
            if backend.stat(path).kind == "directory":
                pending.append(path)
            else:
                file = backend.open(path)
                files[path] = file.read_bytes(0, file.size_bytes)
                file.close()
    return Image(tuple(directories), tuple(files.items()))


def files_of_the_newest(backend: MemoryBackend, name: str) -> list[str]:
    with open_checkpoint(NEWEST, backend=backend) as checkpoint:
        directories = [NEWEST, *checkpoint.parts]
    paths = [f"{directory}/{f}" for directory in directories for f in backend.list_dir(directory)]
    return [path for path in paths if os.path.basename(path).split(".")[0] == name]


def complete_read(backend: MemoryBackend) -> str:
    """Return what is wrong with the newest checkpoint."""
    try:
        with open_checkpoint(NEWEST, backend=backend) as checkpoint:
            return "; ".join(checkpoint.verify().problems)
    except CheckpointError as error:
        return str(error)


def go_on(backend: MemoryBackend) -> None:
    """A new process goes on from the checkpoint before, and not without saying so."""
    model = Model(history=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = optimizer_for(model, DRIVES, options(backend), keep=2)
        found = optimizer.restore()
        if found.step == 2:
            backward(model, 3)
            with pytest.raises(CheckpointError):
                optimizer.step()
            found = optimizer.restore()
    assert any(NEWEST in str(warning.message) for warning in caught)
    assert found.step == 1
    assert same_bits(dict(model.state_dict()), Reference().after(1).model)
    backward(model, 2)
    optimizer.step()
    assert same_bits(dict(model.state_dict()), Reference().after(2).model)
    optimizer.close()


@pytest.mark.parametrize("name", NUM_FILES)
def test_a_bit_that_flips_anywhere_is_found(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(f"{SEED} {name}")
    backend = sealed().backend()
    paths = files_of_the_newest(backend, name)
    num_flips = 0
    for path in paths:
        size_bytes = backend.stat(path).size_bytes
        for start in range(0, size_bytes, EVERY):
            offset = min(start + rng.randrange(EVERY), size_bytes - 1)
            bit = rng.randrange(8)
            flip(backend, path, offset, 1 << bit)
            assert path in complete_read(backend), f"bit {bit} of byte {offset}"
            flip(backend, path, offset, 1 << bit)
            if num_flips % PROCESS_EVERY == 0:
                damaged = sealed().backend()
                flip(damaged, path, offset, 1 << bit)
                go_on(damaged)
            num_flips += 1
    assert complete_read(backend) == ""
    assert len(paths) == NUM_FILES[name]
    record_property("flips", num_flips)
    record_property("flipped_files", len(paths))


def test_a_train_state_is_given_up_whatever_part_of_its_text_is_hit() -> None:
    """Its length, names, values, digest and version: each is refused by another check."""
    rng = random.Random(f"{SEED} text")
    (path,) = files_of_the_newest(sealed().backend(), "train_state")
    file = sealed().backend().open(path)
    text = file.read_bytes(0, file.size_bytes).rstrip(b" \0")
    values = [
        text.index(before) + len(before)
        for before in (b'"store_id":"', b'"train_state":"{', b'_digest":"', b'_format":"')
    ]
    for offset in [0, *values, *rng.sample(range(8, len(text)), 20)]:
        damaged = sealed().backend()
        flip(damaged, path, offset, 1 << rng.randrange(8))
        go_on(damaged)
