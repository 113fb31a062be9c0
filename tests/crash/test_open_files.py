"""What is closed is closed: no file of a store is open any more when its owner has let go of it.

A descriptor that stays open keeps the space of a file that has been removed, and a process that
trains for weeks has only so many of them. The backend is the user's here: one of the library's own
would close all files with itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds import PosixBackend
from offload import AdamW, OffloadError, open_checkpoint
from tests.crash.fault_backend import FaultBackend, Kind
from tests.eventually import eventually
from tests.stores.training import (
    Model,
    Reference,
    add_head,
    optimizer_for,
    options,
    same_bits,
    take_step,
    train,
)


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    backend = PosixBackend()
    yield backend
    backend.close()


def open_below(directory: Path) -> list[str]:
    """Return the paths below a directory that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed them
        if path.startswith(f"{directory}/"):
            found.append(path)
    return found


def more_checkpoints_than_are_kept_open(model: Model, optimizer: AdamW) -> None:
    train(model, optimizer, 1, 2, 3, 4, 5, 6)


def a_new_layout(model: Model, optimizer: AdamW) -> None:
    train(model, optimizer, 1, 2)
    add_head(model, optimizer)
    train(model, optimizer, 3)
    take_step(model, optimizer, 4)


def a_train_state_sealed_again(model: Model, optimizer: AdamW) -> None:
    train(model, optimizer, 1)
    for value in (2, 3):
        optimizer.checkpoint({"step": value}, metrics={"loss": float(value)}).result()


HISTORIES = [
    more_checkpoints_than_are_kept_open,
    a_new_layout,
    a_train_state_sealed_again,
]


@pytest.mark.parametrize(("keep", "drives"), [(2, 2), (5, 1)])
@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_an_optimizer_that_is_closed_has_no_file_open(
    history: Callable[[Model, AdamW], None],
    keep: int,
    drives: int,
    tmp_path: Path,
    backend: PosixBackend,
) -> None:
    directories = [str(tmp_path / f"{drive}") for drive in range(drives)]
    model = Model()
    optimizer = optimizer_for(model, directories, options(backend), keep=keep)
    history(model, optimizer)
    assert open_below(tmp_path) != []
    gone = [path for path in open_below(tmp_path) if path.endswith(" (deleted)")]
    assert gone == [], "the space of these files is still taken"
    optimizer.close()
    # Not what is garbage by then: the optimizer is still there, and has all that it ever had.
    assert eventually(lambda: not open_below(tmp_path)), open_below(tmp_path)
    optimizer.close()


@pytest.mark.parametrize("drives", [1, 2], ids=["one drive", "two drives"])
def test_a_reader_that_is_closed_has_no_file_open(
    drives: int, tmp_path: Path, backend: PosixBackend
) -> None:
    directories = [str(tmp_path / f"{drive}") for drive in range(drives)]
    model = Model()
    with optimizer_for(model, directories, options(backend)) as optimizer:
        train(model, optimizer, 1)
    with open_checkpoint(directories[0], backend=backend) as found:
        assert found.verify().ok
        assert found.train_state == {"step": 1}
        assert [path for path in open_below(tmp_path) if not path.endswith("step-00000001")] == []
    assert open_below(tmp_path) == []


@pytest.mark.parametrize(
    ("num_seals", "kind", "name"),
    [(0, "create", "exp_avg.safetensors"), (0, "write_bytes", "part.json"),
     (2, "create", "exp_avg.safetensors"), (1, "open", "exp_avg.safetensors")],
)  # fmt: skip
def test_what_fails_half_way_is_closed_and_what_it_has_made_is_removed(
    num_seals: int, kind: Kind, name: str, tmp_path: Path, backend: PosixBackend
) -> None:
    """On the third of three drives. After two seals, a part on the second is being used again."""
    directories = [str(tmp_path / f"{drive}") for drive in range(3)]
    with optimizer_for(model := Model(), directories, options(backend), keep=1) as optimizer:
        train(model, optimizer, *range(1, num_seals + 1))
    if num_seals == 2:
        shutil.rmtree(tmp_path / "2/part-1")
    faulty, model = FaultBackend(backend), Model()
    optimizer = optimizer_for(model, directories, options(faulty), keep=1)
    before = sorted(tmp_path.glob("*/part-*"))

    def go_on() -> None:
        optimizer.restore()
        train(model, optimizer, num_seals + 1)

    faulty.fail_if(lambda *found: found == (kind, f"{directories[2]}/part-1/{name}"))
    with pytest.raises(OffloadError) as error:  # it is kept, with all that its frames refer to
        go_on()
    assert faulty.num_failed == 1, error
    opened = [path for path in open_below(tmp_path) if ".json" in path or ".safetensors" in path]
    assert [path for path in opened if "00000002/" not in path and "/part-2/" not in path] == []
    assert sorted(tmp_path.glob("*/part-*")) == before
    go_on()
    expected = Reference().after(num_seals + 1).model
    assert same_bits({**expected, **dict(model.named_parameters())}, expected)
    optimizer.close()
    faulty.close()
