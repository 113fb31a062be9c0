"""The parent's handle of the training process: events through a pipe, and signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Self

from offload.demo import DemoError

Event = dict[str, Any]
"""One line that the training process printed; ``event["event"]`` is its kind."""


class Child:
    """A training process. As a context manager it leaves no process behind, whatever happens."""

    def __init__(self, arguments: list[str], *, log: str) -> None:
        """Start ``python -m offload.demo.train``.

        Args:
            arguments: Command line of the process.
            log: Path of the file to which the standard error of the process is appended.
        """
        self._log = log
        environment = {
            # OpenMP threads that spin while they wait for each other make a step twenty times as
            # long beside other programs. Sleeping costs next to nothing on an idle machine.
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            # The model comes from a package. A hub is never asked, not even for a newer version.
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "offload.demo.train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
            )
        if self._process.stdout is None:  # never true; the type checker needs this
            raise DemoError("the training process has no standard output")
        self._fd = self._process.stdout.fileno()
        self._events: deque[Event] = deque()
        self._partial = b""
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def events(self) -> Iterator[Event]:
        """Yield the events as they come, until the process ends.

        Raises:
            DemoError: The process ended with a status other than 0.
        """
        while True:
            while not self._events and not self._ended:
                self._receive()
            if not self._events:
                break
            yield self._events.popleft()
        status = self._process.wait()
        if status != 0:
            raise DemoError(
                f"the training process ended with status {status}; its last "
                f"output:\n{self._last_words()}"
            )

    def wait_stopped(self) -> None:
        """Wait until the process has stopped or ended. It must be about to stop itself."""
        # WNOWAIT leaves the status for `kill`, in case the process has ended.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> int:
        """Send SIGKILL and return the status: the negative number of the signal that ended it."""
        self._process.kill()
        return self._process.wait()

    def _receive(self) -> None:
        data = os.read(self._fd, 1 << 16)
        self._ended = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._events.extend(json.loads(line) for line in lines)

    def _last_words(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-12:]).rstrip()
