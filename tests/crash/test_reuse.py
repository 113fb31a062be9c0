"""Slots and parts are overwritten, not made anew: a full disk has room for the next checkpoint.

Overwriting needs no space and is quicker than the first write to new blocks. What does not fit is
made anew, and nothing that was in it stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from gds import Backend, MemoryBackend, StorageError
from offload import AdamW, open_checkpoint
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.runs import OTHER, STORE, assert_at_step, slots_in, start
from tests.stores.files import contents, everything, overwrite, write
from tests.stores.training import Model, Reference, add_head, differences, take_step, train


def start_anew(backend: Backend, num_drives: int = 1, keep: int = 1) -> tuple[Model, AdamW]:
    return start(backend, num_drives, keep, history=5)


def with_leftovers(num_drives: int = 1, keep: int = 1, backend: Backend | None = None) -> Backend:
    """Return files of a process that has ended between two checkpoints."""
    backend = backend or MemoryBackend()
    model, optimizer = start(backend, num_drives, keep)
    with optimizer:
        train(model, optimizer, *range(1, keep + 2))
        take_step(model, optimizer, keep + 2)
    return backend


def free_slots(backend: Backend) -> list[str]:
    return [f"{STORE}/{name}" for name in slots_in(backend) if name.startswith(".slot-")]


def free_places(backend: Backend) -> list[str]:
    """Return the free slot and the free part."""
    with open_checkpoint(STORE, backend=backend) as found:
        used = {found.path, *found.parts}
    names = [f"{place}/{n}" for place in (STORE, OTHER) for n in backend.list_dir(place)]
    return [name for name in names if name not in used and backend.stat(name).kind == "directory"]


@pytest.mark.parametrize("num_drives", [1, 2])
def test_what_an_earlier_process_left_is_overwritten(num_drives: int) -> None:
    backend = FaultBackend(with_leftovers(num_drives, keep=2))
    model, optimizer = start_anew(backend, num_drives, keep=2)
    with optimizer:
        assert optimizer.restore().step == 3
        train(model, optimizer, 4, 5)
        assert (backend.num_done["create"], backend.num_done["make_dir"]) == (0, 0)
    assert_at_step(backend.inner, 5)
    backend.close()


@pytest.mark.parametrize("is_withdrawn", [True, False], ids=["withdrawn", "cut off"])
def test_a_leftover_is_durably_no_checkpoint_before_anything_else_is_written(
    is_withdrawn: bool,
) -> None:
    """A process may have been killed in the middle of a withdrawal: the manifest is valid."""
    backend = with_leftovers(backend=CrashBackend())
    (slot,) = free_slots(backend)
    if not is_withdrawn:
        for name, data in contents(backend, f"{STORE}/step-00000002").items():
            overwrite(backend, f"{slot}/{name}", data)
        open_checkpoint(slot, backend=backend).close()
    before = len(backend.log)
    model, optimizer = start_anew(backend)
    with optimizer:
        optimizer.restore()
        log = [str(op) for op in backend.log[before:]]
        assert not [op for op in log if op.startswith("write")], "as long as nobody needs it"
        train(model, optimizer, 3)
    log = [str(op) for op in backend.log[before:] if op.path.startswith(slot)]
    assert log[0].startswith(f"write {slot}/manifest.json")
    assert log[1] == f"sync {slot}/manifest.json"
    assert_at_step(backend, 3)


def one_less(backend: Backend, path: str) -> None:
    backend.remove(f"{path}/exp_avg.safetensors")


def another_size(backend: Backend, path: str) -> None:
    write(backend, f"{path}/exp_avg.safetensors", bytes(4096))


def a_directory(backend: Backend, path: str) -> None:
    backend.remove(f"{path}/exp_avg.safetensors")
    backend.make_dir(f"{path}/exp_avg.safetensors")


def no_headers(backend: Backend, path: str) -> None:
    """Nothing of a free slot is durable but what was synced: only its sizes may have survived."""
    for name, data in contents(backend, path).items():
        if name.endswith(".safetensors"):
            overwrite(backend, f"{path}/{name}", bytes(len(data)))


def a_mark(backend: Backend, path: str) -> None:
    write(backend, f"{path}/damaged.txt", b"damaged")


def files_of_the_model(backend: Backend, path: str) -> None:
    for name in ("config.json", "tokenizer.json"):
        write(backend, f"{path}/{name}", b"of the model")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (one_less, 0), (one_less, 1), (another_size, 0), (another_size, 1), (a_directory, 0),
        (a_directory, 1), (no_headers, 0), (a_mark, 0), (files_of_the_model, 0),
    ],
)  # fmt: skip
def test_a_leftover_that_does_not_fit_is_made_anew(
    change: Callable[[Backend, str], None], place: int
) -> None:
    """A slot, or the part of one."""
    backend = with_leftovers(2).reopened()
    path = free_places(backend)[place]
    expected = sorted(backend.list_dir(path))
    change(backend, path)
    model, optimizer = start_anew(backend, 2)
    with optimizer:
        optimizer.restore()
        if change is a_directory and place == 0:
            with pytest.warns(RuntimeWarning, match="left alone: it holds the directory"):
                train(model, optimizer, 3)
        else:
            train(model, optimizer, 3)
        assert_at_step(backend, 3)
        with open_checkpoint(STORE, backend=backend) as found:
            places = (found.path, *found.parts)
        assert sorted(backend.list_dir(places[place])) == expected
        train(model, optimizer, 4)
    assert_at_step(backend, 4)


def a_file(backend: Backend, path: str) -> None:
    write(backend, path, b"notes")


def with_a_directory(backend: Backend, path: str) -> None:
    backend.make_dir(path)
    backend.make_dir(f"{path}/notes")


class TestWhatIsNoSlot:
    """Names of slots under which there is something else, or that somebody holds or removes."""

    @pytest.mark.parametrize("other", [a_file, with_a_directory])
    def test_it_is_left_alone_and_the_next_leftover_is_used(
        self, other: Callable[[Backend, str], None]
    ) -> None:
        backend = with_leftovers()
        other(backend, f"{STORE}/.slot-99")
        before = [one for one in everything(backend).items() if "/.slot-99" in one[0]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = start_anew(backend)
            with optimizer:
                optimizer.restore()
                train(model, optimizer, 3, 4)
        said = [str(one.message) for one in caught if f"{STORE}/.slot-99: " in str(one.message)]
        assert len(said) == 1
        assert [one for one in everything(backend).items() if "/.slot-99" in one[0]] == before
        assert len(slots_in(backend)) == 3
        assert_at_step(backend, 4)


def test_slots_that_a_step_has_left_are_used_by_the_next_one() -> None:
    """Of a layout that is no more, of a step that has failed, and of one that a restore undoes."""
    backend = FaultBackend(MemoryBackend())
    model, optimizer = start(backend, keep=1)
    with optimizer:
        train(model, optimizer, 1)
        take_step(model, optimizer, 2)
        add_head(model, optimizer)
        assert len(slots_in(backend)) == 3, "the state is still in the one before"
        train(model, optimizer, 3, 4)
        assert len(slots_in(backend)) == 2
        for fails in (True, False):
            if fails:
                backend.fail("write", 1, forever=False)
                with pytest.raises(StorageError, match="injected failure of write"):
                    take_step(model, optimizer, 5)
            else:
                take_step(model, optimizer, 5)
            assert optimizer.restore().step == 4
        train(model, optimizer, 5)
        assert len(slots_in(backend)) == 2
    with open_checkpoint(STORE, backend=backend) as found:
        assert differences(found, backend, Reference(head_from=3).after(5)) == []
    backend.close()
