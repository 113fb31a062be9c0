"""Tests that have been collected once, by a process that is forked for every mutant.

Importing the library and its tests, and collecting them, takes longer than the tests that notice
most mutants. Here a process does so once. A fork of it gives the functions of the library the code
of a mutant, and runs the tests that were chosen. The files of the copy are edited as well, for
programs that tests start.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.mutation.forks import Ended, become_pytest, end_group, lead_group, wait_for
from tests.mutation.mutation import MutationError
from tests.mutation.swapping import functions_of, swap

NOT_SWAPPED: Final = 77
"""Status of a fork that could not take the code of a mutant."""


@dataclass(frozen=True, slots=True)
class Request:
    """Tests to be run on an edited library."""

    edits: Mapping[str, tuple[str, str]]
    """Texts of a file before and after, by its path."""

    tests: Sequence[str]
    timeout_s: float
    """Seconds for all of them."""

    test_timeout_s: float
    """Seconds for one of them."""


class Collected:
    """The process that has collected tests, seen from the one that has started it.

    Args:
        copy: Of the checkout.
        said: File for what it prints.
        command: Arguments of pytest, the test files among them.
        current: Plugin of pytest.

    Raises:
        MutationError: The tests cannot be collected.
    """

    def __init__(self, copy: Path, said: Path, command: Sequence[str], current: object) -> None:
        self._connection, theirs = Pipe()
        self._said = said
        self._process = os.fork()
        if self._process == 0:
            self._connection.close()
            become_pytest(copy, said, command, [_Server(theirs, copy, said), current])
        theirs.close()
        self._tests: list[str] = self._receive()
        self._known = {*self._tests}

    def names(self, tests: Sequence[str]) -> list[str] | None:
        """Return single tests for names as pytest takes them; None if one is not there."""
        found: dict[str, None] = {}
        for name in tests:
            if name in self._known:
                found[name] = None
                continue
            several = [t for t in self._tests if t.startswith((f"{name}[", f"{name}::"))]
            if not several:
                return None
            found |= dict.fromkeys(several)
        return [*found]

    def run(self, request: Request) -> Ended:
        """Run tests in a fork; the status is `NOT_SWAPPED` if it could not take the edits.

        Raises:
            MutationError: The process has ended.
        """
        self._connection.send(request)
        ended: Ended = self._receive()
        return ended

    def close(self) -> None:
        """End the process."""
        end_group(self._process)
        self._connection.close()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            text = self._said.read_text(errors="replace")[-3000:]
            raise MutationError(
                f"the process that has collected the tests ended: {text}"
            ) from error


class _Server:
    """A plugin of pytest that runs tests in forks, on request, and none by itself."""

    def __init__(self, connection: Connection, copy: Path, said: Path) -> None:
        self._connection = connection
        self._copy = copy
        self._said = said
        self._num_threads = torch.get_num_threads()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Let torch compute on this thread alone, because its other threads would not be forked."""
        torch.set_num_threads(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        """Serve until nobody asks any more; in a fork, return so that pytest goes on."""
        if session.testsfailed:
            return True  # pytest has said what could not be collected
        if len(os.listdir("/proc/self/task")) > 1:
            raise MutationError("a thread has been started while tests were collected")
        items = {item.nodeid: item for item in session.items}
        files = [
            str(file) for part in ("offload", "gds") for file in (self._copy / part).rglob("*.py")
        ]
        functions = functions_of(files)
        gc.collect()
        gc.freeze()  # forks would copy what the collector writes to
        self._connection.send([*items])
        while True:
            try:
                request: Request = self._connection.recv()
            except EOFError:
                return True
            sys.stdout.flush()
            os.truncate(self._said, 0)
            child = os.fork()
            if child:
                self._connection.send(wait_for(child, request.timeout_s))
                continue
            lead_group()
            self._connection.close()
            torch.set_num_threads(self._num_threads)
            for file, (before, after) in request.edits.items():
                if not swap(functions, file, before, after):
                    os._exit(NOT_SWAPPED)
            session.items[:] = [items[name] for name in request.tests]
            # As read for each test by pytest's faulthandler, which ends the process.
            session.config._inicache["faulthandler_timeout"] = request.test_timeout_s
            return None
