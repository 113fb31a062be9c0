"""Slots and parts are overwritten, not made anew: a full disk has room for the next checkpoint.

Overwriting needs no space and is quicker than the first write to new blocks. What does not fit is
made anew, and nothing that was in it stays.
"""

from __future__ import annotations

import errno

import pytest

from gds import MemoryBackend, StorageError
from offload import open_checkpoint
from tests.crash.fault_backend import FaultBackend
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    train,
)

ONE, TWO = "/first/run", "/second/run"


@pytest.mark.parametrize("keep", [1, 2], ids=["keep=1", "keep=2"])
@pytest.mark.parametrize("directories", [[ONE], [ONE, TWO]], ids=["one drive", "two drives"])
def test_a_store_that_is_full_grown_makes_no_new_files(directories: list[str], keep: int) -> None:
    backend, model = FaultBackend(MemoryBackend()), Model()
    with optimizer_for(model, directories, options(backend), keep=keep) as optimizer:
        train(model, optimizer, *range(1, keep + 2))
        before = backend.num_done["create"], backend.num_done["make_dir"]
        train(model, optimizer, *range(keep + 2, keep + 5))
        assert (backend.num_done["create"], backend.num_done["make_dir"]) == before
    backend.close()


@pytest.mark.parametrize("directories", [[ONE], [ONE, TWO]], ids=["one drive", "two drives"])
def test_what_an_earlier_process_left_is_overwritten(directories: list[str]) -> None:
    files, model = MemoryBackend(), Model()
    with optimizer_for(model, directories, options(files), keep=2) as optimizer:
        train(model, optimizer, 1, 2, 3)
        backward(model, 4)
        optimizer.step()  # into a slot that stays behind
    backend, model = FaultBackend(files.reopened()), Model(history=5)
    with optimizer_for(model, directories, options(backend), keep=2) as optimizer:
        assert optimizer.restore().step == 3
        train(model, optimizer, 4, 5)
        assert (backend.num_done["create"], backend.num_done["make_dir"]) == (0, 0)
    with open_checkpoint(ONE, backend=backend.inner) as found:
        assert differences(found, backend.inner, Reference().after(5)) == []
    backend.close()


def store_with_a_free_slot(backend: MemoryBackend) -> MemoryBackend:
    """Return files of a process that has ended between two checkpoints."""
    model = Model()
    with optimizer_for(model, [ONE, TWO], options(backend), keep=1) as optimizer:
        train(model, optimizer, 1, 2)
        backward(model, 3)
        optimizer.step()
    return backend.reopened()


def free_places(backend: MemoryBackend) -> list[str]:
    """Return the free slot and the free part."""
    with open_checkpoint(ONE, backend=backend) as found:
        used = {found.path, *found.parts}
    names = [f"{directory}/{n}" for directory in (ONE, TWO) for n in backend.list_dir(directory)]
    return [name for name in names if name not in used and backend.stat(name).kind == "directory"]


@pytest.mark.parametrize("place", [0, 1], ids=["slot", "part"])
@pytest.mark.parametrize("change", ["one more", "one less", "another size", "a directory"])
def test_a_leftover_that_does_not_fit_is_made_anew(change: str, place: int) -> None:
    backend = store_with_a_free_slot(MemoryBackend())
    path = free_places(backend)[place]
    expected = sorted(backend.list_dir(path))
    if change == "one more":
        backend.create(f"{path}/momentum.safetensors", 4096).close()
    else:
        backend.remove(f"{path}/exp_avg.safetensors")
    if change == "another size":
        backend.create(f"{path}/exp_avg.safetensors", 4096).close()
    elif change == "a directory":
        backend.make_dir(f"{path}/exp_avg.safetensors")
    model = Model(history=5)
    with optimizer_for(model, [ONE, TWO], options(backend), keep=1) as optimizer:
        optimizer.restore()
        if change == "a directory" and place == 0:
            with pytest.warns(RuntimeWarning, match="left alone: it holds the directory"):
                train(model, optimizer, 3)
        else:
            train(model, optimizer, 3)
        with open_checkpoint(ONE, backend=backend) as found:
            assert differences(found, backend, Reference().after(3)) == []
            places = (found.path, *found.parts)
        assert sorted(backend.list_dir(places[place])) == expected
        train(model, optimizer, 4)
    with open_checkpoint(ONE, backend=backend) as found:
        assert differences(found, backend, Reference().after(4)) == []


def test_after_a_part_could_not_be_made_ready_nothing_is_reused() -> None:
    """Whether what it says of itself has been overwritten on the drive is not known then."""
    backend = FaultBackend(store_with_a_free_slot(MemoryBackend()))
    _, part = free_places(backend)
    model = Model(history=5)
    with optimizer_for(model, [ONE, TWO], options(backend), keep=1) as optimizer:
        optimizer.restore()
        backend.fail_if(lambda kind, path: kind == "sync" and path == f"{part}/part.json")
        backward(model, 3)
        with pytest.raises(StorageError) as failed:
            optimizer.step()
        assert failed.value.errno == errno.EIO
        assert backend.num_failed == 1
        optimizer.restore()
        with pytest.warns(RuntimeWarning, match="a free part could not be made ready.*no slot"):
            train(model, optimizer, 3)
