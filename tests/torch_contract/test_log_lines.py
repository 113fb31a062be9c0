"""What an operator reads at level INFO: one line for each event, and none for each step."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import offload
from gds import MemoryBackend, PosixBackend
from gds.calibration import load_calibration
from offload.stream import tuning
from offload.units import rate
from tests.crash.fault_backend import FaultBackend
from tests.eventually import eventually
from tests.stores.files import flip
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, step, train
from tests.threads import since

ROOT = Path(__file__).parent.parent.parent
SECONDS = r"[\d.,]+ (s|ms|us)"
SIZE = r"[\d.,]+ (KiB|MiB|GiB|bytes)"

Lines = Callable[[str], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """Lines of the logger that contain a word, oldest first."""
    with caplog.at_level(logging.INFO, "offload"):
        # A process says once if it has no kernel for updates, whichever test comes first.
        yield lambda word: [m for m in caplog.messages if word in m and "torch's code" not in m]


def test_each_event_of_a_run_is_one_line(lines: Lines, tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    with make_optimizer(make_model(), directory=directory, keep=2) as optimizer:
        train(optimizer, 4)
        written = optimizer.stats().seal_bytes / 1024
    assert eventually(lambda: len(lines("sealed")) == 4 and len(lines("recycled")) == 2)
    for number, line in enumerate(lines("sealed"), 1):
        path = f"{directory}/step-{number:08}"
        assert re.fullmatch(rf"{path}: sealed step {number} in {SECONDS}, {SIZE} written", line)
    assert f"{written:.1f} KiB written" in lines("sealed")[-1]
    kept = Path(directory, "step-00000004").glob("*.safetensors")
    tensors = sum(os.path.getsize(p) for p in kept if p.name != "train_state.safetensors")
    for number, line in enumerate(lines("recycled"), 1):
        size = f"{tensors / 1024:.1f} KiB"
        path = f"{directory}/step-{number:08}"
        says = rf"{path}: recycled step {number} in {SECONDS}, {size} for a later step"
        assert re.fullmatch(says, line)
    with make_optimizer(make_model(), directory=directory, keep=2) as optimizer:
        optimizer.restore()
        read = optimizer.stats().restore_bytes / 1024
        for _ in range(3):
            step(optimizer)
            optimizer.synchronize()
    (line,) = lines("restored")
    path = f"{directory}/step-00000004"
    assert re.fullmatch(rf"{path}: restored step 4 in {SECONDS}, {read:.1f} KiB read", line)
    events = sum(len(lines(word)) for word in ("sealed", "recycled", "restored"))
    assert len(lines("")) == events + len(lines("steps are lost")), lines("")


def test_a_checkpoint_that_is_passed_over_is_one_line_more(lines: Lines) -> None:
    backend = memory_store(2)
    flip(backend, f"{STORE}/step-00000002/model.safetensors", -9)
    with (
        make_optimizer(make_model(), backend) as optimizer,
        pytest.warns(RuntimeWarning, match="is quarantined"),
    ):
        optimizer.restore()
    (line,) = lines("fell back")
    assert re.fullmatch(
        rf"{STORE}/step-00000002: fell back to step 1 after {SECONDS}: this checkpoint is damaged "
        rf"and quarantined, and keeps {SIZE} of the disk",
        line,
    )
    (restored,) = lines("restored")
    assert restored.startswith(f"{STORE}/step-00000001: restored step 1 ")


@pytest.mark.parametrize("is_new", [True, False], ids=["a new process", "the same process"])
def test_checkpoints_that_a_restore_gives_up_are_recycled(lines: Lines, is_new: bool) -> None:
    backend = memory_store(3) if is_new else MemoryBackend()
    with make_optimizer(make_model(), backend, keep=3) as optimizer:
        if not is_new:
            train(optimizer, 3)
        optimizer.restore(1, discard_newer=True)
        recycled = [re.search(r"recycled step (\d)", line) for line in lines("recycled")]
        assert [match and match[1] for match in recycled] == ["3", "2"]


def test_a_failed_seal_is_not_said_to_be_sealed(lines: Lines) -> None:
    backend = FaultBackend(MemoryBackend())
    with make_optimizer(make_model(), backend) as optimizer:
        step(optimizer)
        backend.fail_if(lambda kind, _: kind == "write", 1)
        optimizer.checkpoint().wait()
        backend.repair()
        with pytest.raises(offload.SealError):
            optimizer.synchronize()
        optimizer.checkpoint().result()
    assert eventually(lambda: lines("sealed"))
    assert len(lines("sealed")) == 1


def test_a_calibration_is_made_once_and_says_its_rates(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MIN_STATE_BYTES", 1)  # a small state is not worth measuring for
    stored = tmp_path / "calibration.json"
    for _ in range(2):
        with make_optimizer(make_model(), directory=str(tmp_path)) as optimizer:
            step(optimizer)
            optimizer.synchronize()
            stats = optimizer.stats()
    if not stored.exists():  # the drive is too busy or too small for a measurement
        assert lines("calibrated")[0].startswith(f"{tmp_path}: not calibrated: ")
        return
    measured = json.loads(stored.read_text())
    reads, writes, both = (rate(measured[f"{k}_gbps"] * 1e9) for k in ("read", "write", "mixed"))
    (line,) = lines("calibrated")
    assert re.fullmatch(
        rf"{tmp_path}: calibrated in {SECONDS} for {SIZE} of state: reads {reads}, "
        rf"writes {writes}, both at once {both}",
        line,
    )
    assert "the drive, measured" in stats.summary()
    assert stats.drive_read_gbps == measured["read_gbps"]
    known = load_calibration(str(stored))
    assert known is not None
    known = dataclasses.replace(known, read_threads=3, write_threads=5)
    for asked, tuned in ((None, (3, 5)), (7, (7, 7))):  # options go before what was measured
        backend, drives = PosixBackend(), offload.DriveTuning(threads=asked)
        # No face says what the backend of an optimizer was tuned to.
        tuning.apply_calibration(backend, offload.Options(drives=drives), known, 96 << 20)
        assert (backend.read_threads, backend.write_threads) == tuned
        backend.close()


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("offload")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_a_handler_that_raises_breaks_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Refusing(logging.Handler):
        """Raises, which those of `logging` never do."""

        def handle(self, record: logging.LogRecord) -> bool:
            raise ValueError("the log is gone")

    backend = MemoryBackend()
    with handled_by(Refusing()):
        with make_optimizer(make_model(), backend, keep=1) as optimizer:
            train(optimizer, 3)
        with make_optimizer(make_model(), backend.reopened()) as optimizer:
            checkpoint = optimizer.restore()
            assert checkpoint is not None
            assert checkpoint.verify().ok
            assert checkpoint.step == 3
    assert "ValueError: the log is gone" in capfd.readouterr().err


def test_a_seal_ends_while_the_lock_of_a_handler_is_held() -> None:
    """A collection inside a handler may close an optimizer, which waits for its seal."""

    class Holding(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            self.passed = record.getMessage()

    holding = Holding()
    with handled_by(holding):
        others = threading.enumerate()
        optimizer = make_optimizer(make_model(), MemoryBackend(), keep=1)
        holding.acquire()
        try:
            for _ in range(3):
                step(optimizer)
                optimizer.checkpoint().result(timeout=60)
        finally:
            holding.release()
        sealed = since(others, "offload-seal")
        optimizer.close()
        for thread in sealed:
            thread.join()
        assert "sealed step" in holding.passed or "recycled" in holding.passed


def test_no_line_is_lost_at_the_end_of_a_program(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from tests.stores.small import make_model, make_optimizer, step
optimizer = make_optimizer(make_model(), directory="run")
step(optimizer)
optimizer.checkpoint()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sealed step 1 in") == 1, done.stderr
