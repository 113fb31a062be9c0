"""The steps of the protocol of ranks, on one of them: its messages, and its operations on files.

A step has a label without numbers, so that it is found again in another job. What the thread of a
seal does begins with ``seal:``; everything else with the name of the call of the user that it
belongs to.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from offload.distributed.agreement.peers import FIRST_SIGN
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.engine.seal import SEAL_THREAD
from tests.crash.fault_backend import FaultBackend

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
