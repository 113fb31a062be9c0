"""A drive that has lied: a page of a checkpoint is not what was written and synced.

Not a loss of power, after which none of this can be found, but a write that was acknowledged and
lost, or went elsewhere. Every page of every file is tried. Nobody may train on it: it is refused
with a named error, by the restore or by the first step after it, or passed over with a warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest

from gds import MemoryBackend
from offload import open_checkpoint
from offload.errors import CheckpointError
from tests.crash.crash_backend import PAGE_BYTES, SECTOR_BYTES, Image
from tests.stores.training import Model, backward, optimizer_for, options

STORE = "/run"
OLDER, NEWEST = 2, 4
FILES = (
    "manifest.json",
    "model.safetensors",
    "master.safetensors",
    "exp_avg.safetensors",
    "exp_avg_sq.safetensors",
    "train_state.safetensors",
)

Damage = Callable[[bytes, bytes, int], bytes]
"""From the newest checkpoint's file, the older one's and an offset: what a page holds instead."""


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


@functools.cache
def sealed() -> Image:
    """Return a store with two checkpoints."""
    backend = MemoryBackend()
    model = Model()
    with optimizer_for(model, STORE, options(backend), keep=2) as optimizer:
        for step in range(1, NEWEST + 1):
            backward(model, step)
            optimizer.step()
            if step in (OLDER, NEWEST):
                optimizer.checkpoint({"step": step}).result()
    directories = [STORE] + [f"{STORE}/{n}" for n in backend.list_dir(STORE) if n != "LOCK"]
    files = {}
    for directory in directories:
        for name in backend.list_dir(directory):
            path = f"{directory}/{name}"
            stat = backend.stat(path)
            if stat is not None and stat.kind == "file":
                file = backend.open(path)
                files[path] = file.read_bytes(0, stat.size_bytes)
                file.close()
    return Image(tuple(directories), tuple(files.items()))


def checkpoint_path(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


def is_found_by_a_complete_read(backend: MemoryBackend) -> bool:
    try:
        with open_checkpoint(checkpoint_path(NEWEST), backend=backend) as checkpoint:
            return not checkpoint.verify().ok
    except CheckpointError:
        return True


def what_a_new_process_does(backend: MemoryBackend) -> str:
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = optimizer_for(model, STORE, options(backend), keep=2)
        try:
            found = optimizer.restore()
            assert found is not None
            backward(model, found.step + 1)
            optimizer.step()
        except CheckpointError as error:
            return "refused" if checkpoint_path(NEWEST) in str(error) else "not named"
        finally:
            optimizer.close()
    if found.step == NEWEST:
        return "trained on it"
    assert found.step == OLDER
    assert any(checkpoint_path(NEWEST) in str(w.message) for w in caught)
    return "passed over"


@pytest.mark.parametrize("damage", [stale, torn, misdirected, zeroed])
@pytest.mark.parametrize("name", FILES)
def test_a_page_that_is_not_what_was_written_is_never_trained_on(
    name: str, damage: Damage, record_property: Callable[[str, object], None]
) -> None:
    image = sealed()
    content = dict(image.files)
    path = f"{checkpoint_path(NEWEST)}/{name}"
    data, older = content[path], content[f"{checkpoint_path(OLDER)}/{name}"]
    num_damaged = 0
    for start in range(0, len(data), PAGE_BYTES):
        page = damage(data, older, start)[: len(data) - start]
        written = data[start : start + PAGE_BYTES]
        if page == written or not (page + written).strip():
            continue  # the same in both: a header, or padding
        num_damaged += 1
        damaged = data[:start] + page + data[start + PAGE_BYTES :]
        image = Image(image.directories, tuple({**content, path: damaged}.items()))
        assert is_found_by_a_complete_read(image.backend()), f"page at {start}"
        assert what_a_new_process_does(image.backend()) in ("refused", "passed over")
    assert num_damaged > 0
    record_property("lost_writes", num_damaged)
