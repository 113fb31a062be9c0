"""What an operator reads at level INFO: one line for each event, and none for each step."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import offload
from gds import MemoryBackend
from tests.crash.fault_backend import FaultBackend
from tests.eventually import eventually
from tests.stores.files import flip
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, step, train
from tests.threads import since

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
