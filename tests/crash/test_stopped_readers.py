"""A reader that was stopped, or hangs, does not end training: the store takes one more slot."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gds import Backend, MemoryBackend, PosixBackend
from offload import StoreBusyError, open_checkpoint
from tests.crash.fault_backend import FaultBackend
from tests.crash.trained import STORE, Training
from tests.dying import dying
from tests.stores.training import Reference, differences, same_bits

TIMEOUT_S = 0.02
HELD = "every expired checkpoint is being read, and the store cannot have another slot"

STOPPED_READER = """
import os, signal, sys
import offload
with offload.open_checkpoint(sys.argv[1]) as checkpoint:
    os.kill(os.getpid(), signal.SIGSTOP)  # as Ctrl-Z does
    print(checkpoint.verify().problems)
"""


def slots(backend: Backend, directory: str = STORE) -> list[str]:
    """Return everything in a directory that takes the space of a slot or a part of one."""
    names = backend.list_dir(directory)
    return [name for name in names if name.startswith((".slot-", "step-", "part-"))]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "offload"):
        yield lambda: [r.getMessage() for r in caplog.records if "one more slot" in r.getMessage()]


@pytest.mark.parametrize(("keep", "drives"), [(1, 1), (2, 2)])
def test_training_goes_on_beside_a_reader_that_was_stopped(
    keep: int, drives: int, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    directories = [str(tmp_path / f"run{number}") for number in range(drives)]
    backend = PosixBackend(direct=False)
    training = Training(backend, directories, keep=keep, reader_timeout_s=TIMEOUT_S)
    read = training.steps_and_seal()
    reader = subprocess.Popen(
        dying([sys.executable, "-c", STOPPED_READER, read]),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid, status = os.waitpid(reader.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        for _ in range(6):
            training.steps_and_seal()
            for directory in directories:
                assert len(slots(backend, directory)) <= keep + 2, "one more than usual at most"
        assert len(log()) == 1, "it is taken once, and kept as long as it is needed"
        assert "readers hold every expired checkpoint" in log()[0]
        assert os.path.exists(read), "what is being read is not touched"
        os.kill(pid, signal.SIGCONT)
        out, _ = reader.communicate()
        assert (reader.returncode, out) == (0, "()\n")
    finally:
        reader.kill()
        reader.wait()
    for _ in range(3):
        newest = training.steps_and_seal()
    assert not os.path.exists(read)
    for directory in directories:
        assert len(slots(backend, directory)) == keep + 1, "it is given back"
    with open_checkpoint(newest, backend=backend) as found:
        assert differences(found, backend, Reference().after(found.step)) == []
    training.optimizer.close()
    backend.close()


@contextmanager
def held_by_readers(training: Training, num: int) -> Iterator[None]:
    """Open each new checkpoint, until there are so many readers, and let them expire."""
    with ExitStack() as readers:
        for _ in range(num):
            path = training.steps_and_seal()
            readers.enter_context(open_checkpoint(path, backend=training.backend))
        yield


@pytest.mark.parametrize("full", ["it is taken", "from the start", "meanwhile", "second drive"])
def test_where_there_is_no_room_for_one_more_readers_are_waited_for(full: str) -> None:
    """In vain: then the step gives up without having begun. Of a second reader there is no more."""
    backend = FaultBackend(MemoryBackend())
    directories = [STORE, "/other"] if full == "second drive" else [STORE]
    training = Training(backend, directories, keep=1, reader_timeout_s=TIMEOUT_S)
    with held_by_readers(training, 2 if full == "it is taken" else 1):
        training.steps_and_seal()
        before = [sorted(slots(backend, directory)) for directory in directories]
        parameters = {name: p.clone() for name, p in training.model.named_parameters()}
        done = training.optimizer.num_steps
        if full == "from the start":
            backend.free_bytes = lambda _: 1000  # type: ignore[method-assign]
        elif full == "meanwhile":  # it is there when it is looked at, and gone when it is taken
            backend.fail("create", 2, forever=True)
        elif full == "second drive":
            backend.fail_if(lambda kind, path: kind == "create" and path.startswith("/other"))
        with (
            pytest.warns(RuntimeWarning, match=HELD),
            pytest.raises(StoreBusyError, match=r"close them, or raise keep= or Options"),
        ):
            training.steps_and_seal()
        after = [sorted(slots(backend, directory)) for directory in directories]
        assert after == before, "nothing is left of the attempt"
        assert same_bits(dict(training.model.named_parameters()), parameters)
        assert training.optimizer.num_steps == done
    backend.repair()
    vars(backend).pop("free_bytes", None)
    training.optimizer.step()  # the gradients are still there
    newest = training.optimizer.checkpoint().result()
    assert differences(newest, backend, Reference().after(done + 1)) == []
    training.steps_and_seal()
    assert len(slots(backend)) == 2
    training.optimizer.close()
