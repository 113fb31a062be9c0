"""What goes wrong on a rank: operations that fail, kills at steps of the protocol, little room.

A step of the protocol is a message of a rank, or an operation on files. It has a label without
numbers, so that it is found again in another job. What the thread of a seal does begins with
``seal:``; everything else with the name of the call of the user that it belongs to.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident

import torch.distributed as dist

from offload.distributed.agreement.peers import FIRST_SIGN
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.engine.seal_handle import SEAL_THREAD
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_open_files import open_below
from tests.hurry import flag
from tests.process_memory import reset_peak, resident_bytes

_KINDS = {"rename", "create", "make_dir", "remove", "write_bytes", "sync", "sync_dir", "write"}
"""Operations that change something; the others only look."""

_STATE = r"(master|exp_avg|exp_avg_sq)\.(?=safetensors)"
"""Files of state arrays, which count as one."""


class ProtocolSteps:
    """The steps that this rank takes from now on.

    Args:
        backend: Backend of the store.
        folder: Folder that the store is in.
        call: Function that returns the name of the user's call that the main thread is in.
    """

    def __init__(self, backend: FaultBackend, folder: Path, call: Callable[[], str]) -> None:
        self._folder = folder
        self._call = call
        self._lock = threading.Lock()
        self.seen: list[str] = []
        """Labels of the steps so far, each once, in the order of their first time."""
        self._wanted = ""
        self._action: Callable[[], None] = lambda: None
        backend.fail_if(self._operation)
        put, delete = TorchChannel.put, TorchChannel.delete

        def watched_put(
            channel: TorchChannel, key: str, value: str, *, within_s: float | None = None
        ) -> None:
            if "/sign/" not in key or value == FIRST_SIGN:  # the other signs come by the clock
                self._reached(f"put {key}")
            put(channel, key, value, within_s=within_s)

        def watched_delete(channel: TorchChannel, key: str) -> None:
            self._reached(f"delete {key.partition('/')[0]}")
            delete(channel, key)

        for name, function in (("put", watched_put), ("delete", watched_delete)):
            setattr(TorchChannel, name, function)

    def before(self, label: str, action: Callable[[], None]) -> None:
        """Do something, once, before the next step with a label is taken."""
        with self._lock:
            self._wanted, self._action = label, action

    def _operation(self, kind: str, path: str) -> bool:
        if kind in _KINDS:
            name = re.sub(_STATE, "state.", os.path.relpath(path, self._folder))
            self._reached(f"{kind} {name}")
        return False

    def _reached(self, what: str) -> None:
        is_seal = threading.current_thread().name == SEAL_THREAD
        what = re.sub(r"[0-9a-f]{32}", "ID", what)  # of starts and processes
        what = re.sub(r"/\d+(?=/|$)", "", what)  # of exchanges, seals and ranks
        label = f"{'seal' if is_seal else self._call()}: {re.sub('[0-9]+', 'N', what)}"
        with self._lock:
            if label not in self.seen:
                self.seen.append(label)
            if label != self._wanted:
                return
            self._wanted = ""
        self._action()


def kill(folder: Path, ranks: Sequence[int]) -> None:
    """Kill ranks of this job by SIGKILL; this one, if it is among them, is the last."""
    pids = [int((folder / f"pid-{rank}").read_text()) for rank in ranks]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


class FaultyCalls:
    """Calls with which a test lets something go wrong on a rank."""

    backend: FaultBackend
    folder: Path
    """Folder of the job."""
    directory: Path
    """Directory of the store."""
    rank: int
    call: str
    before_bytes = 0
    _steps: ProtocolSteps | None = None

    def reset_peak(self) -> None:
        """Begin to measure how much memory is needed."""
        self.before_bytes = resident_bytes("VmRSS")
        if not reset_peak():
            raise RuntimeError("the kernel does not reset the peak of memory")

    def grown(self) -> int:
        """Return by how many bytes memory has grown at most since `reset_peak`."""
        return resident_bytes("VmHWM") - self.before_bytes

    def fill_drive(self, free_bytes: int) -> None:
        """Let the drive have so little free space from now on."""

        def free(directory: str) -> int:
            del directory
            return free_bytes

        self.backend.free_bytes = free  # type: ignore[method-assign]

    def fail(self, kind: str, text: str, number: int | None = None) -> None:
        """Let the next operation of a kind fail whose path contains a text."""
        self.backend.fail_if(lambda one, path: one == kind and text in path, number)

    def open_files(self, text: str) -> list[str]:
        """Return the paths of the store's files that this process has open, if they have a text."""
        return [path for path in open_below(self.directory) if text in path]

    def num_failed(self) -> int:
        """Return how many operations have failed."""
        return self.backend.num_failed

    def kill_at(self, kind: str, text: str, nth: int = 1) -> None:
        """Kill this rank before the n-th operation of a kind whose path contains a text."""
        seen = 0

        def chosen(one: str, path: str) -> bool:
            nonlocal seen
            seen += one == kind and text in path
            if seen == nth:
                self.hurry()
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        self.backend.fail_if(chosen)

    def hurry(self) -> None:
        """Say that from now on ranks only wait for one that does not come."""
        flag(self.folder).touch()

    def say_pid(self) -> None:
        """Tell the other ranks the process of this one, and wait until all have done so."""
        folder = self.directory.parent
        (folder / f"pid-{self.rank}").write_text(str(os.getpid()))
        dist.barrier()

    def at_step(self, label: str, action: str, victims: Sequence[int] = ()) -> None:
        """Kill ranks, or stop this one, before a step of the protocol that this rank takes.

        Args:
            label: Label of the step, see `ProtocolSteps`; empty to do nothing.
            action: ``kill`` or ``stop``.
            victims: Ranks to kill, which have called `say_pid`.
        """
        folder = self.directory.parent
        self._steps = ProtocolSteps(self.backend, folder, lambda: self.call)

        def act() -> None:
            self.hurry()
            if action == "kill":
                kill(folder, victims)
            else:
                # To this thread: a signal for the process may come after the step.
                signal.pthread_kill(get_ident(), signal.SIGSTOP)

        self._steps.before(label, act)

    def steps_seen(self) -> list[str]:
        """Return the labels of the steps of the protocol since `at_step`."""
        assert self._steps is not None
        return self._steps.seen

    def kill(self) -> None:
        """End by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """End with an exception."""
        raise SystemExit("this rank was told to fail")
