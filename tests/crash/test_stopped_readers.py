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
from offload import open_checkpoint
from offload.errors import StoreBusyError
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_beside_training import Training
from tests.dying import dying
from tests.stores.training import Reference, differences, same_bits

STORE = "/run"
HELD = "every expired checkpoint is being read, and the store cannot have another slot"

STOPPED_VERIFY = """
import os, signal, sys
import offload.checkpoint.checkpoint
from offload.cli import main

def stopped(*arguments, **options):
    os.kill(os.getpid(), signal.SIGSTOP)  # as Ctrl-Z does
    return original(*arguments, **options)

original = offload.checkpoint.checkpoint.verify_tensors
offload.checkpoint.checkpoint.verify_tensors = stopped
sys.argv = ["offload", "verify", sys.argv[1]]
main()
"""


def slots(backend: Backend, directory: str = STORE) -> list[str]:
    """Return everything in a directory that takes the space of a slot or a part of one."""
    names = backend.list_dir(directory)
    return [name for name in names if name.startswith((".slot-", "step-", "part-"))]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "offload"):
        yield lambda: [r.getMessage() for r in caplog.records if "one more slot" in r.getMessage()]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("drives", [1, 2])
def test_training_goes_on_beside_a_verify_that_was_stopped(
    keep: int, drives: int, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    directories = [str(tmp_path / f"run{number}") for number in range(drives)]
    backend = PosixBackend(direct=False)
    training = Training(backend, directories, keep)
    read = training.steps_and_seal()
    verify = subprocess.Popen(
        dying([sys.executable, "-c", STOPPED_VERIFY, read]),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid, status = os.waitpid(verify.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        steps = 1
        for _ in range(6):
            training.steps_and_seal()
            for directory in directories:
                assert len(slots(backend, directory)) <= keep + 2, "one more than usual at most"
            steps += 1
        assert len(log()) == 1, "it is taken once, and kept as long as it is needed"
        assert "readers hold every expired checkpoint" in log()[0]
        assert os.path.exists(read), "what is being read is not touched"
        os.kill(pid, signal.SIGCONT)
        out, _ = verify.communicate()
        assert verify.returncode == 0, out
        assert "all as written" in out
    finally:
        verify.kill()
        verify.wait()
    for _ in range(3):
        newest = training.steps_and_seal()
        steps += 1
    assert not os.path.exists(read)
    for directory in directories:
        assert len(slots(backend, directory)) == keep + 1, "it is given back"
    with open_checkpoint(newest, backend=backend) as found:
        assert differences(found, backend, Reference().after(steps)) == []
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


@pytest.mark.parametrize("keep", [1, 2])
def test_one_slot_more_and_no_second(keep: int) -> None:
    """Two readers that stay make the step give up, without having begun."""
    training = Training(MemoryBackend(), [STORE], keep)
    with held_by_readers(training, 2):
        for _ in range(keep):
            training.steps_and_seal()
        before = {name: value.clone() for name, value in training.model.named_parameters()}
        done = training.optimizer.num_steps
        with (
            pytest.warns(RuntimeWarning, match=HELD),
            pytest.raises(StoreBusyError, match=r"close them, or raise keep= or Options"),
        ):
            training.steps_and_seal()
        assert same_bits(dict(training.model.named_parameters()), before)
        assert training.optimizer.num_steps == done
        assert len(slots(training.backend)) == keep + 2
    training.optimizer.step()  # the gradients are still there
    newest = training.optimizer.checkpoint().result()
    assert differences(newest, training.backend, Reference().after(done + 1)) == []
    training.steps_and_seal()
    assert len(slots(training.backend)) == keep + 1
    training.optimizer.close()


@pytest.mark.parametrize("full", ["from the start", "meanwhile", "second drive"])
def test_where_there_is_no_room_readers_are_waited_for(full: str) -> None:
    inner = MemoryBackend()
    backend = FaultBackend(inner)
    directories = [STORE, "/other"] if full == "second drive" else [STORE]
    training = Training(backend, directories, 1)
    with held_by_readers(training, 1):
        training.steps_and_seal()
        before = sorted(slots(backend)), [slots(backend, d) for d in directories[1:]]
        if full == "from the start":
            inner._capacity_bytes = inner._used_bytes + 1000
        elif full == "meanwhile":  # it is there when it is looked at, and gone when it is taken
            backend.fail("create", 2, forever=True)
        else:
            created = backend.create

            def create(path: str, size_bytes: int) -> object:
                if path.startswith("/other"):
                    backend.fail("create", 1, forever=False)
                return created(path, size_bytes)

            backend.create = create  # type: ignore[method-assign]
        with pytest.warns(RuntimeWarning, match=HELD), pytest.raises(StoreBusyError):
            training.steps_and_seal()
        after = sorted(slots(backend)), [slots(backend, d) for d in directories[1:]]
        assert after == before, "nothing is left of the attempt"
    backend.repair()
    inner._capacity_bytes = None
    if full == "second drive":
        del backend.create
    training.optimizer.step()
    assert training.optimizer.checkpoint().result().verify().ok
    training.optimizer.close()
