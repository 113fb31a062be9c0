"""Protocol between a parent and a long-lived process that takes iterations on request.

The parent writes a line of JSON, ``{"do": NAME, ...}``, and reads one line in return. So several
systems, each in its own process and environment, can take turns iteration by iteration.

This module imports only the standard library, so that it runs in any environment.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

Reply = dict[str, Any]
_ROOT = Path(__file__).parent.parent


class PeerError(Exception):
    """The child process ended, failed or does not answer."""


class Peer:
    """Parent's side of the pipe. As a context manager it ends the child process.

    Args:
        label: Name of the child, for messages.
        command: Command of the child (Python and module), run in the root of this project.
        log: Path of the file for the child's standard error.
        environment: Variables to add to the environment of this process.
    """

    def __init__(
        self, label: str, command: list[str], *, log: str, environment: dict[str, str]
    ) -> None:
        from tests.dying import dying  # not in the environment of a child

        self.label = label
        self._log = log
        self._partial = b""
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                dying(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=_ROOT,
                env={**os.environ, **environment},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, what: str, *, timeout_s: float = 900, **details: Any) -> Reply:
        """Send a request to the child, and return its answer.

        Args:
            what: Name of the request.
            timeout_s: Seconds to wait for the answer.
            details: Further values of the request.

        Raises:
            PeerError: The child ended or does not answer. The message has the end of its log.
        """
        if self._process.stdin is None:
            raise PeerError(f"{self.label} has no standard input")
        try:
            self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None
        return self.answer(timeout_s=timeout_s)

    def answer(self, *, timeout_s: float = 900) -> Reply:
        """Wait for the child's next answer, and return it.

        Raises:
            PeerError: The child ended or does not answer in time.
        """
        if self._process.stdout is None:
            raise PeerError(f"{self.label} has no standard output")
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._partial:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise self._failed(f"did not answer in {timeout_s:.0f} s")
            data = os.read(fd, 1 << 16)
            if not data:
                self._process.wait()
                raise self._failed(f"ended with status {self._process.returncode}")
            self._partial += data
        line, self._partial = self._partial.split(b"\n", 1)
        reply: Reply = json.loads(line)
        return reply

    def close(self) -> None:
        """Ask the child to end, and wait for its end."""
        self.ask("close")
        self._process.wait(timeout=120)

    def _failed(self, how: str) -> PeerError:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            last_words = "".join(file.readlines()[-12:]).rstrip()
        return PeerError(f"{self.label} {how}; its last output:\n{last_words}")


def serve(make: Callable[[Reply], tuple[Callable[[int], None], Callable[[], None]]]) -> None:
    """Answer requests, as the child, until one asks to close.

    Args:
        make: Function that is called with the request ``{"do": "make", ...}``. It returns a
            function that takes a number of iterations and ends with nothing in flight, and a
            function that closes.
    """
    # Libraries print to standard output, so answers go through a copy of it.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    iterate: Callable[[int], None] | None = None
    close: Callable[[], None] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: Reply = {}
        if request["do"] == "make":
            iterate, close = make(request)
        elif request["do"] == "iterate" and iterate is not None:
            before, started, cpu = _io_bytes(), time.perf_counter(), time.process_time()
            iterate(request["iterations"])
            reply["seconds"] = (time.perf_counter() - started) / request["iterations"]
            reply["cpu_seconds"] = (time.process_time() - cpu) / request["iterations"]
            moved = [b - a for a, b in zip(before, _io_bytes(), strict=True)]
            reply["read_bytes"], reply["written_bytes"] = moved
        elif request["do"] == "reset_peak":
            reply["reset"] = _reset_peak()
        elif request["do"] == "close" and close is not None:
            close()
        reply["peak_bytes"] = _status_bytes("VmHWM")
        print(json.dumps(reply), file=replies, flush=True)
        if request["do"] == "close":
            break


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _io_bytes() -> tuple[int, int]:
    text = Path("/proc/self/io").read_text()
    read = re.search(r"^read_bytes: (\d+)", text, re.MULTILINE)
    written = re.search(r"^write_bytes: (\d+)", text, re.MULTILINE)
    return int(read[1]) if read else 0, int(written[1]) if written else 0
