"""Files and directories of a store have the permissions that the process asks for, no others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gds.calibration.calibration import Calibration, save_calibration
from offload import DriveTuning
from tests.stores.small import make_model, make_optimizer, step


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(*directories: Path) -> dict[str, tuple[int, bool]]:
    """Return permissions, and whether it is a directory, of everything there is."""
    found = {}
    for directory in directories:
        for path in (directory, *directory.rglob("*")):
            mode = path.stat(follow_symlinks=False).st_mode
            found[str(path)] = (stat.S_IMODE(mode), stat.S_ISDIR(mode))
    return found


def a_calibration() -> Calibration:
    return Calibration(
        read_threads=2,
        write_threads=2,
        request_bytes=1 << 20,
        read_gbps=1.0,
        write_gbps=1.0,
        mixed_gbps=1.0,
        filesystem="ext4",
        device="8:1",
        source="/dev/sda1",
        measured="2026-01-01T00:00:00+00:00",
    )


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077], ids=oct)
def test_everything_in_a_store_has_the_umask(mask: int, tmp_path: Path) -> None:
    directories = [tmp_path / "new" / "first", tmp_path / "new" / "second"]
    seen: dict[str, tuple[int, bool]] = {}
    with umask(mask):
        with make_optimizer(
            make_model(), directory=directories, settings={"drives": DriveTuning(shares=(1, 1))}
        ) as optimizer:
            for number in range(3):
                step(optimizer)
                seen |= modes(tmp_path / "new")
                optimizer.checkpoint({"number": number}).result()
                optimizer.checkpoint({"number": -number - 1}).result()  # replaces the train state
                seen |= modes(tmp_path / "new")
        save_calibration(str(directories[0] / "calibration.json"), a_calibration())
        seen |= modes(tmp_path / "new")
    names = {Path(path).name for path in seen}
    expected = {"LOCK", "store.json", "part.json", "manifest.json", "calibration.json", "part-1"}
    expected |= {"status.json", "history.jsonl"}
    assert expected <= names
    assert {"model.safetensors", "train_state.safetensors", "exp_avg.safetensors"} <= names
    for path, (mode, is_directory) in seen.items():
        assert mode == (0o777 if is_directory else 0o666) & ~mask, f"{path}: {mode:o}"
