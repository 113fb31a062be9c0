"""Processes that run pytest on a copy of the checkout: how they begin, and how they are ended."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NoReturn, TypeAlias

import pytest

from tests.dying import die_with_parent
from tests.mutation.mutation import ROOT, MutationError

Ended: TypeAlias = int | Literal["stopped"] | None
"""A status; None if there was no end in time; ``stopped`` if the machine stood still meanwhile."""

_OWN: Final = ("tests", "offload", "gds", "bench")
"""Packages that a fork must import from the copy."""

_POLL_S: Final = 0.02
_PAUSE_S: Final = 5.0
"""Who sleeps so much too long was stopped, with the tests: what they then say does not count."""

_MEMORY_BYTES: Final = 8 << 30
"""Of address space, besides what is taken already: a loop that never ends must not take all."""


def wait_for(child: int, timeout_s: float) -> Ended:
    """Wait for a process that leads a group, then end what is left of the group."""
    try:
        before = time.monotonic()
        until = before + timeout_s
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            now = time.monotonic()
            if now > until or now - before > _PAUSE_S:
                return "stopped" if now - before > _PAUSE_S else None
            before = now
            time.sleep(_POLL_S)
        return "stopped" if time.monotonic() - before > _PAUSE_S else ended[1]
    finally:
        # Also what a test has started and not ended: it would take time from those to come.
        end_group(child)


def end_group(leader: int) -> None:
    """Kill a process group, if there is anything left of it, and reap its leader."""
    try:
        os.killpg(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def lead_group() -> None:
    """Make this process, which has been forked, the leader of a group, with limits of its own."""
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES, most))


def become_pytest(
    copy: Path, said: Path, command: Sequence[str], plugins: Sequence[object]
) -> NoReturn:
    """Run pytest in this process, which has been forked, on the modules of a copy; then exit.

    A fork has imported torch and pytest already, which takes longer than most tests.

    Args:
        copy: Of the checkout.
        said: File for what is printed; it may be truncated meanwhile.
        command: Arguments of pytest.
        plugins: Of pytest.
    """
    status = 3
    try:
        lead_group()
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "OMP_WAIT_POLICY": "PASSIVE", "FULL_TESTS": "1"}
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no test here needs one
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # in the copy all runs import the same
        sys.dont_write_bytecode = False
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
            del sys.modules[name]
        sys.path = [str(copy), *(path for path in sys.path if Path(path or ".") != ROOT)]
        offload = importlib.import_module("offload")
        if not str(offload.__file__).startswith(str(copy)):
            raise MutationError(f"tests would run with {offload.__file__}, not with {copy}")
        status = pytest.main([*command], plugins=[*plugins])
    except BaseException as error:  # noqa: BLE001  (whatever it is, this process must not go on)
        os.write(2, repr(error).encode())
    finally:
        sys.stdout.flush()
        os._exit(int(status))
