"""Processes that tests start, which must not outlive them: the kernel kills them with their parent.

A run of tests that is killed cannot end what it has started. A command is started as
``Popen(dying([...]))``; a program that forks children calls `let_forks_die` first. In each case it
is the thread that has started a process with whose end it dies, even if others go on.

    python -IS tests/dying.py PARENT COMMAND...     # becomes the command
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here, and not after a fork

_parent: int | None = None
"""The last process that has forked, as its child sees it; None before `let_forks_die`."""


def dying(command: "list[str]", parent: "int | None" = None) -> "list[str]":
    """Return a command that does the same as another, and dies with its parent.

    The command hears all signals, also if this process ignores some.

    Args:
        command: Program and arguments.
        parent: Who will start it; this process if it is None, and 0 for whoever does.
    """
    parent = os.getpid() if parent is None else parent
    return [sys.executable, "-IS", os.path.abspath(__file__), str(parent), *command]


def die_with_parent(parent: int = 0) -> None:
    """Let the kernel kill this process when its parent ends, and die if it has ended already.

    Args:
        parent: The process that is this one's parent if it has not ended; 0 if nobody knows.
    """
    if _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def live_on() -> None:
    """Undo `die_with_parent`: for a test of what outlives its parent, and ends by other means."""
    _prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def let_forks_die() -> None:
    """Let each process that is forked from this one die with its parent, and their forks too."""
    if _parent is None:
        _about_to_fork()
        os.register_at_fork(before=_about_to_fork, after_in_child=_forked)


def _about_to_fork() -> None:
    global _parent
    _parent = os.getpid()


def _forked() -> None:
    assert _parent is not None
    die_with_parent(_parent)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # What is ignored would be by the command too: Python itself ignores SIGPIPE and SIGXFSZ, nohup
    # SIGHUP, and the background of a script SIGINT and SIGQUIT.
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[2], sys.argv[2:])
