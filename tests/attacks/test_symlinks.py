"""Links, pipes and devices: what the I/O layer opens, and which links of a user are followed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gds
import offload
from gds import PosixBackend, StorageError
from offload.errors import CheckpointError, ManifestError
from tests.stores.small import make_model, make_optimizer, train


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    with_files = PosixBackend(direct=False)
    yield with_files
    with_files.close()


def test_what_is_no_regular_file_is_not_even_opened(
    backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    opened: list[object] = []
    real = os.open

    def noting(path: object, *arguments: int, **keywords: int) -> int:
        opened.append(path)
        return real(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", noting)
    for path in (str(tmp_path / "pipe"), "/dev/null"):
        for writable in (False, True):
            with pytest.raises(StorageError, match="not a regular file") as caught:
                backend.open(path, writable=writable)
            assert caught.value.filename == path
    assert opened == []


def make_store(directory: Path) -> None:
    with make_optimizer(make_model(), directory=directory) as optimizer:
        train(optimizer, 1)


def restored_step(directory: Path) -> int:
    with make_optimizer(make_model(), directory=directory) as optimizer:
        found = optimizer.restore()
        assert found is not None
        return found.step


def opened_step(directory: Path) -> int:
    with offload.open_checkpoint(directory) as found:
        return found.step


@pytest.mark.parametrize(
    "use",
    [
        opened_step,
        lambda store: offload.list_checkpoints(store)[-1].step,
        restored_step,
    ],
    ids=["open_checkpoint", "list_checkpoints", "restore"],
)
def test_the_path_to_a_store_may_be_a_link(use: Callable[[Path], int], tmp_path: Path) -> None:
    make_store(tmp_path / "disk" / "store")
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "latest").symlink_to(Path("runs") / "store")
    assert use(tmp_path / "runs" / "store") == 1
    assert use(tmp_path / "latest") == 1


def test_a_link_to_a_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "store" / "step-00000001")
    with pytest.raises(ManifestError, match="name, or put in its place, the directory itself"):
        offload.open_checkpoint(link)
    inside = tmp_path / "store" / "step-00000009"
    inside.symlink_to("step-00000001")
    with pytest.raises(CheckpointError, match="expected a checkpoint or store directory"):
        offload.open_checkpoint(inside)
    good, bad = offload.list_checkpoints(tmp_path / "store")
    assert (good.valid, bad.valid) == (True, False)
    assert bad.reason.startswith(f"{inside}: something else (a symbolic link, a pipe or a device)")


@pytest.mark.parametrize("what", ["pipe", "dangling", "loop"])
def test_what_is_no_store_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nothing" if what == "dangling" else "store")
    for use in (offload.open_checkpoint, offload.list_checkpoints):
        with pytest.raises((CheckpointError, gds.StorageError)) as caught:
            use(path)
        assert str(path) in str(caught.value)
