"""Processes ``offload serve``, as tests and campaigns start, stop and kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.dying import dying
from tests.eventually import eventually

_ROOT = Path(__file__).parents[2]


class Server:
    """A server of one directory, on a socket file beside it; it dies with this process.

    Args:
        directory: Directory for runs and for what the server says; it is made.
        more: Further arguments of the command.
    """

    def __init__(self, directory: Path, *more: str) -> None:
        self._more = more
        self.runs = directory / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        self.socket = Path(tempfile.mkdtemp(prefix="near-")) / "s"  # a short path: 107 bytes fit
        self._said = directory / "stderr"
        self.start()

    def start(self) -> None:
        """Start the process, and wait until clients can connect."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process."""
        command = [sys.executable, "-m", "offload", "serve", str(self.runs)]
        with self._said.open("a") as said:
            self.process = subprocess.Popen(
                dying([*command, *self._more, "--listen", f"unix:{self.socket}"]),
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self) -> None:
        """Wait until clients can connect."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving: "), self.said()

    def url(self, run: str) -> str:
        """Return the ``directory=`` of a run."""
        return f"offload+unix://{self.socket}/{run}"

    def said(self) -> str:
        """Return all that was written to standard error."""
        return self._said.read_text()

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process in order, and return its exit status."""
        return self._end(number)

    def close(self) -> None:
        """End the process, if it runs, and remove its socket."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.stop()
        self.socket.unlink(missing_ok=True)
        self.socket.parent.rmdir()

    def status(self, field: str) -> int:
        """Return a number in the kernel's status of the process: VmHWM in kB, Threads."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1])

    def open_files(self) -> list[str]:
        """Return what the files of the process are, but for those that come and go."""
        found = []
        for one in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed just now
                found.append(os.readlink(one).partition(":[")[0])
        return sorted(found)

    def at_work(self) -> tuple[list[str], list[str]]:
        """Return the names of the process's threads, and its files, for messages."""
        folder = Path(f"/proc/{self.process.pid}/task")
        return [(one / "comm").read_text() for one in folder.iterdir()], self.open_files()

    def comes_to_rest(self, threads: int, files: list[str]) -> bool:
        """Wait until the process has no more threads and files than it had."""
        return eventually(lambda: self.status("Threads") <= threads and self.open_files() == files)

    def _end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@contextmanager
def serving(directory: Path, *more: str) -> Iterator[Server]:
    """Serve a directory in the block. Whatever happens there, the server shows no traceback."""
    server = Server(directory, *more)
    try:
        yield server
    finally:
        server.close()
    assert "Traceback" not in server.said(), server.said()
