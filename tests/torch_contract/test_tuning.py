"""A calibration of the drive is made once, kept in the store, and gives way to the options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import offload
from gds import MemoryBackend, PosixBackend
from gds.calibration.calibration import Calibration, calibrate, load_calibration, save_calibration
from offload.stream import tuning

FRAME_BYTES = 96 << 20
MEASURED = {"read_threads": 3, "write_threads": 5, "request_bytes": 4 << 20}


@pytest.fixture
def known(tmp_path: Path) -> Calibration:
    """A directory that has been calibrated, with an unusual result."""
    made = calibrate(str(tmp_path), budget_s=0.1, file_bytes=16 << 20)
    if made.reason:
        pytest.skip(made.reason)
    found = dataclasses.replace(made, **MEASURED)
    save_calibration(str(tmp_path / tuning.CALIBRATION_NAME), found)
    return found


def settings_of(backend: PosixBackend) -> dict[str, int | None]:
    return {name: getattr(backend, name) for name in MEASURED}


def test_what_was_measured_is_applied(tmp_path: Path, known: Calibration) -> None:
    options = offload.Options()
    backend = PosixBackend()
    found = tuning.find_calibration(backend, str(tmp_path), options, 0)
    assert found == known
    ring = tuning.apply_calibration(backend, options, found, FRAME_BYTES)
    assert settings_of(backend) == MEASURED
    assert ring == known.ring_chunks(FRAME_BYTES) + 2
    backend.close()


def test_options_go_before_what_was_measured(tmp_path: Path, known: Calibration) -> None:
    drives = offload.DriveTuning(threads=7, request_bytes=8192)
    options = offload.Options(drives=drives, ring_chunks=9)
    backend = PosixBackend()
    ring = tuning.apply_calibration(backend, options, known, FRAME_BYTES)
    assert settings_of(backend) == {"read_threads": 7, "write_threads": 7, "request_bytes": 8192}
    assert ring == 9
    backend.close()


@pytest.mark.usefixtures("known")
def test_a_backend_that_was_passed_in_is_left_alone(tmp_path: Path) -> None:
    backend = PosixBackend(read_threads=4)
    options = offload.Options(backend=backend)
    assert tuning.find_calibration(backend, str(tmp_path), options, 1 << 40) is None
    assert tuning.apply_calibration(backend, options, None, FRAME_BYTES) == 6
    assert backend.read_threads == 4
    backend.close()


def test_a_small_state_is_not_worth_measuring_for(tmp_path: Path) -> None:
    backend = PosixBackend()
    assert tuning.find_calibration(backend, str(tmp_path), offload.Options(), 1 << 20) is None
    assert list(tmp_path.iterdir()) == []
    backend.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_large_state_is_measured_for_once(tmp_path: Path, wanted: bool) -> None:
    options = offload.Options(drives=offload.DriveTuning(calibrate=wanted))
    backend = PosixBackend()
    first = tuning.find_calibration(backend, str(tmp_path), options, tuning.MIN_STATE_BYTES)
    path = tmp_path / tuning.CALIBRATION_NAME
    assert path.exists() == (first is not None)
    if not wanted:
        assert first is None
    elif first is not None:
        assert load_calibration(str(path)) == first
        again = tuning.find_calibration(backend, str(tmp_path), options, tuning.MIN_STATE_BYTES)
        assert again == first
    backend.close()


def test_training_uses_and_reports_it(tmp_path: Path, known: Calibration) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    with offload.AdamW([parameter], directory=tmp_path) as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        stats = optimizer.stats()
        assert "the drive, measured" in stats.summary()
        assert offload.list_checkpoints(tmp_path) == []
    assert (stats.drive_read_gbps, stats.drive_mixed_gbps) == (known.read_gbps, known.mixed_gbps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drives": {"threads": 0}}, "threads must be at least 1, got 0"),
        ({"drives": {"request_bytes": 1000}}, "request_bytes must be a multiple of 4096, got 1000"),
        ({"drives": {"shares": (1, 0)}}, r"shares must be whole numbers .* got \(1, 0\)"),
        ({"ring_chunks": 1}, "ring_chunks must be at least 2"),
        (
            {"drives": {"threads": 2}, "backend": MemoryBackend()},
            "no effect on a backend that is passed in",
        ),
        (
            {"drives": {"direct": True}, "backend": MemoryBackend()},
            "direct has no effect on a backend that is passed in",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.Options(**{**settings, "drives": offload.DriveTuning(**settings.get("drives", {}))})


def test_settings_of_drives_that_are_a_dict_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"got dict: write Options\(drives=offload\.DriveTuning"):
        offload.Options(drives={"threads": 2})  # type: ignore[arg-type]
