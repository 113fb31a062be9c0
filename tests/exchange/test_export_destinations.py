"""Exports to where they cannot be written: named, with what to do next, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import offload
from gds import Backend, PosixBackend, WrapperBackend
from offload import export_checkpoint
from offload.cli import main
from offload.errors import StoreError, StoreFullError
from tests.command_line import runner
from tests.kernel import loop_devices
from tests.kernel.loop_devices import Mounted, mounted
from tests.stores.small import make_model, make_optimizer, train

NEEDED = "2.1 MiB"  # 14 bytes for each of the weights and biases: model, master and two moments


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    with make_optimizer(make_model(400, 400), directory=directory) as optimizer:
        train(optimizer, 1)
    return directory


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Mounted]:
    """A small file system of its own, to be filled."""
    if reason := loop_devices.why_not():
        pytest.skip(reason)
    with mounted("ext4", tmp_path) as found:
        yield found


class SeesSpaceAtFirst(WrapperBackend):
    """A backend to which a disk that is full has looked empty: it was filled by others since."""

    num_asked = 0

    def free_bytes(self, path: str) -> int:
        self.num_asked += 1
        return 1 << 40 if self.num_asked == 1 else super().free_bytes(path)


def export(
    store: Path,
    target: str | Path,
    kind: str,
    told: list[int] | None = None,
    backend: Backend | None = None,
) -> None:
    def progress(done: int, _: int) -> None:
        if told is not None:
            told.append(done)

    with offload.open_checkpoint(store, backend=backend) as opened:
        export_checkpoint(opened, target, kind, progress=progress)


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_disk_without_room_is_named_before_anything_is_read(store, drive, kind):
    drive.fill(leave_bytes=100_000)
    before = names(drive.path)
    told: list[int] = []
    with pytest.raises(StoreFullError) as caught:
        export(store, drive.path / "out", kind, told)
    said = str(caught.value)
    assert said.startswith(f"{drive.path}/out: the export needs at least {NEEDED}, but only ")
    assert "KiB are free: free some space, or export elsewhere. No partial file is left" in said
    assert (told, names(drive.path)) == ([], before)


@pytest.mark.parametrize(
    ("kind", "left"), [("pt", 0), ("hf", 1_200_000), ("safetensors", 50_000), ("dcp", 1_200_000)]
)
def test_a_disk_that_fills_meanwhile_is_named_and_the_export_leaves_nothing(
    store, drive, kind, left
):
    drive.fill(leave_bytes=left)
    before, free = names(drive.path), drive.free_bytes()
    backend = SeesSpaceAtFirst(PosixBackend())
    with pytest.raises(
        StoreFullError, match=rf"out: the export needs at least {NEEDED}, but only "
    ):
        export(store, drive.path / "out", kind, backend=backend)
    backend.close()
    assert names(drive.path) == before
    assert drive.free_bytes() >= free


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_directory_that_may_not_be_written_is_named(store, kind, monkeypatch, capsys):
    """Nobody may make a file in /sys: not root either, and it may be mounted read-only."""
    with pytest.raises(StoreError, match="cannot be written") as caught:
        export(store, "/sys/out", kind)
    assert caught.value.filename == "/sys"
    call = runner("offload", main, monkeypatch, capsys)
    code, out, err = call("export", store, "/sys/out", "--to", kind, "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("error: /sys: cannot be written (")
    assert "check its permissions (ls -ld), or export elsewhere" in err
    assert err.count("\n") == 1


def test_a_file_in_the_place_of_the_directory_is_named(store, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="cannot be written") as caught:
        export(store, tmp_path / "file" / "out", "hf")
    assert caught.value.filename == str(tmp_path / "file")
