"""Which directories are taken for a store, and that a refusal has made and measured nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import (
    AdamW,
    DriveTuning,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
    pin,
    unpin,
)
from offload.errors import StoreError, UnsupportedParameterError
from tests.crash import second_writers as second
from tests.eventually import eventually
from tests.forking import Children
from tests.stores.training import (
    Model,
    Reference,
    optimizer_for,
    options,
    same_bits,
    train,
)
from tests.threads import one_thread

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow

Places = Path | Sequence[Path]


def tree(directory: Path) -> dict[str, bytes | None]:
    """Return every file with its bytes and every directory, relative to a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def construct(places: Places, model: Model | None = None, **changes: object) -> AdamW:
    """Construct an optimizer; with shares, so that no drive has to be measured first."""
    directories = [places] if isinstance(places, Path) else list(places)
    settings = options(drives=DriveTuning(shares=(1,) * len(directories)))
    return optimizer_for(model or Model(), list(map(str, directories)), settings, **changes)


def train_in(places: Places, *steps: int) -> Model:
    """Take steps in a store that is new, or goes on, and seal the last one."""
    model = Model()
    with construct(places, model) as optimizer:
        optimizer.restore()
        train(model, optimizer, *steps, seal=False)
        optimizer.checkpoint({"step": steps[-1]}).result()
    return model


def require_step_3(drives: list[Path]) -> None:
    """Check that a store that has two steps goes on."""
    assert same_bits(dict(train_in(drives, 3).state_dict()), Reference().after(3).model)


def refused(places: Places, root: Path, *says: str) -> list[StoreError]:
    """Check that constructors refuse a place, `fresh` or not, and have made nothing."""
    before, errors = tree(root), []
    directories = [places] if isinstance(places, Path) else list(places)
    for fresh in (False, True):
        with pytest.raises(StoreError) as caught:  # without shares: drives would be measured
            optimizer_for(Model(), list(map(str, directories)), options(), fresh=fresh)
        assert tree(root) == before
        for part in says:
            assert part in str(caught.value)
        errors.append(caught.value)
    return errors


class TestOtherThings:
    def test_a_directory_that_holds_other_things_is_refused_by_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("train.py", "data.bin", "README.md", "zebra"):
            (tmp_path / name).write_text("mine")
        says = "holds other files: 'README.md', 'data.bin', 'train.py' and 1 more"
        remedy = f"Give the store a directory of its own, such as '{tmp_path}/store'"
        for error in refused(tmp_path, tmp_path, says, remedy):
            assert error.filename == str(tmp_path)
        refused([tmp_path / "a", tmp_path], tmp_path, says)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StoreError, match="holds other files"):
            AdamW(Model().body_parameters(), directory=".")

    @pytest.mark.parametrize("name", ["pins", "store.json", "part-x"])
    def test_a_name_that_others_use_as_well_makes_no_store(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("{}")
        refused(tmp_path, tmp_path, f"holds other files: '{name}'")

    @pytest.mark.parametrize("inside", [None, "exp_avg.safetensors", "data.bin"])
    def test_a_part_that_was_only_begun_when_the_power_went_is_no_other_thing(
        self, tmp_path: Path, inside: str | None
    ) -> None:
        """The lock may not have reached the drive, as the part has; others name things so, too."""
        part = tmp_path / "b" / "part-1"
        part.mkdir(parents=True)
        if inside is not None:
            (part / inside).write_bytes(b"")
        directories = [tmp_path / "a", tmp_path / "b"]
        if inside == "data.bin":
            refused(directories, tmp_path, "holds other files: 'part-1'")
        else:
            AdamW(Model().body_parameters(), directory=directories).close()

    def test_some_names_count_as_nothing_and_other_things_in_a_store_are_left_alone(
        self, tmp_path: Path
    ) -> None:
        for name in ("lost+found", ".git", ".DS_Store", "calibration.json"):
            (tmp_path / name).mkdir()
        train_in(tmp_path, 1)
        (tmp_path / "notes.txt").write_text("mine")
        train_in(tmp_path, 2)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / ".git").is_dir()

    @pytest.mark.parametrize("left", ["LOCK", "step", "slot"])
    def test_a_store_is_known_by_any_of_its_names(self, tmp_path: Path, left: str) -> None:
        """One that was copied by hand may have no LOCK."""
        train_in(tmp_path, 1)
        (tmp_path / "notes.txt").write_text("mine")
        if left != "LOCK":
            (tmp_path / "LOCK").unlink()
        if left != "step":
            (tmp_path / "step-00000001").rename(tmp_path / ".slot-7")
        if left == "LOCK":
            shutil.rmtree(tmp_path / ".slot-7")
        train_in(tmp_path, 1 if left != "step" else 2)


class TestOrder:
    @pytest.fixture
    def drives(self, tmp_path: Path) -> list[Path]:
        drives = [tmp_path / name / "run" for name in "abc"]
        train_in(drives, 1, 2)
        return drives

    def test_another_order_is_refused_and_the_right_one_named(
        self, drives: list[Path], tmp_path: Path
    ) -> None:
        refused(
            [drives[n] for n in (1, 0, 2)],
            tmp_path,
            "this directory is number 2 of ",
            ", but was given as number 1: ",
            f"pass directory={list(map(str, drives))!r}",
        )
        require_step_3(drives)

    def test_parts_alone_or_of_another_store_are_refused(
        self, drives: list[Path], tmp_path: Path
    ) -> None:
        second_of = "this directory is number 2 of the store "
        remedy = "pass the directories of that store in their order"
        refused(drives[1], tmp_path, second_of, remedy)
        refused(drives[0] / "step-00000002", tmp_path, "this is a checkpoint, not a store")
        (tmp_path / "new").mkdir()
        says = "this directory is the first directory of a store, but was given as number 2"
        refused([tmp_path / "new", drives[0]], tmp_path, says)
        gone = "If that store is gone, remove its part-<k>"
        refused([tmp_path / "new", drives[2]], tmp_path, "number 3 of the store ", gone)
        others = [tmp_path / name for name in "xyz"]
        train_in(others, 1)
        for error in refused([drives[0], others[1], drives[2]], tmp_path, second_of):
            assert error.filename == str(others[1])


class TestMissing:
    """A drive that is not mounted."""

    @pytest.fixture
    def drives(self, tmp_path: Path) -> list[Path]:
        drives = [tmp_path / name / "run" for name in "ab"]
        train_in(drives, 1, 2)
        return drives

    @pytest.mark.parametrize("lost", ["a", "b"])
    def test_a_directory_that_is_not_there_is_not_made(
        self, drives: list[Path], tmp_path: Path, lost: str
    ) -> None:
        (tmp_path / lost).rename(tmp_path / "away")
        (tmp_path / lost).mkdir()  # the mount point
        says = "this directory does not exist, and "
        for error in refused(drives, tmp_path, says, "Is the drive mounted?"):
            assert error.filename == str(tmp_path / lost / "run")
        (tmp_path / lost).rmdir()
        (tmp_path / "away").rename(tmp_path / lost)
        require_step_3(drives)

    def test_an_empty_mount_point_is_not_taken_for_the_drive(
        self, drives: list[Path], tmp_path: Path
    ) -> None:
        drives[1].rename(tmp_path / "away")
        drives[1].mkdir()
        says = "this directory is empty, and the checkpoints of the store in .*Is the drive mount"
        with pytest.raises(StoreError, match=says):
            construct(drives)
        construct(drives, fresh=True).close()  # what was on it is lost

    def test_new_directories_are_made_and_a_further_one_is_no_part_of_the_store(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "b").mkdir()
        drives = [tmp_path / "x" / "a", tmp_path / "b", tmp_path / "y" / "c"]
        train_in(drives, 1)
        with open_checkpoint(tmp_path / "x" / "a") as found:
            assert found.parts == [str(tmp_path / "b" / "part-1"), str(tmp_path / "y/c/part-1")]
        with pytest.raises(StoreError, match="spread over 3 directories, and 4 were given"):
            construct([*drives, tmp_path / "z"])


@pytest.mark.parametrize("name", ["run", os.fsdecode(b"run\xff")])
def test_paths_may_be_bytes(tmp_path: Path, name: str) -> None:
    store, other = os.fsencode(tmp_path / name), os.fsencode(tmp_path / "other")
    for step in (1, 2):
        model = Model()
        with optimizer_for(model, [store, other], options()) as optimizer:
            optimizer.restore()
            train(model, optimizer, step, seal=False)
            path = optimizer.checkpoint({"step": step}).result().path
    assert path == str(tmp_path / name / "step-00000002")
    with open_checkpoint(store, parts=[other]) as checkpoint:
        assert checkpoint.verify().ok
    assert [found.step for found in list_checkpoints(store, parts=[other])] == [1, 2]
    pin(os.fsencode(path), "best")
    unpin(store, "best")
    assert load_parameters(Model(), store) == 2


def test_what_is_no_path_is_refused_and_parameters_are_looked_at_first(tmp_path: Path) -> None:
    paths: list[Any] = [None, 3, [3], bytearray(b"run")]
    for path in paths:
        with pytest.raises(TypeError, match=r"directory must be a path, or a list of path.* \w+"):
            optimizer_for(Model(), path, options())
    with pytest.raises(UnsupportedParameterError, match="float64"):
        AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], directory=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_processes_that_start_at_once_make_their_directories_together(
    children: Children, tmp_path: Path
) -> None:
    pids = [children.start(second.start_below_new_directories, tmp_path) for _ in range(3)]
    assert eventually(lambda: len(list(tmp_path.glob("ready-*"))) == len(pids))
    (tmp_path / "go").touch()
    for pid in pids:
        assert children.wait(pid, tmp_path).output == "opened\n"


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.second_writers")
    yield server
    server.close()
