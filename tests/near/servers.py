"""Processes ``offload serve`` for tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.dying import dying


@dataclass(frozen=True)
class Server:
    """A server on a socket file."""

    directory: Path
    """Directory with the stores of the runs."""

    socket: Path
    process: subprocess.Popen[str]

    def url(self, run: str) -> str:
        """Return what a client gives as ``directory=``."""
        return f"offload+unix://{self.socket}/{run.replace('torch.', '')}"


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    """Serve from a new directory in a folder; the server ends with the block, or with pytest."""
    directory, socket = folder / "stores", folder / "s"
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "offload", "serve", str(directory)]
    process = subprocess.Popen(
        dying([*command, "--listen", f"unix:{socket}", *arguments]),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving")
            yield Server(directory, socket, process)
        finally:
            process.terminate()
            process.wait()
