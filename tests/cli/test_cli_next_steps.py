"""Errors of the command line say what to do next: what was meant, who may write, what is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload
from gds import StorageError
from offload.errors import StoreError, UnwritableError
from tests.command_line import Run
from tests.kernel import loop_devices
from tests.kernel.loop_devices import mounted
from tests.stores.files import flip_on_disk
from tests.stores.small import make_model, make_optimizer, step, train

NOBODY = 65534


def optimizer_in(directory: Path) -> offload.AdamW:
    return make_optimizer(make_model(64, 40), directory=directory)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 1 and 2, and a pin."""
    store = tmp_path_factory.mktemp("trained") / "store"
    with optimizer_in(store) as optimizer:
        train(optimizer, 2)
        optimizer.pin("mine")
    return store


@pytest.fixture
def read_only(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """The store on a file system that is mounted read-only."""
    if reason := loop_devices.why_not():
        pytest.skip(reason)
    with mounted("ext4", tmp_path) as drive:
        store = shutil.copytree(trained, drive.path / "store")
        (store / ".slot-1").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", drive.path], check=True)
        yield Path(store)


@pytest.fixture
def of_another_user(trained: Path) -> Iterator[Path]:
    """The store in a directory that everybody may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(shutil.copytree(trained, Path(directory) / "store"))


WRITING = (["pin", "{}/step-00000001", "best"], ["unpin", "{}", "mine"], ["prune", "{}"])


@pytest.mark.parametrize("arguments", WRITING, ids=lambda value: value[0])
def test_a_store_of_another_user_says_who_may_write(
    run: Run, of_another_user: Path, arguments: list[str]
) -> None:
    (of_another_user / ".slot-9").mkdir()
    command = [argument.format(of_another_user) for argument in arguments]
    assert run(*command, "--help")[0] == 0
    assert run("verify", of_another_user)[0] == 0  # imports what the other user may not read
    os.seteuid(NOBODY)
    try:
        code, out, err = run(*command)
    finally:
        os.seteuid(0)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith(
        f"error: {of_another_user}: this store cannot be written (Permission denied, at "
    )
    assert (
        f"check who has write permission (ls -l {of_another_user}), and run this as that user"
        in err
    )


def test_a_store_that_is_mounted_read_only_says_so_and_nothing_is_changed(
    run: Run, read_only: Path
) -> None:
    for arguments in WRITING:
        code, out, err = run(*(a.format(read_only) for a in arguments))
        assert (code, out) == (1, "")
        assert f"{read_only}: this store cannot be written (Read-only file system" in err
        assert "mount it for writing" in err
    with optimizer_in(read_only) as optimizer:
        assert optimizer.restore().step == 2
        with pytest.raises(UnwritableError, match="this store cannot be written") as caught:
            step(optimizer)
        assert isinstance(caught.value, StorageError)
        assert isinstance(caught.value, StoreError)
        assert optimizer.num_steps == 2
    with pytest.raises(UnwritableError, match="mount it for writing"):
        offload.pin(read_only, "best")


def test_what_is_above_stores_names_them(run: Run, trained: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "b", "c", "d"):
        shutil.copytree(trained, runs / name)
    (runs / "other").mkdir()
    (runs / "file").write_text("")
    for command in (["ls"], ["verify"], ["show"], ["prune"], ["export", "--to", "pt", "out"]):
        code, out, err = run(command[0], runs, *command[3:], *command[1:3])
        assert (code, out) == (1, "")
        assert "stores below it: a, b, c and 1 more" in err
        assert f"offload verify --all {runs}" in err
        assert err.count("\n") == 1


def test_what_is_not_there_says_what_may_be_meant(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    none, deep, there = tmp_path / "none", tmp_path / "deep", "its store has step-00000001, step-0"
    cases = [
        (["ls", deep], f"`offload verify --all {deep}` looks for stores below it"),
        (["prune", deep], f"`offload verify --all {deep}` looks for stores below it"),
        (["verify", none], "there is no store here; give the directory= that the training was"),
        (["unpin", none, "name"], "check that its drive is mounted"),
        (["show", trained / "step-00000099"], there),
        (["pin", trained / "step-99", "best"], there),
        (["export", trained / "step-x", tmp_path / "out", "--to", "pt"], there),
    ]
    for arguments, said in cases:
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert said in err


def test_an_export_of_a_damaged_checkpoint_says_how_to_export_another(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(trained, tmp_path / "store"))
    flip_on_disk(store / "step-00000002" / "exp_avg.safetensors", 4500)
    target = tmp_path / "out"
    code, _, err = run("export", store, target, "--to", "pt", "--quiet")
    assert code == 1
    said = re.search(r"Nothing was exported\. Run `offload ([^`]*)`", err)
    assert said is not None, err
    run(*said[1].split())
    code, out, _ = run("export", store, target, "--to", "pt", "--quiet")
    assert (code, out.startswith(f"{target}: step 1 of {store}/step-00000001, ")) == (0, True)
