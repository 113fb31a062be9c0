"""One bit, or one page, of a checkpoint is not what was written: a complete read finds it.

Every byte of every file counts, padding included, on both drives of a store; and every page, where
a write that a drive has acknowledged was lost, or went elsewhere. Nobody may train on that: a new
process goes on from the checkpoint before, and says so. Most runs try some; all takes minutes:

    FLIPS_EVERY=1 pytest tests/crash/test_flipped_bits.py
"""

from __future__ import annotations

import functools
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator

import pytest

from gds import MemoryBackend
from offload import CheckpointError, DriveTuning, open_checkpoint
from tests.campaigns import FULL
from tests.crash.crash_backend import PAGE_BYTES, SECTOR_BYTES, Image
from tests.stores.files import flip, overwrite, read
from tests.stores.training import (
    Model,
    Reference,
    optimizer_for,
    options,
    same_bits,
    take_step,
    train,
)

EVERY = int(os.environ.get("FLIPS_EVERY", "97" if FULL else "997"))
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
    return Image.of(backend)


def files_of(backend: MemoryBackend, name: str, path: str = NEWEST) -> list[str]:
    with open_checkpoint(path, backend=backend) as checkpoint:
        directories = [path, *checkpoint.parts]
    paths = [f"{directory}/{f}" for directory in directories for f in backend.list_dir(directory)]
    return [path for path in paths if os.path.basename(path).split(".")[0] == name]


def complete_read(backend: MemoryBackend) -> str:
    """Return what is wrong with the newest checkpoint."""
    try:
        with open_checkpoint(NEWEST, backend=backend) as checkpoint:
            return "; ".join(checkpoint.verify().problems)
    except CheckpointError as error:
        return str(error)


def goes_on(backend: MemoryBackend, path: str) -> None:
    """A new process goes on from the checkpoint before, and not without saying so."""
    model = Model(history=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = optimizer_for(model, DRIVES, options(backend), keep=2)
        found = optimizer.restore()
        if found.step == 2:
            with pytest.raises(CheckpointError, match=re.escape(path)):
                take_step(model, optimizer, 3)
            found = optimizer.restore()
    assert any(NEWEST in str(warning.message) for warning in caught)
    assert found.step == 1
    assert same_bits(dict(model.state_dict()), Reference().after(1).model)
    take_step(model, optimizer, 2)
    assert same_bits(dict(model.state_dict()), Reference().after(2).model)
    optimizer.close()


@pytest.mark.parametrize("name", NUM_FILES)
def test_a_bit_that_flips_anywhere_is_found(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(f"{SEED} {name}")
    backend = sealed().backend()
    paths = files_of(backend, name)
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
                goes_on(damaged, path)
            num_flips += 1
    assert complete_read(backend) == ""
    assert len(paths) == NUM_FILES[name]
    record_property("flips", num_flips)
    record_property("flipped_files", len(paths))


def stale(data: bytes, older: bytes, start: int) -> bytes:
    """The write never arrived: what was there before is there still."""
    return older[start : start + PAGE_BYTES]


def torn(data: bytes, older: bytes, start: int) -> bytes:
    middle = start + SECTOR_BYTES
    return older[start:middle] + data[middle : start + PAGE_BYTES]


def misdirected(data: bytes, older: bytes, start: int) -> bytes:
    """A write to another page of the file has gone here."""
    other = (start + PAGE_BYTES) % (-(-len(data) // PAGE_BYTES) * PAGE_BYTES)
    return data[other : other + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")


def zeroed(data: bytes, older: bytes, start: int) -> bytes:
    return bytes(PAGE_BYTES)


Damage = Callable[[bytes, bytes, int], bytes]
"""From the newest checkpoint's file, the older one's and an offset: what a page holds instead."""

DAMAGES: list[Damage] = [stale, torn, misdirected, zeroed]


def wrong_pages(name: str) -> Iterator[tuple[str, int, bytes]]:
    """Yield files, offsets and what is there instead: of each page in full runs, else of some."""
    backend = sealed().backend()
    pairs = zip(files_of(backend, name), files_of(backend, name, OLDER), strict=True)
    for path, before in pairs:
        data, older = read(backend, path), read(backend, before)
        for number, start in enumerate(range(0, len(data), PAGE_BYTES)):
            first = 0 if number == 0 else number % len(DAMAGES)
            for damage in DAMAGES if FULL or number == 0 else DAMAGES[first : first + 1]:
                page = damage(data, older, start)[: len(data) - start]
                written = data[start : start + PAGE_BYTES]
                if page != written and (page + written).strip():  # else a header, or padding
                    yield path, start, page


@pytest.mark.parametrize("name", NUM_FILES)
def test_a_page_that_is_not_what_was_written_is_never_trained_on(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    num_damaged = 0
    for path, start, page in wrong_pages(name):
        damaged = sealed().backend()
        overwrite(damaged, path, page, start)
        assert complete_read(damaged), f"{path}, page at {start}"
        goes_on(damaged, path)
        num_damaged += 1
    assert num_damaged > 0
    record_property("lost_writes", num_damaged)
