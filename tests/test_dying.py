"""What tests start ends with them, even if they are killed, and hears SIGINT if they ignore it."""

import ctypes
import os
import select
import signal
import subprocess
import sys

from tests.dying import dying
from tests.eventually import TIMEOUT_S

STARTS_THREE = """
import os, signal, subprocess
from tests.dying import dying, let_forks_die

let_forks_die()
sleeper = subprocess.Popen(dying(["sleep", "600"]))
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    grandchild = os.fork()
    if grandchild:
        os.write(writing, str(grandchild).encode())
    signal.pause()
print(sleeper.pid, child, os.read(reading, 100).decode(), flush=True)
signal.pause()
"""


def test_a_command_a_fork_and_the_fork_of_a_fork_end_with_a_process_that_is_killed() -> None:
    command = dying([sys.executable, "-c", STARTS_THREE])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ends = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        finally:
            process.kill()
    assert len(ends) == 3
    for end in ends:
        assert select.select([end], [], [], TIMEOUT_S)[0], "it lives on"
        os.close(end)


def test_a_command_whose_parent_has_ended_meanwhile_does_not_begin() -> None:
    ended = subprocess.run(dying(["echo", "begun"], os.getppid()), stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_these_tests_hear_an_interrupt_and_so_does_what_they_start() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        told = subprocess.run(
            dying(["cat", "/proc/self/status"]), stdout=subprocess.PIPE, text=True, check=True
        )
        with_nothing = subprocess.run(
            ["cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True, check=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert [ignores(signal.SIGINT, one.stdout) for one in (told, with_nothing)] == [False, True]


def ignores(number: int, status: str) -> bool:
    """Return whether a process ignores a signal, as its ``/proc/PID/status`` says."""
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) & 1 << number - 1)


def test_what_these_tests_fork_dies_with_them() -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = asked_to_die_by() - signal.SIGKILL
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def asked_to_die_by() -> int:
    """Return the signal that this process is sent when its parent ends; 0 for none."""
    number = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
    return number.value
