"""Which directories are taken for a store, and that a refusal has made and measured nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    backward,
    optimizer_for,
    options,
    same_bits,
    train,
)
from tests.threads import one_thread

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


def tree(directory: Path) -> dict[str, bytes | None]:
    """Return every file with its bytes and every directory, relative to a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def construct(
    places: Path | Sequence[Path], model: Model | None = None, **changes: object
) -> AdamW:
    """Construct an optimizer; with shares, so that no drive has to be measured first."""
    directories = [places] if isinstance(places, Path) else list(places)
    settings = options(drives=DriveTuning(shares=(1,) * len(directories)))
    return optimizer_for(model or Model(), list(map(str, directories)), settings, **changes)


def train_in(places: Path | Sequence[Path], *steps: int) -> Model:
    """Take steps in a store that is new, or goes on, and seal the last one."""
    model = Model()
    with construct(places, model) as optimizer:
        optimizer.restore()
        train(model, optimizer, *steps, seal=False)
        optimizer.checkpoint({"step": steps[-1]}).result()
    return model


def refused(places: Path | Sequence[Path], root: Path, **changes: object) -> StoreError:
    """Return the error of the constructor, having checked that it has made nothing."""
    before = tree(root)
    directories = [places] if isinstance(places, Path) else list(places)
    with pytest.raises(StoreError) as caught:  # without shares: drives would be measured
        optimizer_for(Model(), list(map(str, directories)), options(), **changes)
    assert tree(root) == before
    return caught.value


BOTH = pytest.mark.parametrize("fresh", [False, True], ids=["resume", "fresh"])


class TestOtherThings:
    @BOTH
    def test_a_directory_that_holds_other_things_is_refused_by_name(
        self, tmp_path: Path, fresh: bool
    ) -> None:
        for name in ("train.py", "data.bin", "README.md", "zebra"):
            (tmp_path / name).write_text("mine")
        error = refused(tmp_path, tmp_path, fresh=fresh)
        assert "holds other files: 'README.md', 'data.bin', 'train.py' and 1 more" in str(error)
        assert f"Give the store a directory of its own, such as '{tmp_path}/store'" in str(error)
        assert error.filename == str(tmp_path)

    @pytest.mark.parametrize("name", ["pins", "store.json", "part-x", "step", "LOCKED", "slot-1"])
    def test_a_name_that_others_use_as_well_makes_no_store(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("{}")
        assert f"holds other files: '{name}'" in str(refused(tmp_path, tmp_path))

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
            assert "holds other files: 'part-1'" in str(refused(directories, tmp_path))
        else:
            AdamW(Model().body_parameters(), directory=directories).close()

    def test_the_current_directory_is_no_exception(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "train.py").write_text("mine")
        monkeypatch.chdir(tmp_path)
        before = tree(tmp_path)
        with pytest.raises(StoreError, match=r"holds other files: 'train\.py'\."):
            AdamW(Model().body_parameters(), directory=".")
        assert tree(tmp_path) == before

    def test_neither_is_the_directory_of_another_drive(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "film.mkv").write_text("mine")
        error = refused([tmp_path / "a", tmp_path / "b"], tmp_path)
        assert "'film.mkv'" in str(error)
        assert not (tmp_path / "a").exists()

    @pytest.mark.parametrize("name", ["lost+found", ".git", ".DS_Store", "calibration.json"])
    def test_some_names_count_as_nothing(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).mkdir()
        train_in(tmp_path / "run", 1)
        assert (tmp_path / "run" / name).is_dir()

    def test_other_things_in_a_store_are_left_alone(self, tmp_path: Path) -> None:
        train_in(tmp_path, 1)
        (tmp_path / "notes.txt").write_text("mine")
        train_in(tmp_path, 2)
        assert (tmp_path / "notes.txt").read_text() == "mine"

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

    def test_a_checkpoint_is_no_store(self, tmp_path: Path) -> None:
        train_in(tmp_path / "run", 1)
        error = refused(tmp_path / "run" / "step-00000001", tmp_path)
        assert "this is a checkpoint, not a store" in str(error)


class TestOrder:
    @pytest.fixture
    def drives(self, tmp_path: Path) -> list[Path]:
        drives = [tmp_path / name / "run" for name in "abc"]
        train_in(drives, 1, 2)
        return drives

    @BOTH
    @pytest.mark.parametrize(
        ("order", "number", "given"),
        [((1, 0, 2), 2, 1), ((2, 1, 0), 3, 1), ((0, 2, 1), 3, 2)],
        ids=["b-a-c", "c-b-a", "a-c-b"],
    )
    def test_another_order_is_refused_and_the_right_one_named(
        self,
        drives: list[Path],
        tmp_path: Path,
        order: list[int],
        number: int,
        given: int,
        fresh: bool,
    ) -> None:
        error = refused([drives[n] for n in order], tmp_path, fresh=fresh)
        assert f"this directory is number {number} of " in str(error)
        assert f", but was given as number {given}: " in str(error)
        assert f"pass directory={list(map(str, drives))!r}" in str(error)
        assert same_bits(dict(train_in(drives, 3).state_dict()), Reference().after(3).model)

    @BOTH
    def test_a_part_alone_is_no_store(
        self, drives: list[Path], tmp_path: Path, fresh: bool
    ) -> None:
        error = refused(drives[1], tmp_path, fresh=fresh)
        assert "this directory is number 2 of the store " in str(error)
        assert "pass the directories of that store in their order" in str(error)

    @BOTH
    def test_unsealed_parts_are_those_of_a_store_as_well(self, tmp_path: Path, fresh: bool) -> None:
        drives = [tmp_path / name for name in "ab"]
        model = Model()
        with construct(drives, model) as optimizer:
            backward(model, 1)
            optimizer.step()
        error = refused(drives[1], tmp_path, fresh=fresh)
        assert "this directory is one of several directories of a store, but not the first" in str(
            error
        )

    @BOTH
    def test_a_store_is_no_second_directory(self, tmp_path: Path, fresh: bool) -> None:
        train_in(tmp_path / "one", 1)
        (tmp_path / "new").mkdir()
        error = refused([tmp_path / "new", tmp_path / "one"], tmp_path, fresh=fresh)
        assert "this directory is the first directory of a store, but was given as number 2" in str(
            error
        )

    @BOTH
    def test_parts_of_another_store_are_no_second_directory(
        self, drives: list[Path], tmp_path: Path, fresh: bool
    ) -> None:
        (tmp_path / "new").mkdir()
        error = refused([tmp_path / "new", drives[2]], tmp_path, fresh=fresh)
        assert "this directory is number 3 of the store " in str(error)
        assert "If that store is gone, remove its part-<k>" in str(error)

    def test_two_stores_whose_directories_were_mixed_up(
        self, drives: list[Path], tmp_path: Path
    ) -> None:
        others = [tmp_path / name for name in "xyz"]
        train_in(others, 1)
        error = refused([drives[0], others[1], drives[2]], tmp_path)
        assert "this directory is number 2 of the store " in str(error)
        assert error.filename == str(others[1])


class TestMissing:
    """A drive that is not mounted."""

    @pytest.fixture
    def drives(self, tmp_path: Path) -> list[Path]:
        drives = [tmp_path / name / "run" for name in "ab"]
        train_in(drives, 1, 2)
        return drives

    @BOTH
    @pytest.mark.parametrize("lost", ["a", "b"])
    def test_a_directory_that_is_not_there_is_not_made(
        self, drives: list[Path], tmp_path: Path, lost: str, fresh: bool
    ) -> None:
        (tmp_path / lost).rename(tmp_path / "away")
        (tmp_path / lost).mkdir()  # the mount point
        error = refused(drives, tmp_path, fresh=fresh)
        assert "this directory does not exist, and " in str(error)
        assert "Is the drive mounted?" in str(error)
        assert error.filename == str(tmp_path / lost / "run")
        (tmp_path / lost).rmdir()
        (tmp_path / "away").rename(tmp_path / lost)
        assert same_bits(dict(train_in(drives, 3).state_dict()), Reference().after(3).model)

    def test_an_empty_mount_point_is_not_taken_for_the_drive(
        self, drives: list[Path], tmp_path: Path
    ) -> None:
        drives[1].rename(tmp_path / "away")
        drives[1].mkdir()
        error = refused(drives, tmp_path)
        assert "this directory is empty, and the checkpoints of the store in " in str(error)
        assert "Is the drive mounted?" in str(error)
        with construct(drives, fresh=True):  # what was on it is lost
            pass

    def test_a_further_drive_is_no_part_of_a_store_that_has_one(self, tmp_path: Path) -> None:
        train_in(tmp_path / "one", 1)
        error = refused([tmp_path / "one", tmp_path / "two"], tmp_path)
        assert "spread over 1 directories, and 2 were given" in str(error)

    def test_new_directories_are_made(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        train_in([tmp_path / "x" / "a", tmp_path / "b", tmp_path / "y" / "c"], 1)
        with open_checkpoint(tmp_path / "x" / "a") as found:
            assert found.parts == [str(tmp_path / "b" / "part-1"), str(tmp_path / "y/c/part-1")]


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


@pytest.mark.parametrize("directory", [None, 3, [3], bytearray(b"run")], ids=repr)
def test_what_is_no_path_is_refused(directory: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"directory must be a path, or a list of paths, got \w+"):
        optimizer_for(Model(), directory, options())
    assert not [*tmp_path.iterdir()]


def test_parameters_are_looked_at_before_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedParameterError, match="float64"):
        AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], directory=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attempt", range(3))
def test_processes_that_start_at_once_make_their_directories_together(
    children: Children, tmp_path: Path, attempt: int
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
