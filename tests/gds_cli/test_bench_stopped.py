"""A `gds bench` that is stopped by a signal removes its scratch file, and says so."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gds.bench import target as module
from tests.dying import dying

TIMEOUT_S = 240.0


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gds.cli", "bench", str(directory), "--allow-small"]
    return subprocess.Popen(
        dying([*command, *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("number", "rw", "when", "more"),
    [
        (signal.SIGINT, "randmixed", "requests of", ["--verify"]),
        (signal.SIGTERM, "randmixed", "requests of", ["--verify"]),
        (signal.SIGTERM, "randmixed", "requests of", ["--size", "64K", "--threads", "4"]),
        (signal.SIGHUP, "read", "writing a scratch file", ["--verify"]),
    ],
    ids=["interrupted", "terminated", "terminated-unverified", "hung-up-while-filling"],
)
def test_the_scratch_file_is_removed(drive, number, rw, when, more):
    mine = drive / "mine"
    mine.write_bytes(b"stays")
    process = start(drive, "--file-size", "64M", "--rw", rw, "--seconds", "3600", *more)
    killer = threading.Timer(TIMEOUT_S, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if when in line:
                break
        assert [path.name[:11] for path in drive.iterdir() if path != mine] == [".gds-bench-"]
        process.send_signal(number)
        out, err = process.communicate()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, err
    assert "stopped; the scratch file is removed" in err
    assert "Traceback" not in err
    assert out == ""
    assert list(drive.iterdir()) == [mine]
    assert mine.read_bytes() == b"stays"


def test_a_signal_during_the_removal_does_not_prevent_it(drive, monkeypatch):
    real = os.unlink
    calls = []

    def unlink(path):
        calls.append(path)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.getpid()  # the handler has run by now
        real(path)

    monkeypatch.setattr(module.os, "unlink", unlink)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(module.StopSignal) as caught,
        module.stopping(),
        module.target_at(str(drive), 1 << 20, seed=0, allow_small=True),
    ):
        assert len(list(drive.iterdir())) == 1
    assert caught.value.number == signal.SIGTERM
    assert len(calls) == 2
    assert list(drive.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
