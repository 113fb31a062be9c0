"""Faults in the system calls of a child, by strace: it is attached while the child waits."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from tests.dying import dying
from tests.stores.training import ARRAYS

ERRORS: Final = {
    "openat": "EIO",
    "mkdir": "ENOSPC",
    "flock": "ENOLCK",
    "fallocate": "ENOSPC",
    "newfstatat": "EIO",
    "getdents64": "EIO",
    "statfs": "EIO",
    "preadv": "EIO",
    "pwritev": "ENOSPC",
    "fdatasync": "EIO",
    "fsync": "EIO",
    "rename": "EIO",
    "renameat2": "EIO",
}
"""The calls that the library makes in its store, and the error that is worth most in each."""

_ALSO: Final = {"preadv": "preadv2", "pwritev": "pwritev2"}
"""What a C library may call instead."""

HARMLESS: Final = frozenset(
    {"close", "ioctl", "fadvise64", "statx", "lseek", "fcntl", "unlink", "ftruncate", "pwrite64"}
)
"""Further calls: if these fail nothing is read, written or named, but for the hint in LOCK."""

Files = Literal["all", "arrays"]
"""Calls on which files of a store count: all, and directories; or those of state arrays."""

FAULTS: Final = "faults of "  # as tests/conftest.py knows it
"""Begins the name of a test's property: how many were injected into a system call."""

_FILES: Final = (
    "manifest.json",
    "model.safetensors",
    "master.safetensors",
    "exp_avg.safetensors",
    "exp_avg_sq.safetensors",
    "train_state.safetensors",
    "train_state.safetensors.new",
)

_ARRAYS: Final = tuple(f"/{array}.safetensors" for array in ARRAYS)


TIMEOUT_S: Final = 100.0
"""For strace to begin or to end, which it does at once."""


@functools.cache
def why_not() -> str:
    """Say why strace cannot be used here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    sleeper = subprocess.Popen(dying(["sleep", "600"]))
    try:
        tracer = subprocess.Popen(
            dying(["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(sleeper.pid)]),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _wait_attached(tracer, sleeper.pid)
        except RuntimeError as error:
            return f"strace cannot attach: {error}"
        finally:
            tracer.terminate()
            tracer.communicate()
    finally:
        sleeper.kill()
        sleeper.wait()
    return ""


def paths_of(store: str, which: Files) -> list[str]:
    """Return every path that a run in a store uses: strace compares whole paths."""
    slots = [f"{store}/.slot-{k}" for k in range(1, 6)]
    slots += [f"{store}/step-{step:08d}" for step in range(10)]
    files = [f"{slot}/{name}" for slot, name in itertools.product(slots, _FILES)]
    if which == "arrays":
        return [file for file in files if file.endswith(_ARRAYS)]
    return [os.path.dirname(store), store, f"{store}/LOCK", *slots, *files]


@contextmanager
def traced(
    pid: int,
    store: str,
    log: Path,
    calls: Sequence[str],
    injection: str = "",
    *,
    files: Files = "all",
) -> Iterator[None]:
    """Trace a child, and all threads that it has and will have, in the body.

    Args:
        pid: It must not run meanwhile.
        store: Only calls on paths in it count.
        log: Where the calls are written down.
        calls: Names of system calls; none for all.
        injection: Of strace, such as ``error=EIO:when=3``; counted per call and thread.
        files: Those that calls count on.
    """
    command = ["strace", "-f", "-qq", "-o", str(log), "-p", str(pid)]
    for path in paths_of(store, files):
        command += ["-P", path]
    if calls:
        listed = ",".join([*calls, *(_ALSO[call] for call in calls if call in _ALSO)])
        command += ["-e", f"trace={listed}"]
        if injection:
            command += ["-e", f"inject={listed}:{injection}"]
    with Path(f"{log}.stderr").open("w") as stderr:
        tracer = subprocess.Popen(dying(command), stderr=stderr)
        try:
            _wait_attached(tracer, pid)
            yield
            if not has_ended(pid):
                tracer.terminate()  # it lets go of the child
            tracer.wait(TIMEOUT_S)  # by itself, with the child
        finally:
            tracer.kill()
            tracer.wait()


def num_injected(log: Path) -> int:
    """Return how many calls were made to fail."""
    return log.read_text().count("(INJECTED)")


def most_calls_of_a_thread(log: Path) -> dict[str, int]:
    """Return, for each system call, how often the thread called it that did so most."""
    instead = {also: call for call, also in _ALSO.items()}
    found = Counter(
        (match[1], instead.get(match[2], match[2]))
        for match in re.finditer(r"^(\d+) +(\w+)\(", log.read_text(), re.MULTILINE)
    )
    most: dict[str, int] = {}
    for (_, call), number in found.items():
        most[call] = max(most.get(call, 0), number)
    return most


def has_ended(pid: int) -> bool:
    """Return whether the first thread of a process has ended; others may be about to."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_attached(tracer: subprocess.Popen[str], pid: int, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while any(_tracer_of(task) not in (tracer.pid, None) for task in _tasks_of(pid)):
        if tracer.poll() is not None:
            said = tracer.stderr.read() if tracer.stderr else ""
            raise RuntimeError(f"it ended with {tracer.returncode}: {said.strip()}")
        if time.monotonic() > deadline:
            raise RuntimeError("it takes too long")
        time.sleep(0.002)


def _tasks_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def _tracer_of(task: Path) -> int | None:
    """Return who traces a thread, 0 for nobody; None if it has just ended."""
    try:
        status = (task / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    match = re.search(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else 0
