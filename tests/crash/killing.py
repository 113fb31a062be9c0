"""Forks children that train, kills them at random moments, and reports how it went.

Run by a server of children, because whoever forks them must be a process that is safe to fork: it
has imported torch, uses one thread, and has opened no store.

    python -m tests.crash.killing       # serves children, as tests.forking says
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from offload import DriveTuning, SealHandle
from tests.forking import serve
from tests.stores.training import Model, backward, optimizer_for, options

PLAN = "killing.json"
"""What is to be done: ``keep``, ``drives``, ``num_kills`` and ``seed``."""

SEAL_EVERY = 3
SHARES = (1, 1, 2)
STEPS_OF_A_LIFE = 9
"""The longest life lasts as long as opening, restoring and so many steps take on this machine.

In time of the processor: on a machine with other work a child gets on when it is given some, and
is killed where it has got to.
"""

BLOCKED_S = 0.01
"""Then it lives on for up to so long: so it may also be killed while it waits for the drive."""

POLL_S = 0.0005

STEPS_AFTER_LAST_KILL = 10
OPENING, RESTORING, STEPPING, SEALING = range(4)
PHASES = ("opening", "restoring", "stepping", "calling checkpoint")
RESTORED, ACKNOWLEDGED = b"R", b"A"
_MESSAGE = struct.Struct("=cq")


class Child:
    """What a forked child does; it tells its parent by a pipe and by two bytes of shared memory."""

    def __init__(
        self, directories: Sequence[str], keep: int, last_step: int, pipe: int, shared: mmap.mmap
    ):
        self.directories = directories
        self.keep = keep
        self.last_step = last_step
        self.pipe = pipe
        self.shared = shared

    def run(self) -> None:
        """Open the store, restore, train to the last step, sealing behind training."""
        model = Model()
        self.shared[0] = OPENING
        settings = options(drives=DriveTuning(shares=SHARES[: len(self.directories)]))
        optimizer = optimizer_for(model, self.directories, settings, keep=self.keep)
        self.shared[0] = RESTORING
        found = optimizer.restore()
        step = found.step if found else 0
        self._tell(RESTORED, step)
        handle: SealHandle | None = None
        while step < self.last_step:
            self.shared[0] = STEPPING
            step += 1
            backward(model, step)
            optimizer.step()
            if handle is not None and handle.done():
                self._tell(ACKNOWLEDGED, handle.result().step)
                handle = None
                self.shared[1] = 0
            if step % SEAL_EVERY == 0 or step == self.last_step:
                self.shared[0] = SEALING
                handle = optimizer.checkpoint({"step": step})
                self.shared[1] = 1  # a seal is in flight, until it is seen to have ended
        if handle is not None:
            self._tell(ACKNOWLEDGED, handle.result().step)
        optimizer.close()

    def _tell(self, what: bytes, step: int) -> None:
        os.write(self.pipe, _MESSAGE.pack(what, step))


class Killer:
    """Forks children one after the other and kills them at moments that a seed chooses."""

    def __init__(self, directory: str, keep: int, drives: int, seed: int) -> None:
        self.directories = [directory, *(f"{directory}-{k}" for k in range(1, drives))]
        self.keep = keep
        self.rng = random.Random(seed)
        self.longest_life_s = 0.0
        """Of the processor's time."""
        self.last_life_s = 0.0
        self.acknowledged = 0
        self.phases: Counter[str] = Counter()
        self.sealing_at_kill = 0
        self.restored: list[int] = []
        self.num_ended_before = 0

    def live(self, last_step: int, *, kill: bool) -> bool:
        """Let one child live; returns whether it was killed."""
        reading, writing = os.pipe()
        shared = mmap.mmap(-1, 2)
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _exit_with(Child(self.directories, self.keep, last_step, writing, shared))
        os.close(writing)
        if kill:
            life_s, blocked_s = (self.rng.uniform(0, s) for s in (self.longest_life_s, BLOCKED_S))
            while processor_time_s(pid) < life_s and not has_ended(pid):
                time.sleep(POLL_S)
            time.sleep(blocked_s)
            os.kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        self.last_life_s = used.ru_utime + used.ru_stime
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status != 0:
            raise RuntimeError(f"a child failed with status {status}")
        with os.fdopen(reading, "rb") as pipe:
            self._listen(pipe.read())
        if killed:
            self.phases[PHASES[shared[0]]] += 1
            self.sealing_at_kill += shared[1]
        shared.close()
        return killed

    def _listen(self, messages: bytes) -> None:
        for what, step in _MESSAGE.iter_unpack(messages):
            if what == RESTORED:
                self.restored.append(step)
                if step < self.acknowledged:
                    raise RuntimeError(f"restored {step}, but {self.acknowledged} was acknowledged")
            # What a process was given back is a promise as well.
            self.acknowledged = max(self.acknowledged, step)


def processor_time_s(pid: int) -> float:
    """Return how long a child has been running on a processor, all of its threads together."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it


def has_ended(pid: int) -> bool:
    """Return whether a child has ended; its status can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_with(child: Child) -> NoReturn:
    try:
        child.run()
    except BaseException:  # noqa: BLE001  (a fork must not run its parent's code)
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def kill_at_random_moments(parent: str) -> None:
    """Do what the plan says, let the last child reach the end, and print how it went, as JSON."""
    directory = f"{parent}/stores"
    plan = json.loads(Path(parent, PLAN).read_text())
    keep, drives, num_kills, seed = (plan[k] for k in ("keep", "drives", "num_kills", "seed"))
    os.mkdir(directory)
    killer = Killer(f"{directory}/killed", keep, drives, seed)
    for number in range(2):
        measured = Killer(f"{directory}/measured{number}", keep, drives, seed)
        measured.live(STEPS_OF_A_LIFE, kill=False)
        killer.longest_life_s = measured.last_life_s
    num_killed = 0
    while num_killed < num_kills:
        num_killed += killer.live(1 << 40, kill=True)
    killer.live(0, kill=False)  # the last one killed may have sealed more than it could tell of
    last_step = killer.acknowledged + STEPS_AFTER_LAST_KILL
    killer.live(last_step, kill=False)
    undisturbed = Killer(f"{directory}/undisturbed", keep, drives, seed)
    undisturbed.live(last_step, kill=False)
    result = {
        "killed": num_killed,
        "phases": killer.phases,
        "sealing": killer.sealing_at_kill,
        "last_step": last_step,
        "acknowledged": killer.acknowledged,
        "restored": killer.restored,
        "left": [sorted(p.name for p in Path(d).iterdir()) for d in killer.directories],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    serve(globals())
